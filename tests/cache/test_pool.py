"""The page pool: references, contiguity, and a size that never changes."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forerun.cache.pool import PagePool
from forerun.core import EXTRA_KV_SLOTS
from forerun.models.config import ModelConfig

CONFIG = ModelConfig("llama", 64, 16, 2, 2, 1, 8, 32, 512)


def make_pool(pages: int = 32) -> PagePool:
    return PagePool(CONFIG, pages, 4, torch.float32, torch.device("cpu"))


def test_a_page_is_free_when_its_last_holder_lets_go():
    pool = make_pool()
    pages = pool.allocate(3)
    pool.retain(pages)
    pool.release(pages)
    assert pool.used == 3
    pool.release(pages)
    assert pool.used == 0


def test_releasing_twice_is_caught():
    pool = make_pool()
    pages = pool.allocate(1)
    pool.release(pages)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(pages)


def test_pages_are_never_handed_out_twice():
    pool, held, draw = make_pool(), [], random.Random(0)
    for _ in range(2000):
        if held and draw.random() < 0.5:
            pool.release(held.pop(draw.randrange(len(held))))
        elif pool.free:
            held.append(pool.allocate(draw.randint(1, min(3, pool.free))))
        flat = [page for pages in held for page in pages]
        assert len(flat) == len(set(flat)) == pool.used
        assert all(0 <= page < pool.num_pages for page in flat)


def test_a_growing_sequence_stays_in_one_run_beside_others():
    pool = make_pool(64)
    first, second = pool.allocate(4), pool.allocate(4)
    for _ in range(8):
        first += pool.allocate(1, after=first[-1])
        second += pool.allocate(1, after=second[-1])
    for pages in (first, second):
        assert pages == list(range(pages[0], pages[0] + len(pages)))


def test_a_new_sequence_begins_in_the_middle_of_the_longest_free_run():
    """However many came and went: against a look at all pages."""
    pool, draw = make_pool(200), random.Random(5)
    held: list[list[int]] = []
    for _ in range(400):
        count = draw.choice([1, 3, 20])
        if pool.free >= count and draw.random() < 0.6:
            runs, start = list[tuple[int, int]](), None
            for page, refs in enumerate([*pool.refs.tolist(), 1]):
                if not refs and start is None:
                    start = page
                elif refs and start is not None:
                    runs, start = [*runs, (page - start, start)], None
            length, first = max(runs, key=lambda run: (run[0], -run[1]))
            held.append(pool.allocate(count))
            assert held[-1][0] == (first if first == 0 else first + max(0, length - count) // 2)
        elif held:
            pool.release(held.pop(draw.randrange(len(held))))
        assert pool.free == int((pool.refs == 0).sum())


def test_memory_is_what_was_configured():
    pool = make_pool(10)
    slack = EXTRA_KV_SLOTS // 4 * PagePool.page_bytes(CONFIG, 4, torch.float32)
    assert pool.nbytes - slack == 10 * PagePool.page_bytes(CONFIG, 4, torch.float32) == 10 * 2 * 2 * 4 * 8 * 4


@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=25))
def test_many_pages_are_counted_as_one_by_one(steps: list[tuple[int, bool]]):
    """Runs of free pages, side by side as far as they go, and references of lists that hold a page twice."""
    pool, slow = make_pool(120), make_pool(120)
    held: list[list[int]] = []
    for count, gives_back in steps:
        if gives_back and held:
            pages = held.pop(count % len(held))
            pool.release(pages + pages)
            for page in pages + pages:
                slow.release([page])
        elif count <= pool.free:
            after = held[-1][-1] if held else None
            pages, expected = pool.allocate(count, after), _one_by_one(slow, count, after)
            assert pages == expected
            pool.retain(pages)
            for page in pages:
                slow.retain([page])
            held.append(pages)
        assert np.array_equal(pool.refs, slow.refs) and pool.free == slow.free


def _one_by_one(pool: PagePool, count: int, after: int | None) -> list[int]:
    """The rule: the page after the last one, or else a place in the longest free run."""
    pages: list[int] = []
    for left in range(count, 0, -1):
        if after is None or after + 1 >= pool.num_pages or pool.refs[after + 1]:
            after = pool._gap(left) - 1
        after += 1
        pool.refs[after] = 1
        pool.free -= 1
        pages.append(after)
    return pages


def test_misuse_of_many_pages_is_caught():
    pool = make_pool(64)
    pages = pool.allocate(40)
    pool.release(pages)
    with pytest.raises(AssertionError, match="is free"):
        pool.retain(pages)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(pages)
