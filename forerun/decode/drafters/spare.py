"""A draft's K/V on free pages, without allocating them.

The pool counts these pages as free and allocates them as usual, so drafts never delay or preempt a sequence. Allocating
a page marks it as empty for the draft model; its borrower then finds it lost, and computes what was on it and after it
again. Knows the pool and the draft model's K/V in it; no tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

import numpy as np

from forerun.cache.pool import DraftKV, PagePool


class SparePages:
    """`holder` is any number that identifies one list of pages."""

    def __init__(self, pool: PagePool, draft_kv: DraftKV, make_room: Callable[[int], bool] | None = None) -> None:
        """`make_room`: evicts cached pages until so many are free."""
        self._pool, self._draft_kv, self._make_room = pool, draft_kv, make_room
        self._holders = np.full(pool.num_pages, -1, dtype=np.int64)

    def intact(self, holder: int, pages: array[int]) -> int:
        """How many of the pages, from the first, still hold what was written; the others are dropped."""
        mine = np.array(pages, dtype=np.int64)
        good = (self._pool.refs[mine] == 0) & (self._draft_kv.filled[mine] > 0) & (self._holders[mine] == holder)
        count = len(pages) if good.all() else int(np.argmin(good))
        self.drop(holder, pages, count)
        return count

    def extend(self, holder: int, pages: array[int], count: int) -> bool:
        """Borrow until there are `count` pages; False, and nothing new, where not as many are free."""
        missing = count - len(pages)
        if missing <= 0:
            return True
        free = self._unclaimed()
        if int(free.sum()) < missing and self._make_room is not None:
            self._make_room(self._pool.free + missing - int(free.sum()))
            free = self._unclaimed()
        if int(free.sum()) < missing:
            return False
        found = self._choose(free, missing, pages[-1] if pages else None)
        self._holders[found] = holder
        self._draft_kv.filled[found] = self._pool.page_size
        pages.extend(found)
        return True

    def drop(self, holder: int, pages: array[int], keep: int = 0) -> None:
        """Drop all but the first `keep` pages."""
        gone = np.array(pages[keep:], dtype=np.int64)
        mine = gone[self._holders[gone] == holder]
        self._holders[mine] = -1
        self._draft_kv.filled[mine[self._pool.refs[mine] == 0]] = 0
        del pages[keep:]

    def _unclaimed(self) -> np.ndarray:
        return (self._pool.refs == 0) & (self._holders < 0)

    @staticmethod
    def _choose(free: np.ndarray, count: int, after: int | None) -> list[int]:
        """Adjacent where possible, and at the end of the pool, which is allocated last."""
        found: list[int] = []
        if after is not None:
            while len(found) < count and (after := after + 1) < len(free) and free[after]:
                found.append(after)
        rest = np.flatnonzero(free)[::-1]
        taken = set(found)
        others = [int(page) for page in rest if int(page) not in taken][: count - len(found)]
        return found + others[::-1]
