"""Where exact pages go when the pool needs their room, and where they come back from: host memory, then disk, then a
store that several machines share.

A page is known by a hash of all tokens up to its end, so that pages can come and go one by one; the hash begins with
the identity of the model that computed them, so that no model reads another's K/V. Only the exact prefix tree gives
pages here. K/V that draft models have on the same pages is left behind. Knows no request.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.cache.disk import DiskTier
from forerun.cache.pool import PagePool
from forerun.cache.prefix import TOKEN_BYTES, PrefixTree, pack
from forerun.cache.queued import QueuedTier
from forerun.cache.store import open_mooncake, parse_address
from forerun.cache.text_files import TextFiles
from forerun.errors import BadRequest
from forerun.options import check_number

COPY_PAGES = 64  # pages copied at a time where many are


@dataclass(frozen=True)
class TierConfig:
    """What there is beyond the pool; every value is checked on creation."""

    host_bytes: int = 0  # 0: no host tier
    disk: str | Path | None = None  # a folder of its own; None: no disk tier
    disk_bytes: int = 8 << 30
    store: str | None = None  # mooncake://HOST:PORT of a master; None: no store
    store_bytes: int = 512 << 20  # of this process's memory that the store uses

    def __post_init__(self) -> None:
        check_number("host_bytes", self.host_bytes, 0, whole=True)
        check_number("disk_bytes", self.disk_bytes, 1, whole=True)
        if self.disk is not None and (not isinstance(self.disk, (str, Path)) or not str(self.disk)):
            raise BadRequest(f"disk is {self.disk!r}, it must be a folder", "leave it out for no disk tier")
        check_number("store_bytes", self.store_bytes, 0, whole=True)
        if self.store is not None:
            parse_address(self.store)

    @property
    def any(self) -> bool:
        return self.host_bytes > 0 or self.outlives

    @property
    def outlives(self) -> bool:
        """Whether something is kept beyond this process."""
        return self.disk is not None or self.store is not None


class HostTier:
    """Copies of exact pages in main memory, a fixed number of them, the least recently used first to go.

    Where the pool lies on a GPU the memory is pinned, so that copies go at the bus's own speed.
    """

    def __init__(self, nbytes: int, page_shape: Sequence[int], dtype: torch.dtype, pinned: bool) -> None:
        """`page_shape`: of one page's K and V in all layers, [L, 2, page, Hkv, D]."""
        self.page_bytes = math.prod(page_shape) * dtype.itemsize
        self.num_pages = nbytes // self.page_bytes
        self._memory = torch.empty((self.num_pages, *page_shape), dtype=dtype, pin_memory=pinned)
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._free = list(range(self.num_pages))

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: bytes) -> bool:
        return key in self._slots

    @property
    def nbytes(self) -> int:
        return len(self._slots) * self.page_bytes

    def put(self, keys: Sequence[bytes], data: Tensor) -> list[tuple[bytes, Tensor]]:
        """Keep pages, data [n, L, 2, page, Hkv, D] on any device; returns those that had to go for them, as copies."""
        gone: list[tuple[bytes, Tensor]] = []
        for key, page in zip(keys, data, strict=True):
            if self.touch(key):
                continue
            if not self._free:
                oldest, slot = self._slots.popitem(last=False)
                _finish(data.device)  # it may have come in this very call
                gone.append((oldest, self._memory[slot].clone()))
                self._free.append(slot)
            slot = self._free.pop()
            self._memory[slot].copy_(page, non_blocking=True)
            self._slots[key] = slot
        _finish(data.device)  # no slot may be read before its bytes are there
        return gone

    def touch(self, key: bytes) -> bool:
        """Count a page as used, if it is here."""
        if key in self._slots:
            self._slots.move_to_end(key)
        return key in self._slots

    def get(self, keys: Sequence[bytes], device: torch.device) -> Tensor:
        """Copies of pages that are here, [n, L, 2, page, Hkv, D] on a device."""
        out = torch.empty((len(keys), *self._memory.shape[1:]), dtype=self._memory.dtype, device=device)
        for i, key in enumerate(keys):
            self.touch(key)
            out[i].copy_(self._memory[self._slots[key]], non_blocking=True)
        _finish(device)
        return out

    def items(self) -> list[tuple[bytes, Tensor]]:
        """Everything, least recently used first; no copies."""
        return [(key, self._memory[slot]) for key, slot in self._slots.items()]

    def clear(self) -> None:
        self._slots.clear()
        self._free = list(range(self.num_pages))


