"""Page leases: released, revoked when idle, and reported where waiting for them would be a deadlock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from forerun.cache.pool import PagePool
from forerun.engine.leases import LEASE_IDLE_S, PageLease, PageLeases
from forerun.errors import OutOfPages
from forerun_research.bench.sharing_tree import small_pool


def leased(leases: PageLeases, pool: PagePool, count: int) -> PageLease:
    lease = leases.open()
    assert lease.extend(lease.hold(), count * pool.page_size)
    return lease


def leases_of(pool: PagePool, clock: Callable[[], float] = time.monotonic) -> PageLeases:
    return PageLeases(pool, lambda count: count <= pool.free, clock)


def test_released_pages_are_freed_when_they_are_collected_and_only_once() -> None:
    pool = small_pool(8, 4)
    leases = leases_of(pool)
    lease = leased(leases, pool, 5)
    leases.release(lease)
    assert pool.used == 5 and len(leases) == 1  # a release may come in the middle of a step
    leases.collect()
    leases.release(lease)
    leases.collect()
    assert pool.used == 0 and len(leases) == 0
    lease.check()


def test_only_leases_that_were_idle_for_long_are_revoked() -> None:
    pool, now = small_pool(8, 4), [100.0]
    leases = leases_of(pool, lambda: now[0])
    idle, busy = leased(leases, pool, 3), leased(leases, pool, 2)
    now[0] += LEASE_IDLE_S + 1
    busy.renew()
    assert leases.revoke_idle() and pool.used == 2 and not leases.revoke_idle()
    with pytest.raises(OutOfPages, match=f"for {LEASE_IDLE_S + 1:.0f} s"):
        idle.check()
    busy.check()
    leases.release(idle)  # its holder ends
    leases.collect()
    assert pool.used == 2


def test_waiting_is_a_deadlock_only_where_no_other_thread_holds_pages() -> None:
    pool = small_pool(8, 4)
    leases = leases_of(pool)
    assert leases.deadlock_error() is None
    leased(leases, pool, 3)
    error = leases.deadlock_error()
    assert error is not None and "3 of 8" in str(error) and error.hint
    other = threading.Thread(target=leased, args=(leases, pool, 2))
    other.start()
    other.join()
    assert leases.deadlock_error() is None


def test_rows_share_pages_and_refuse_to_grow_beyond_the_pool() -> None:
    pool = small_pool(8, 4)
    lease = leases_of(pool).open()
    first = lease.hold()
    assert lease.extend(first, 12) and pool.used == 3
    second = lease.hold(first[:2])
    assert lease.extend(second, 16) and pool.used == 5
    assert not lease.extend(second, 36) and len(second) == 4
    lease.drop(first)
    assert pool.used == 4 and lease.rows == [second]
