"""The page pool: references, contiguity, and a size that never changes."""

from __future__ import annotations

import random

import pytest
import torch

from forerun.cache.pool import PagePool
from forerun.models.attention import SLACK
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


def test_memory_is_what_was_configured():
    pool = make_pool(10)
    slack = SLACK // 4 * PagePool.page_bytes(CONFIG, 4, torch.float32)
    assert pool.nbytes - slack == 10 * PagePool.page_bytes(CONFIG, 4, torch.float32) == 10 * 2 * 2 * 4 * 8 * 4
