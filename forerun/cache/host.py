"""The host tier: copies of exact pages in main memory, a fixed number of them, least recently used first to go.

Pages are known by a key that stands for all tokens up to their end. Where the pool lies on a GPU the memory is pinned,
so that copies go at the bus's own speed. Knows no tokens, no pool and no disk.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor


class HostTier:
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
            if not self._free and not self._slots:  # less than one page of memory
                gone.append((key, page.cpu()))
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