def _finish(device: torch.device) -> None:
    """Wait for copies between pinned memory and a GPU, which go on behind the caller's back."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class Tiers:
    def __init__(self, pool: PagePool, config: TierConfig, identity: str) -> None:
        """`identity`: of the weights and the precision they run in."""
        kv, size = pool.kv[0][0], pool.page_size
        self.pool = pool
        self._shape = (len(pool.kv), 2, size, *kv.shape[1:])  # of a page: [L, 2, page, Hkv, D]
        self._dtype, self._device = kv.dtype, kv.device
        about = f"{identity} {kv.dtype} {list(self._shape)} {kv.device.type}"
        self._root = hashlib.blake2b(about.encode(), digest_size=16)
        host = HostTier(config.host_bytes, self._shape, kv.dtype, kv.is_cuda) if config.host_bytes else None
        if host is not None and not host.num_pages:
            hint = "raise it, or leave it out"
            raise BadRequest(f"host_bytes is {config.host_bytes:,}, a page has {host.page_bytes:,} bytes", hint)
        self.host = host
        self.disk: DiskTier | None = None
        self.texts: TextFiles | None = None  # of what is on disk
        if config.disk is not None:
            folder = Path(config.disk).expanduser()
            self.disk = DiskTier(folder, config.disk_bytes, self._root.hexdigest())
            self.texts = TextFiles(folder / "texts" / self._root.hexdigest())
        self.outer: list[QueuedTier] = [] if self.disk is None else [self.disk]  # beyond memory, nearest first
        if config.store is not None:
            self.outer.append(open_mooncake(parse_address(config.store), config.store_bytes))

    def keys(self, data: bytes, first: int = 0) -> list[bytes]:
        """Keys of the whole pages of packed tokens, from page `first` on."""
        stride = self.pool.page_size * TOKEN_BYTES
        digest = self._root.copy()
        digest.update(data[: first * stride])
        found = []
        for at in range(first * stride, len(data) - stride + 1, stride):
            digest.update(data[at : at + stride])
            found.append(digest.digest())
        return found

    # -- out of the pool -----------------------------------------------------------------------------------------------

    def spill(self, data: bytes, pages: Sequence[int]) -> None:
        """The pool is about to lose `pages`, the last ones of these packed tokens."""
        pairs = self._pairs(data, pages)
        self._add_text(data)
        if self.host is None:
            for tier in self.outer:
                self._write_new(tier, pairs, wait=False)
            return
        new = [(key, page) for key, page in pairs if not self.host.touch(key)]
        for at in range(0, len(new), COPY_PAGES):
            part = new[at : at + COPY_PAGES]
            gone = self.host.put([key for key, _ in part], self._gather([page for _, page in part]))
            for tier in self.outer if gone else []:
                tier.put([key for key, _ in gone], torch.stack([page for _, page in gone]))

    def _add_text(self, data: bytes) -> None:
        if self.texts is not None and self.disk is not None and not self.disk.off:
            self.texts.add(data)

    def _pairs(self, data: bytes, pages: Sequence[int]) -> list[tuple[bytes, int]]:
        """Keys of `pages`, the last ones of these packed tokens."""
        first = len(data) // (self.pool.page_size * TOKEN_BYTES) - len(pages)
        return list(zip(self.keys(data, first), pages, strict=True))

    def _write_new(self, tier: QueuedTier, pairs: list[tuple[bytes, int]], wait: bool) -> None:
        if tier.off:
            return
        new = [pair for pair, held in zip(pairs, tier.held([key for key, _ in pairs]), strict=True) if not held]
        for at in range(0, len(new), COPY_PAGES):
            part = new[at : at + COPY_PAGES]
            tier.put([key for key, _ in part], self._gather([page for _, page in part]).cpu(), wait)

    def copy(self, data: bytes, pages: Sequence[int], first: int) -> tuple[int, list[bytes], Tensor] | None:
        """The next pages of a text, from page `first` on, that a tier beyond memory has not: up to where they go, their
        keys, and copies to hand to `write`; None when there are no more. Two steps, since writing may wait and reading
        may not."""
        writable = [tier for tier in self.outer if not tier.off]
        if not writable:
            return None
        self._add_text(data[: len(pages) * self.pool.page_size * TOKEN_BYTES])
        keys = self.keys(data)[first : len(pages)]
        lacking = [not all(found) for found in zip(*(tier.held(keys) for tier in writable), strict=True)]
        new = [first + i for i, lacks in enumerate(lacking) if lacks][:COPY_PAGES]
        if not new:
            return None
        return new[-1] + 1, [keys[i - first] for i in new], self._gather([pages[i] for i in new]).cpu()

    def write(self, keys: list[bytes], copies: Tensor) -> None:
        for tier in self.outer:
            tier.put(keys, copies, wait=True)

    # -- back into the pool --------------------------------------------------------------------------------------------

    def restore(self, tokens: Sequence[int], known: Sequence[int]) -> tuple[list[int], dict[str, int]]:
        """Pages of a text after those in the pool, with one reference each, and how many tokens came from which tier.
        The caller has made room for all of the text."""
        keys = self.keys(pack(tokens), len(known))
        served = dict.fromkeys(("host", *(tier.name for tier in self.outer)), 0)
        count = min(self.count(keys), self.pool.free)
        if not count:
            return [], served
        pages = self.pool.allocate(count, after=known[-1] if known else None)
        done = 0
        while done < count:
            name, data = self._read_from_one(keys[done : min(done + COPY_PAGES, count)])
            if not len(data):
                break
            self._write(pages[done : done + len(data)], data)
            served[name] += len(data) * self.pool.page_size
            done += len(data)
        self.pool.release(pages[done:])
        return pages[:done], served

    def count(self, keys: Sequence[bytes]) -> int:
        """How many of these pages, from the first on, are there."""
        there = [self.host is not None and key in self.host for key in keys]
        for tier in self.outer:
            asked = [i for i, found in enumerate(there) if not found]
            for i, found in zip(asked, tier.held([keys[i] for i in asked]), strict=True):
                there[i] = found
        return there.index(False) if False in there else len(there)

    def read(self, keys: Sequence[bytes]) -> Tensor:
        """Copies of pages on the pool's device, [n, L, 2, page, Hkv, D]: as many of the first as are there."""
        parts, done = [torch.empty((0, *self._shape), dtype=self._dtype, device=self._device)], 0
        while done < len(keys):
            parts.append(self._read_from_one(keys[done:])[1].to(self._device))
            if not len(parts[-1]):
                break
            done += len(parts[-1])
        return torch.cat(parts)

    def _read_from_one(self, keys: Sequence[bytes]) -> tuple[str, Tensor]:
        """As many of the first pages as the tier has that holds the first one, and its name; [0, ...]: none has it."""
        host = self.host
        if host is not None and keys[0] in host:
            here = next((i for i, key in enumerate(keys) if key not in host), len(keys))
            return "host", host.get(keys[:here], self._device)
        out = torch.empty((len(keys), *self._shape), dtype=self._dtype, pin_memory=self._device.type == "cuda")
        for tier in self.outer:
            if here := tier.get(keys, out):
                return tier.name, out[:here]
        return "", out[:0]

    # -- tensors -------------------------------------------------------------------------------------------------------

    def _gather(self, pages: Sequence[int]) -> Tensor:
        """A copy of pages on the pool's own device, [n, L, 2, page, Hkv, D]."""
        index = torch.tensor(list(pages), device=self._device)
        out = torch.empty((len(pages), *self._shape), dtype=self._dtype, device=self._device)
        for i, layer in enumerate(self.pool.kv):
            for j, cache in enumerate(layer):
                out[:, i, j] = self._paged(cache)[index]
        return out

    def _write(self, pages: Sequence[int], data: Tensor) -> None:
        index, data = torch.tensor(list(pages), device=self._device), data.to(self._device)
        for i, layer in enumerate(self.pool.kv):
            for j, cache in enumerate(layer):
                self._paged(cache)[index] = data[:, i, j]

    def _paged(self, cache: Tensor) -> Tensor:
        pool = self.pool
        return cache[: pool.num_pages * pool.page_size].view(pool.num_pages, pool.page_size, *cache.shape[1:])

    # -- housekeeping --------------------------------------------------------------------------------------------------

    def figures(self) -> dict[str, Any]:
        """What each tier holds."""
        found: dict[str, Any] = {}
        if self.host is not None:
            found["host"] = {"tokens": len(self.host) * self.pool.page_size, "bytes": self.host.nbytes}
        for tier in self.outer:
            found[tier.name] = {"tokens": len(tier) * self.pool.page_size, "bytes": tier.nbytes, "off": tier.off}
            found[tier.name] |= {"damaged_files": tier.damaged, "dropped_pages": tier.dropped}
        return found

    def clear(self) -> None:
        """Forget what is in memory; files stay."""
        if self.host is not None:
            self.host.clear()

    def close(self, tree: PrefixTree) -> None:
        """Have what the pool and host memory know written, as much of the latest as each tier may hold."""
        for tier in self.outer:
            self._close_tier(tier, tree.texts())

    def _close_tier(self, tier: QueuedTier, texts: list[tuple[bytes, list[int]]]) -> None:
        page_bytes = math.prod(self._shape) * self._dtype.itemsize
        room = tier.limit // page_bytes
        latest: list[list[tuple[bytes, int]]] = []
        for data, pages in texts:
            latest.append(self._pairs(data, pages)[:room])
            room -= len(latest[-1])
        if self.host is not None and room > 0:
            for key, page in self.host.items()[-room:]:
                tier.put([key], page[None].clone(), wait=True)
        for (data, _), pairs in [*zip(texts, latest, strict=True)][::-1]:  # what is written last is the last to go
            self._write_new(tier, pairs, wait=True)
            if pairs:
                self._add_text(data)
        tier.close()
