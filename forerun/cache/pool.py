"""The page pool: a fixed number of KV pages, counted references, nothing else.

A page holds `page_size` entries of every layer. Every holder of a page, a sequence or the prefix tree, has one
reference. The pool knows neither; it only never hands out a page that is referenced, and never grows. Pages of one
sequence are handed out side by side where that is possible, because attention reads a contiguous run in place and has
to copy a scattered one.

A draft model's K/V for the same tokens lies in the same pages, in tensors of its own: one budget, one prefix tree, and
a shared page shares what any model has computed for it.
"""

from __future__ import annotations

import heapq
import math
import mmap
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from forerun.core import EXTRA_KV_SLOTS, KV, KVShape

MIN_VECTORISED_PAGES = 16  # pages from which arrays are quicker than one page after the other


@dataclass
class PartialForward:
    """Tokens of a sequence that a model has read up to some layer: what comes in there, kept to go on from."""

    pages: array[int]  # of the sequence
    first: int  # entry of the first token
    x: torch.Tensor  # [tokens, hidden] inputs of `layer`
    layer: int

    @property
    def end(self) -> int:
        return self.first + self.x.shape[0]


class DraftKV:
    """A draft model's K/V on the same pages."""

    MAX_PARTIAL_FORWARDS = 16

    def __init__(self, kv: KV, num_pages: int) -> None:
        self.kv = kv
        self.filled = np.zeros(num_pages, dtype=np.int32)  # entries of each page, from its first, that have it
        self.lower = np.zeros(num_pages, dtype=np.int32)  # the same for those that have it in the lower layers only
        self._partial: dict[int, PartialForward] = {}  # by sequence

    def full_pages(self, pages: Sequence[int], page_size: int, lower: bool = False) -> int:
        """How many of the pages, from the first, are full; `lower`: K/V of the lower layers is enough."""
        filled = np.maximum(self.filled, self.lower) if lower else self.filled
        return next((n for n, page in enumerate(pages) if filled[page] != page_size), len(pages))

    def keep_partial(self, seq_id: int, reading: PartialForward) -> None:
        """Remember where a reading stopped, for the latest few sequences."""
        self._partial[seq_id] = reading
        while len(self._partial) > self.MAX_PARTIAL_FORWARDS:
            del self._partial[next(iter(self._partial))]

    def partial_forward(self, seq_id: int, pages: array[int], entry: int) -> PartialForward | None:
        """A reading of this sequence, on the pages it has now, that goes on at `entry`."""
        found = self._partial.get(seq_id)
        return found if found is not None and found.pages is pages and found.first <= entry < found.end else None

    def drop_partial(self, seq_id: int) -> None:
        self._partial.pop(seq_id, None)


