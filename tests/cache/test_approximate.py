"""Approximate K/V that is kept: under its key only, as copies only, and never in the way of what is exact."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
import torch

from forerun.cache.approximate import ApproximateCache, ApproximatePages
from forerun.cache.pool import PagePool
from forerun.cache.prefix import PrefixTree
from forerun.models.config import ModelConfig

CONFIG = ModelConfig("llama", 64, 16, 3, 1, 1, 2, 32, 512)
PAGE, LAYERS = 4, 3
TEXT = list(range(1, 21))  # five pages


def make(pages: int = 64) -> tuple[PagePool, ApproximateCache]:
    pool = PagePool(CONFIG, pages, PAGE, torch.float32, torch.device("cpu"))
    pool.add_draft_kv(CONFIG, torch.float32, torch.device("cpu"))
    return pool, ApproximateCache(pool)


def put(pool: PagePool, cache: ApproximateCache, key: str, tokens: list[int], exact: array[int] | None = None) -> None:
    """A sequence that drafted its prompt on pages of its own after some exact ones, and is gone."""
    exact = exact or array("i")
    pool.retain(exact)
    pages = array("i", [*exact, *pool.allocate(len(tokens) // PAGE - len(exact))])
    for page in pages[len(exact) :]:
        fill(pool, page, float(page + 1))
        pool.draft_kvs[0].filled[page] = PAGE
    depths = np.ones(len(tokens), dtype=np.int16)
    depths[: len(exact) * PAGE] = LAYERS
    cache.insert(key, tokens, ApproximatePages(pages, len(exact) * PAGE, depths))
    pool.release(pages)


def fill(pool: PagePool, page: int, value: float) -> None:
    for kv in (pool.kv, pool.draft_kvs[0].kv):
        for layer in kv:
            for part in layer:
                part[page * PAGE : (page + 1) * PAGE] = value


def content(pool: PagePool, page: int) -> set[float]:
    found = (
        part[page * PAGE : (page + 1) * PAGE] for kv in (pool.kv, pool.draft_kvs[0].kv) for pair in kv for part in pair
    )
    return {float(x) for part in found for x in part.unique()}


def test_reading_copies_every_models_pages():
    pool, cache = make()
    put(pool, cache, "a", TEXT)
    kept = cache._match("a", TEXT)
    own = array("i", pool.allocate(6))
    depths = cache.read("a", [*TEXT, 99, 99], 0, own)
    assert depths.tolist() == [1] * 20
    for mine, theirs in zip(own, kept, strict=False):
        assert mine != theirs and content(pool, mine) == {theirs + 1.0}
        assert pool.draft_kvs[0].filled[mine] == PAGE
    assert content(pool, own[5]) == {0.0}
    fill(pool, own[0], -1.0)  # repair
    assert content(pool, kept[0]) == {kept[0] + 1.0}


def test_what_is_exact_already_is_not_read():
    pool, cache = make()
    put(pool, cache, "a", TEXT)
    own = array("i", pool.allocate(5))
    fill(pool, own[0], 7.0)
    fill(pool, own[1], 7.0)
    assert cache.read("a", TEXT, 8, own).tolist() == [LAYERS] * 8 + [1] * 12
    assert content(pool, own[0]) == content(pool, own[1]) == {7.0} and content(pool, own[2]) != {7.0}
    assert cache.read("a", [5, 5, 5, 5], 0, own).tolist() == []
    assert cache.read("a", TEXT, 20, own).tolist() == [LAYERS] * 20


def test_what_a_draft_model_read_can_be_had_without_the_rest():
    pool, cache = make()
    put(pool, cache, "a", TEXT)
    kept, own = cache._match("a", TEXT), array("i", pool.allocate(4))
    pool.draft_kvs[0].filled[own[3]] = PAGE  # has it already
    cache.copy_draft_kv_of(TEXT, 8, own)
    assert [int(pool.draft_kvs[0].filled[page]) for page in own] == [0, 0, PAGE, PAGE]
    assert content(pool, own[1]) == content(pool, own[3]) == {0.0}
    assert content(pool, own[2]) == {0.0, kept[2] + 1.0}  # the plane's, not the target's
    assert float(pool.kv[0][0][own[2] * PAGE, 0, 0]) == 0.0


def test_keys_do_not_mix():
    pool, cache = make()
    put(pool, cache, "a", TEXT)
    assert cache.known("a", [*TEXT, 1]) == 20 and cache.known("b", TEXT) == 0
    own = array("i", pool.allocate(5))
    assert cache.read("b", TEXT, 0, own).tolist() == []
    assert content(pool, own[0]) == {0.0}


def test_exact_pages_that_both_list_can_be_evicted():
    pool, cache = make(8)
    tree = PrefixTree(pool)
    exact = array("i", pool.allocate(2))
    tree.insert(TEXT[:8], exact)
    pool.release(exact)
    put(pool, cache, "a", TEXT, exact)
    assert pool.used == 5 and cache.num_pages == 5
    assert tree.evict(8) == 0  # the approximate text holds them
    cache.evict(8)
    assert cache.num_pages == 0 and pool.used == 2 and tree.match(TEXT) == list(exact)
    assert tree.evict(8) == 2 and pool.used == 0


def test_pages_that_a_sequence_still_uses_stay():
    pool, cache = make(8)
    put(pool, cache, "a", TEXT)
    used = cache._match("a", TEXT)
    pool.retain(used)
    assert cache.evict(3) == 0 and cache.known("a", TEXT) == 20
    pool.release(used)
    assert cache.evict(3) == 3 and cache.known("a", TEXT) == 8


def test_the_key_that_was_not_used_for_longest_goes_first():
    pool, cache = make()
    put(pool, cache, "old", TEXT)
    put(pool, cache, "new", TEXT)
    cache.known("old", TEXT)
    assert cache.evict(5) == 5
    assert cache.known("old", TEXT) == 20 and cache.known("new", TEXT) == 0


def test_forgetting_a_text_leaves_what_others_share():
    pool, cache = make()
    put(pool, cache, "a", TEXT)
    put(pool, cache, "a", [*TEXT[:8], 50, 51, 52, 53])
    put(pool, cache, "b", TEXT)
    cache.forget(TEXT)
    assert cache.known("a", TEXT) == 8 and cache.known("b", TEXT) == 0
    assert cache.known("a", [*TEXT[:8], 50, 51, 52, 53]) == 12
    assert int(pool.refs.sum()) == cache.num_pages == 3
    assert cache.evict(99) == 3 and pool.used == 0
    put(pool, cache, "a", TEXT)
    cache.clear()
    assert pool.used == 0 and cache.num_pages == 0


def test_its_pages_are_no_sequence_of_numbers():
    pool, _ = make()
    where = ApproximatePages(array("i", pool.allocate(2)), 0, np.zeros(8, dtype=np.int16))
    with pytest.raises(TypeError):
        PrefixTree(pool).insert(TEXT[:8], where)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        pool.retain(where)  # type: ignore[arg-type]
