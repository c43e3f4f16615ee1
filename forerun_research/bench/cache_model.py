"""Random operations on the page pool, the prefix tree and its tiers, beside a plain dictionary that says what must be.

Every page holds a number that follows from all tokens up to its end, so a page read back shows whether it is the
right one. After each operation the references of every page are counted: a page without a reference must be free.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from forerun.cache.prefix import PrefixTree, pack
from forerun.cache.tiers import TierConfig, Tiers
from forerun_research.bench.sharing_tree import small_pool

PAGE, LONGEST = 2, 6  # tokens of a page; pages of a text: few texts are possible, so that they meet often
POOL, HOST, SEQUENCES = 96, 64, 12  # pages of the pool and of host memory; texts held at once
PAGE_BYTES = 2 * PAGE * 4 * 4  # K and V, four numbers of four bytes for each token
OPERATIONS = {"read": 40, "match": 20, "fork": 10, "rewind": 10, "close": 10, "evict": 10, "clear": 0.05}
RARE = {"restart": 0.03, "crash": 0.03}


@dataclass
class ModelSequence:
    """A text in use, with references of its own."""

    tokens: list[int]
    pages: list[int]


@dataclass
class CacheModel:
    """What must be: plain dictionaries and sets of texts as packed tokens, each the beginning up to a page's end."""

    tree: dict[bytes, int] = field(default_factory=dict)  # the page of each
    below: set[bytes] = field(default_factory=set)  # what host memory or disk has
    promised: set[bytes] = field(default_factory=set)  # of those, what a clean end has written


class CacheMismatch(Exception):
    """The cache and the dictionary do not agree."""