class PagePool:
    """`num_pages` pages of K and V for each layer; never more.

    Slots start as zeros and only ever hold finite numbers, so attention may read past a sequence's end, beyond the last
    page too, and give what is there no weight.
    """

    def __init__(
        self, shape: KVShape, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.page_size, self.num_pages = page_size, num_pages
        self.kv = self._make_kv(shape, dtype, device)
        self.draft_kvs: list[DraftKV] = []
        self.refs = np.zeros(num_pages, dtype=np.int32)
        self.free = num_pages
        self._runs: list[tuple[int, int]] = []  # heap of free runs (-pages, first), which may have been taken since

    def _make_kv(self, shape: KVShape, dtype: torch.dtype, device: torch.device) -> KV:
        slots = self.num_pages * self.page_size + EXTRA_KV_SLOTS
        size = (slots, shape.num_kv_heads, shape.head_dim)
        return [(_zeros(size, dtype, device), _zeros(size, dtype, device)) for _ in range(shape.num_layers)]

    def add_draft_kv(self, shape: KVShape, dtype: torch.dtype, device: torch.device) -> DraftKV:
        """Room for one more model's K/V on every page."""
        self.draft_kvs.append(DraftKV(self._make_kv(shape, dtype, device), self.num_pages))
        return self.draft_kvs[-1]

    @property
    def used(self) -> int:
        return self.num_pages - self.free

    @property
    def nbytes(self) -> int:
        held = [self.kv, *(draft_kv.kv for draft_kv in self.draft_kvs)]
        return sum(k.nbytes + v.nbytes for kv in held for k, v in kv)

    @staticmethod
    def page_bytes(shape: KVShape, page_size: int, dtype: torch.dtype) -> int:
        return 2 * shape.num_layers * page_size * shape.kv_size * dtype.itemsize

    def pages_for(self, entries: int) -> int:
        return -(-entries // self.page_size)

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """`count` pages with one reference each, next to page `after` where possible. The caller checked `free`."""
        assert count <= self.free, f"{count} pages asked for, {self.free} free"
        pages: list[int] = []
        last = after
        while len(pages) < count:
            if last is None or last + 1 >= self.num_pages or self.refs[last + 1]:
                last = self._gap(count - len(pages)) - 1
            run = self.refs[last + 1 : last + 1 + count - len(pages)]
            taken = np.flatnonzero(run)
            run = run[: taken[0]] if len(taken) else run
            run[:] = 1
            for draft_kv in self.draft_kvs:
                draft_kv.filled[last + 1 : last + 1 + len(run)] = draft_kv.lower[last + 1 : last + 1 + len(run)] = 0
            pages.extend(range(last + 1, last + 1 + len(run)))
            last += len(run)
        self.free -= count
        return pages

    @contextmanager
    def borrow(self, entries: int) -> Iterator[array[int]]:
        """Pages for so many entries, released at the end. The caller checked `free`."""
        pages = array("i", self.allocate(self.pages_for(entries)))
        try:
            yield pages
        finally:
            self.release(pages)

    def _gap(self, count: int) -> int:
        """First page of a place in the longest free run, leaving room to grow for the sequence before it."""
        while True:
            if not self._runs:
                self._add_runs(0, self.num_pages)
            length, start = heapq.heappop(self._runs)
            if self.refs[start : start - length].any():  # pages of it were taken since
                self._add_runs(start, start - length)
                continue
            heapq.heappush(self._runs, (length, start))  # until something is taken
            return start if start == 0 else start + max(0, -length - count) // 2

    def _add_runs(self, first: int, end: int) -> None:
        """Free runs between two pages, into the heap."""
        taken = np.ones(end - first + 2, dtype=bool)  # a byte a page: a large pool has 150,000, and a prompt waits
        taken[1:-1] = self.refs[first:end] != 0
        edges = np.flatnonzero(taken[1:] != taken[:-1])  # start, end, start, ...
        for start, stop in edges.reshape(-1, 2).tolist():
            heapq.heappush(self._runs, (start - stop, first + start))

    def copy(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy whole pages, every model's K/V of them."""
        self._copy(self.kv, source, target)
        self.copy_draft_kv(source, target)

    def copy_draft_kv(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy what other models have computed for the same tokens and the target pages lack."""
        for draft_kv in self.draft_kvs:
            src, dst = np.array(source, dtype=np.int64), np.array(target, dtype=np.int64)
            more = draft_kv.filled[src] > draft_kv.filled[dst]
            more |= (draft_kv.lower[src] > draft_kv.lower[dst]) & (draft_kv.filled[dst] == 0)
            if more.any():
                self._copy(draft_kv.kv, src[more].tolist(), dst[more].tolist())
                draft_kv.filled[dst[more]], draft_kv.lower[dst[more]] = (
                    draft_kv.filled[src[more]],
                    draft_kv.lower[src[more]],
                )

    def _copy(self, kv: KV, source: Sequence[int], target: Sequence[int]) -> None:
        slots = self.num_pages * self.page_size
        src, dst = (torch.tensor(list(pages), device=kv[0][0].device) for pages in (source, target))
        for layer in kv:
            for cache in layer:
                paged = cache[:slots].view(self.num_pages, self.page_size, *cache.shape[1:])  # [P, page, Hkv, D]
                paged[dst] = paged[src]

    def retain(self, pages: Sequence[int]) -> None:
        if len(pages) < MIN_VECTORISED_PAGES:
            for page in pages:
                assert self.refs[page] > 0, f"page {page} is free"
                self.refs[page] += 1
            return
        rows = np.array(pages, dtype=np.int64)
        free = rows[self.refs[rows] <= 0]
        assert not len(free), f"page {free[0]} is free"
        np.add.at(self.refs, rows, 1)

    def release(self, pages: Sequence[int]) -> None:
        if len(pages) < MIN_VECTORISED_PAGES:
            for page in pages:
                assert self.refs[page] > 0, f"page {page} released twice"
                self.refs[page] -= 1
                if self.refs[page] == 0:
                    self.free += 1
                    self._runs.clear()  # they may have grown
            return
        rows = np.array(pages, dtype=np.int64)
        np.subtract.at(self.refs, rows, 1)  # a page may be among them twice, if it is held twice
        left = self.refs[rows]
        assert left.min() >= 0, f"page {rows[left.argmin()]} released twice"
        self.free += len(np.unique(rows[left == 0]))
        self._runs.clear()


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that take no memory on a CPU until they are written.

    Mapped from the system page by page: torch would write them all, and numpy asks for huge pages, each of which costs
    milliseconds at its first write, for every layer and every new place in the pool.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def slots_of(pages: array[int], first: int, end: int, page_size: int) -> np.ndarray:
    """Where entries first .. end lie in the pool, [end - first] int64."""
    page = first // page_size
    starts = np.array(pages[page : -(-end // page_size)], dtype=np.int64) * page_size
    return (starts[:, None] + np.arange(page_size)).reshape(-1)[first - page * page_size :][: end - first]
