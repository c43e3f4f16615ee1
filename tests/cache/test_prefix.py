"""The prefix tree against a plain dictionary of prefixes."""

from __future__ import annotations

import random
import time

import torch

from forerun.cache.pool import PagePool
from forerun.cache.prefix import PrefixTree
from forerun.models.config import ModelConfig

CONFIG = ModelConfig("llama", 64, 16, 1, 1, 1, 2, 32, 512)
PAGE = 4


def make(pages: int = 256, page_size: int = PAGE) -> tuple[PagePool, PrefixTree]:
    pool = PagePool(CONFIG, pages, page_size, torch.float32, torch.device("cpu"))
    return pool, PrefixTree(pool)


def put(pool: PagePool, tree: PrefixTree, tokens: list[int]) -> list[int]:
    """Compute a text as the engine does: reuse what is known, allocate the rest, make it known, let go."""
    known = tree.match(tokens)
    pool.retain(known)
    pages = known + pool.allocate(len(tokens) // PAGE - len(known))
    tree.insert(tokens, pages)
    pool.release(pages)
    return pages


def test_a_shared_prefix_is_shared_and_the_rest_is_not():
    pool, tree = make()
    a = put(pool, tree, [1] * 8 + [2] * 8)
    b = put(pool, tree, [1] * 8 + [3] * 8)
    assert a[:2] == b[:2] and not set(a[2:]) & set(b[2:])
    assert tree.match([1] * 8 + [2] * 8 + [9]) == a
    assert tree.match([1] * 7) == a[:1]
    assert tree.match([4, 4, 4, 4]) == []


def test_only_whole_pages_are_kept():
    pool, tree = make()
    assert len(put(pool, tree, list(range(10)))) == 2
    assert len(tree.match(list(range(10)))) == 2


def test_eviction_takes_the_least_recently_used_and_never_a_page_in_use():
    pool, tree = make(8)
    old, young = put(pool, tree, [1] * 16), put(pool, tree, [2] * 16)
    tree.match([1] * 16)  # now the other one is the oldest
    assert tree.evict(2) == 2
    assert tree.match([1] * 16) == old and tree.match([2] * 16) == young[:2]
    pool.retain(old)
    assert tree.evict(100) == 2  # all that is not being read
    assert tree.match([1] * 16) == old
    pool.release(old)
    assert tree.evict(100) == 4 and pool.used == 0


def test_random_use_agrees_with_a_dictionary_and_leaks_nothing():
    draw = random.Random(1)
    pool, tree = make(40)
    known: dict[tuple[int, ...], int] = {}  # prefix -> page, as long as the tree may hold it
    for _ in range(3000):
        tokens = [draw.randrange(2) for _ in range(draw.randrange(4, 24))]
        kept = tree.match(tokens)
        prefixes = [tuple(tokens[: (i + 1) * PAGE]) for i in range(len(tokens) // PAGE)]
        for prefix, page in zip(prefixes, kept, strict=False):
            assert known[prefix] == page
        pool.retain(kept)
        missing = len(prefixes) - len(kept)
        if missing > pool.free:
            tree.evict(missing - pool.free)
        if missing <= pool.free:
            pages = kept + pool.allocate(missing)
            tree.insert(tokens, pages)
            known.update(zip(prefixes, pages, strict=True))
            pool.release(pages)
        else:
            pool.release(kept)
        assert pool.used == tree.num_pages
    tree.clear()
    assert pool.used == 0


def test_a_large_tree_stays_fast():
    pool, tree = make(65_536, 16)
    texts = [[i] * 16 + list(range(i, i + 984)) for i in range(1000)]
    for text in texts:
        pages = pool.allocate(len(text) // 16)
        tree.insert(text, pages)
        pool.release(pages)
    best = []
    for text in texts[:200]:
        start = time.thread_time()
        assert len(tree.match(text)) == 62
        best.append(time.thread_time() - start)
    assert sorted(best)[100] < 0.001


def test_forgetting_a_text_drops_its_end_and_keeps_what_others_need():
    pool, tree = make()
    put(pool, tree, [1] * 8 + [2] * 8)
    put(pool, tree, [1] * 8 + [3] * 8)
    tree.forget([1] * 8 + [2] * 8 + [9] * 3)
    assert len(tree.match([1] * 8 + [2] * 8)) == 2 and len(tree.match([1] * 8 + [3] * 8)) == 4
    tree.forget([1] * 8)  # another text goes on from there
    tree.forget([4] * 8)  # unknown
    assert tree.num_pages == pool.used == 4
    tree.forget([1] * 8 + [3] * 8)
    assert tree.num_pages == pool.used == tree.num_nodes == 0
    put(pool, tree, [1] * 16)
    tree.forget([1] * 12)  # not the whole of what is known
    assert tree.num_pages == 4 and tree.evict(9) == 4


def fill(pool: PagePool, tree: PrefixTree, first: int, pages: int, owner: str, weight: float = 1.0) -> list[int]:
    """A text of so many pages of one owner, evicting for it what has to go."""
    tokens = [first + i for i in range(pages * PAGE)]
    missing = pages - pool.free
    if missing > 0:
        assert tree.evict(missing) >= missing
    made = pool.allocate(pages)
    tree.insert(tokens, made, owner, weight)
    pool.release(made)
    return tokens


def test_a_flood_of_one_owner_does_not_evict_what_another_uses():
    pool, tree = make(pages=64)
    mine = fill(pool, tree, 0, 16, "mine")
    for number in range(40):
        fill(pool, tree, 1000 * (number + 1), 8, "flood")
    assert len(tree.match(mine)) == 16  # though it was used longest ago
    assert tree.pages_by_owner == {"mine": 16, "flood": 48}
    assert not tree.within_share("flood") and tree.within_share("mine")
    for number in range(40):  # what is more than its share goes, by age as ever
        fill(pool, tree, 100_000 + 1000 * number, 8, "mine")
    assert abs(tree.pages_by_owner["mine"] - 32) <= 8 and sum(tree.pages_by_owner.values()) == tree.num_pages


def test_shares_follow_weights_and_lapse():
    now = [0.0]
    pool = PagePool(CONFIG, 64, PAGE, torch.float32, torch.device("cpu"))
    tree = PrefixTree(pool, clock=lambda: now[0])
    heavy = fill(pool, tree, 0, 40, "heavy", 3.0)
    for number in range(20):
        fill(pool, tree, 1000 * (number + 1), 4, "light")
    assert len(tree.match(heavy)) == 40  # three quarters of the pool are its share
    now[0] = 601.0
    fill(pool, tree, 90_000, 24, "light")
    assert len(tree.match(heavy)) == 40  # it was read since
    now[0] = 1300.0
    for number in range(4):
        fill(pool, tree, 200_000 + 1000 * number, 8, "light")
    assert len(tree.match(heavy)) < 40 and sum(tree.pages_by_owner.values()) == tree.num_pages


def test_a_prompt_that_becomes_known_chunk_by_chunk_is_one_run():
    pool, tree = make()
    pages = pool.allocate(8)
    tokens = list(range(32))
    for end in (4, 12, 16, 32):
        tree.insert(tokens[:end], pages, "ann")
    assert tree.num_nodes == 1 and tree.match([*tokens, 99]) == pages and tree.num_pages == 8
    tree.count_read(tokens)
    more = pages + pool.allocate(2)
    tree.insert([*tokens, *range(50, 58)], more, "ann")
    assert tree.num_nodes == 2  # what was read is a run of its own