def run(steps: int = 100_000, seed: int = 0) -> dict[str, Any]:
    """`steps` random operations; what was done and what was found."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="forerun-cache-") as folder:
        world = World(Path(folder), seed)
        difference = None
        try:
            for _ in range(steps):
                world.step()
            leaked = world.end()
        except CacheMismatch as error:
            difference, leaked = f"step {sum(world.counts.values())}: {error}", -1
        finally:
            world.stop()
    return {
        "steps": sum(world.counts.values()),
        "operations": dict(sorted(world.counts.items())),
        "pages_read": dict(world.pages_read),
        "difference": difference,
        "leaked_pages": leaked,
        "seconds": round(time.perf_counter() - start, 2),
        "goal": {"reached": difference is None and leaked == 0},
    }


class World:
    """The cache under test, and the model beside it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.draw, self.model = random.Random(seed), CacheModel()
        self.counts: Counter[str] = Counter()
        self.pages_read: Counter[str] = Counter()
        self.held: list[ModelSequence] = []
        self._folders = (folder / str(number) for number in range(1 << 30))
        self._open(next(self._folders))

    def _open(self, folder: Path) -> None:
        self.folder = folder
        self.pool = small_pool(POOL, PAGE)
        self.tree = PrefixTree(self.pool)
        self.tree.on_evict = self._evicted
        self.tiers = Tiers(self.pool, TierConfig(HOST * PAGE_BYTES, folder, 1 << 30), "cache model")

    def step(self) -> None:
        weights = OPERATIONS | RARE
        name = self.draw.choices(list(weights), list(weights.values()))[0]
        self.counts[name] += 1
        getattr(self, f"_{name}")()
        self._count_references(name)

    def end(self) -> int:
        """Let go of everything; how many pages are not free then."""
        for held in self.held:
            self.pool.release(held.pages)
        self.held.clear()
        self.tree.clear()
        return self.pool.used

    def stop(self) -> None:
        if self.tiers.disk is not None:
            self.tiers.disk.close()

    # -- operations ----------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """What a request does: match, restore, compute the rest, insert, and hold."""
        tokens = self._text()
        known = self.tree.match(tokens)
        self._same("match", known, self._known(tokens))
        self.pool.retain(known)
        if not self._make_room(len(tokens) // PAGE - len(known)):
            self.pool.release(known)
            return
        restored, served = self.tiers.restore(tokens, known)
        chain = list(_beginnings(tokens))
        expected = next((i for i, text in enumerate(chain[len(known) :]) if text not in self.model.below), None)
        rest = len(chain) - len(known)
        self._same("restored pages", len(restored), rest if expected is None else expected)
        self._same("pages by tier", sum(served.values()), len(restored) * PAGE)
        self.pages_read.update({"pool": len(known)} | {tier: count // PAGE for tier, count in served.items()})
        pages = [*known, *restored]
        fresh = self.pool.allocate(len(chain) - len(pages))
        for page, text in zip(fresh, chain[len(pages) :], strict=True):
            self._write(page, text)
        pages += fresh
        for page, text in zip(pages, chain, strict=True):
            self._check_page(page, text)
        self.tree.insert(tokens, pages)
        for page, text in zip(pages, chain, strict=True):
            self.model.tree.setdefault(text, page)
        self._hold(ModelSequence(tokens, pages))

    def _match(self) -> None:
        tokens = self._text()
        known = self.tree.match(tokens)
        self._same("match", known, self._known(tokens))
        for page, text in zip(known, _beginnings(tokens), strict=False):
            self._check_page(page, text)

    def _fork(self) -> None:
        if self.held:
            held = self.draw.choice(self.held)
            self.pool.retain(held.pages)
            self._hold(ModelSequence(list(held.tokens), list(held.pages)))

    def _rewind(self) -> None:
        if self.held:
            held = self.draw.choice(self.held)
            keep = self.draw.randint(0, len(held.pages))
            self.pool.release(held.pages[keep:])
            del held.pages[keep:], held.tokens[keep * PAGE :]
            for page, text in zip(held.pages, _beginnings(held.tokens), strict=True):
                self._check_page(page, text)

    def _close(self) -> None:
        if self.held:
            self.pool.release(self.held.pop(self.draw.randrange(len(self.held))).pages)

    def _evict(self) -> None:
        self._drop(self.draw.randint(1, POOL // 4))

    def _clear(self) -> None:
        self.tree.clear()
        self.model.tree.clear()

    def _restart(self) -> None:
        """A clean end: all that the tree knows is promised to be there again."""
        self.tiers.close(self.tree)
        self.model.below |= set(self.model.tree)
        self.model.promised = set(self.model.below)
        self._forget_process()
        self._open(self.folder)
        self._check_promise()

    def _crash(self) -> None:
        """The process is gone in the middle of whatever it wrote: only files are left, as they are at this moment."""
        left, old = next(self._folders), self.tiers
        left.mkdir()
        for file in sorted(self.folder.rglob("*")):  # a folder comes before what is in it
            try:
                if file.is_dir():
                    (left / file.relative_to(self.folder)).mkdir()
                else:
                    shutil.copy2(file, left / file.relative_to(self.folder))
            except FileNotFoundError:  # renamed or removed by the thread that writes
                continue
        self.stop()
        shutil.rmtree(self.folder)
        self._forget_process()
        self._open(left)
        assert self.tiers.disk is not None and old is not self.tiers
        disk, before = self.tiers.disk, self.model.below
        self.model.below = {text for text in before if self.tiers.keys(text)[-1] in disk}
        self._check_promise()

    # -- the dictionary's side -----------------------------------------------------------------------------------------

    def _text(self) -> list[int]:
        """Sometimes a text that goes on from one in use, sometimes with a page that is not full."""
        start = self.draw.choice(self.held).tokens if self.held and self.draw.random() < 0.3 else []
        length = self.draw.randint(1, LONGEST * PAGE)
        return [*start, *(self.draw.randrange(2) for _ in range(LONGEST * PAGE))][:length]

    def _known(self, tokens: list[int]) -> list[int]:
        pages = []
        for text in _beginnings(tokens):
            if text not in self.model.tree:
                break
            pages.append(self.model.tree[text])
        return pages

    def _make_room(self, count: int) -> bool:
        if count > self.pool.free:
            self._drop(count - self.pool.free)
        return count <= self.pool.free

    def _drop(self, count: int) -> None:
        """Evict; only pages without a reference may go, with nothing referenced below them."""
        in_use = {page for held in self.held for page in held.pages} | {
            page for page in self.model.tree.values() if self.pool.refs[page] > 1
        }
        kept = {text[:end] for text, page in self.model.tree.items() if page in in_use for end in _ends(text)}
        can_go = len(self.model.tree) - len(kept & set(self.model.tree))
        self._same("evicted pages", self.tree.evict(count), min(count, can_go))

    def _evicted(self, data: bytes, pages: list[int]) -> None:
        first = len(data) // (4 * PAGE) - len(pages)
        for i, page in reversed(list(enumerate(pages, first + 1))):
            text = data[: i * 4 * PAGE]
            self._same("evicted page", page, self.model.tree.pop(text, None))
            if any(len(other) > len(text) and other.startswith(text) for other in self.model.tree):
                raise CacheMismatch("a page was evicted before those that follow it")
        self.tiers.spill(data, pages)
        self.model.below |= {data[: i * 4 * PAGE] for i in range(first + 1, first + len(pages) + 1)}

    def _check_promise(self) -> None:
        assert self.tiers.disk is not None
        lost = [text for text in self.model.promised if self.tiers.keys(text)[-1] not in self.tiers.disk]
        if lost:
            raise CacheMismatch(f"{len(lost)} of {len(self.model.promised)} pages written before are gone")

    def _count_references(self, operation: str) -> None:
        expected = np.zeros(POOL, dtype=np.int32)
        np.add.at(expected, list(self.model.tree.values()), 1)
        for held in self.held:
            np.add.at(expected, held.pages, 1)
        if not np.array_equal(expected, self.pool.refs) or self.pool.free != int((expected == 0).sum()):
            raise CacheMismatch(f"after {operation}: references are not those of the tree and the texts in use")

    def _hold(self, held: ModelSequence) -> None:
        self.held.append(held)
        while len(self.held) > SEQUENCES:
            self.pool.release(self.held.pop(0).pages)

    def _forget_process(self) -> None:
        self.held.clear()
        self.model.tree.clear()

    def _write(self, page: int, text: bytes) -> None:
        for cache, sign in zip(self.pool.kv[0], (1, -1), strict=True):
            cache[page * PAGE : (page + 1) * PAGE] = sign * _number(text)

    def _check_page(self, page: int, text: bytes) -> None:
        k, v = (cache[page * PAGE : (page + 1) * PAGE] for cache in self.pool.kv[0])
        number = _number(text)
        if not bool((k == number).all()) or not bool((v == -number).all()):
            raise CacheMismatch(f"page {page} does not hold what its text of {len(text) // 4} tokens says")

    def _same(self, what: str, found: Any, expected: Any) -> None:
        if found != expected:
            raise CacheMismatch(f"{what}: {found}, the dictionary says {expected}")


def _ends(text: bytes) -> range:
    return range(4 * PAGE, len(text) + 1, 4 * PAGE)


def _beginnings(tokens: list[int]) -> Iterator[bytes]:
    """The text up to the end of each whole page."""
    data = pack(tokens[: len(tokens) // PAGE * PAGE])
    return (data[:end] for end in _ends(data))


def _number(text: bytes) -> float:
    return float(1 + zlib.crc32(text) % (1 << 20))
