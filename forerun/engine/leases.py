"""Pages lent to somebody who goes on only when his caller does, such as workers behind an iterator.

Nobody can say when such pages come back. A request that waits for them in the very thread that holds them would wait
for ever, and one that waits elsewhere as long as the holder likes: the first gets an error, for the second pages are
taken back once they have lain idle for long. Knows neither requests nor what the pages are for.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections import deque
from collections.abc import Callable

from forerun.cache.pool import PagePool
from forerun.errors import OutOfPages

PATIENCE = 30.0  # seconds that pages may lie idle while somebody waits for them


class Loan:
    """Pages of one holder, released by `Loans`; he looks at `lost` before he uses them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.pages: list[array[int]] = []  # whatever lies in here is held
        self.lost = 0.0  # seconds that the pages had lain idle when they were taken back
        self._clock = clock
        self.use()

    def use(self) -> None:
        """He goes on, in this thread."""
        self.used, self.thread = self._clock(), threading.get_ident()

    @property
    def idle(self) -> float:
        return self._clock() - self.used

    def check(self) -> None:
        if self.lost:
            raise OutOfPages(
                f"the pages were taken back: nobody had gone on for {self.lost:.0f} s, and other requests needed them",
                "go on sooner or close the iterator; a larger pool (kv_cache_tokens) has room for both",
            )


class Loans:
    def __init__(self, pool: PagePool, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool, self._clock = pool, clock
        self._open: list[Loan] = []
        self._returned: deque[Loan] = deque()

    def __len__(self) -> int:
        return len(self._open)

    def lend(self) -> Loan:
        loan = Loan(self._clock)
        self._open.append(loan)
        return loan

    def give_back(self, loan: Loan) -> None:
        """Its pages are free from the next `collect` on. Safe at any moment, in a garbage collector too."""
        self._returned.append(loan)

    def collect(self) -> None:
        """Release what was given back; between steps."""
        while self._returned:
            self._release(self._returned.popleft())

    def _release(self, loan: Loan) -> None:
        for pages in loan.pages:
            self._pool.release(pages)
        loan.pages = []
        if loan in self._open:
            self._open.remove(loan)

    def recall(self) -> bool:
        """Take back what has lain idle for too long; whether there was any."""
        late = [loan for loan in self._open if loan.idle > PATIENCE]
        for loan in late:
            loan.lost = loan.idle
            self._release(loan)
        return bool(late)

    def hopeless(self) -> OutOfPages | None:
        """What to tell a caller who waits in this thread for pages that only this thread could give back."""
        if not self._open or any(loan.thread != threading.get_ident() for loan in self._open):
            return None
        held = sum(len(pages) for loan in self._open for pages in loan.pages)
        return OutOfPages(
            f"the request finds no room: {held} of {self._pool.num_pages} pages belong to an iterator of workers that "
            "this thread has begun and not ended",
            "take its events to the end or close it first, or raise kv_cache_tokens",
        )
