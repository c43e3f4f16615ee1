"""Page leases for generators, revoked after 30 s idle while others wait.

A generator (workers behind an iterator) runs only while its caller reads from it, so there is no bound on when its
pages come back. A request that waits for those pages in the same thread would deadlock: it fails with an error. A
request of another thread waits, until the lease has been idle for `LEASE_IDLE_S` and is revoked. Knows neither
requests nor what the pages are for.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable

from forerun.cache.pool import PagePool
from forerun.errors import OutOfPages

LEASE_IDLE_S = 30.0  # a lease idle for longer is revoked when a request cannot run without its pages


class PageLease:
    """Rows of pages of one holder, released by `PageLeases`. The holder calls `check` before it uses them."""

    def __init__(self, pool: PagePool, make_room: Callable[[int], bool], clock: Callable[[], float]) -> None:
        self._pool, self._make_room, self._clock = pool, make_room, clock
        self.rows: list[array[int]] = []  # every page in here is held
        self.revoked_after_s: float | None = None  # how long it had been idle when it was revoked
        self.renew()

    def hold(self, shared: Iterable[int] = ()) -> array[int]:
        """A new row, which begins with pages that others hold too; between steps, as all below."""
        row = array("i", shared)
        self._pool.retain(row)
        self.rows.append(row)
        return row

    def extend(self, row: array[int], num_tokens: int) -> bool:
        """Allocate until a row has room for so many tokens; False, with nothing allocated, where there is none."""
        missing = self._pool.pages_for(num_tokens) - len(row)
        if not self._make_room(missing):
            return False
        row.extend(self._pool.allocate(missing, after=row[-1] if row else None))
        return True

    def drop(self, row: array[int]) -> None:
        self.rows = [held for held in self.rows if held is not row]
        self._pool.release(row)

    def renew(self) -> None:
        """Record a use by the current thread."""
        self.used_at, self.thread = self._clock(), threading.get_ident()

    @property
    def idle_s(self) -> float:
        return self._clock() - self.used_at

    def check(self) -> None:
        """Raise where the lease was revoked."""
        if self.revoked_after_s is not None:
            raise OutOfPages(
                f"the page lease was revoked: it had been idle for {self.revoked_after_s:.0f} s, and other requests "
                "needed its pages",
                "read on sooner or close the iterator; a larger pool (kv_cache_tokens) has room for both",
            )


class PageLeases:
    """`make_room`: frees so many pages of those that are merely cached, as far as it can; whether they are free."""

    def __init__(
        self, pool: PagePool, make_room: Callable[[int], bool], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pool, self._make_room, self._clock = pool, make_room, clock
        self._open: list[PageLease] = []
        self._returned: deque[PageLease] = deque()

    def __len__(self) -> int:
        return len(self._open)

    def open(self) -> PageLease:
        lease = PageLease(self._pool, self._make_room, self._clock)
        self._open.append(lease)
        return lease

    def release(self, lease: PageLease) -> None:
        """Free its pages at the next `collect`. Safe at any moment, in a garbage collector too."""
        self._returned.append(lease)

    def collect(self) -> None:
        """Free the pages of released leases; between steps."""
        while self._returned:
            self._free(self._returned.popleft())

    def _free(self, lease: PageLease) -> None:
        for row in list(lease.rows):
            lease.drop(row)
        if lease in self._open:
            self._open.remove(lease)

    def revoke_idle(self) -> bool:
        """Revoke the leases that have been idle for too long; whether there were any."""
        idle = [lease for lease in self._open if lease.idle_s > LEASE_IDLE_S]
        for lease in idle:
            lease.revoked_after_s = lease.idle_s
            self._free(lease)
        return bool(idle)

    def deadlock_error(self) -> OutOfPages | None:
        """The error of a request that waits in this thread for pages that only this thread could release."""
        if not self._open or any(lease.thread != threading.get_ident() for lease in self._open):
            return None
        held = sum(len(row) for lease in self._open for row in lease.rows)
        return OutOfPages(
            f"no pages for this request: {held} of {self._pool.num_pages} are leased to an iterator of workers that "
            "this thread has started and not finished",
            "read its events to the end or close it first, or raise kv_cache_tokens",
        )
