"""Pages that somebody holds who goes on only when his caller does: given back, taken back, and waited for in vain."""

from __future__ import annotations

import threading
from array import array

import pytest

from forerun.cache.pool import PagePool
from forerun.engine.leases import PATIENCE, Loan, Loans
from forerun.errors import OutOfPages
from forerun_research.bench.sharing_tree import small_pool


def lent(loans: Loans, pool: PagePool, count: int) -> Loan:
    loan = loans.lend()
    loan.pages.append(array("i", pool.allocate(count)))
    return loan


def test_pages_come_back_when_they_are_collected_and_only_once() -> None:
    pool = small_pool(8, 4)
    loans = Loans(pool)
    loan = lent(loans, pool, 5)
    loans.give_back(loan)
    assert pool.used == 5 and len(loans) == 1  # whoever gives back may be in the middle of a step
    loans.collect()
    loans.give_back(loan)
    loans.collect()
    assert pool.used == 0 and len(loans) == 0
    loan.check()


def test_only_what_has_lain_idle_for_long_is_taken_back() -> None:
    pool, now = small_pool(8, 4), [100.0]
    loans = Loans(pool, lambda: now[0])
    idle, busy = lent(loans, pool, 3), lent(loans, pool, 2)
    now[0] += PATIENCE + 1
    busy.use()
    assert loans.recall() and pool.used == 2 and not loans.recall()
    with pytest.raises(OutOfPages, match=f"for {PATIENCE + 1:.0f} s"):
        idle.check()
    busy.check()
    loans.give_back(idle)  # its holder ends
    loans.collect()
    assert pool.used == 2


def test_waiting_is_hopeless_only_where_nobody_else_could_give_pages_back() -> None:
    pool = small_pool(8, 4)
    loans = Loans(pool)
    assert loans.hopeless() is None
    lent(loans, pool, 3)
    error = loans.hopeless()
    assert error is not None and "3 of 8 pages" in str(error) and error.hint
    other = threading.Thread(target=lent, args=(loans, pool, 2))
    other.start()
    other.join()
    assert loans.hopeless() is None
