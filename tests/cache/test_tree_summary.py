"""The summary of the prefix tree: runs, how often they were read, and by which sequences."""

from __future__ import annotations

from forerun.cache.prefix import SHOWN_TOKENS, summarise_tree
from tests.cache.test_prefix import PAGE, make, put


def test_runs_stand_below_what_they_share():
    pool, tree = make()
    put(pool, tree, [1] * 8 + [2] * 8)
    pages = put(pool, tree, [1] * 8 + [3] * 4)
    pool.retain(pages[:2])
    seen = summarise_tree(tree, [1] * 8 + [3] * 4 + [9], 10)
    stem, *branches = seen.runs
    assert (stem.parent, stem.tokens, stem.branches, stem.readers, stem.shared) == (-1, 8, 2, 1, 8)
    assert [(run.parent, run.tokens, run.shared, run.first[0]) for run in branches] == [
        (0, 4, 4, 3), (0, 8, 0, 2)  # the latest used first
    ]  # fmt: skip
    assert (seen.left_out, seen.tokens, seen.page_size) == (0, 20, PAGE)


def test_reads_are_counted_where_they_end():
    pool, tree = make()
    put(pool, tree, [1] * 16)
    tree.count_read([1] * 16)
    tree.count_read([1] * 8)  # only half of it: the run is cut there
    tree.count_read([5] * 8)  # nothing of it is known
    assert [(run.tokens, run.reads) for run in summarise_tree(tree, [], 10).runs] == [(8, 2), (8, 1)]
    assert tree.match([1] * 16) and tree.num_pages == 4
    assert tree.evict(4) == 4 and summarise_tree(tree, [], 10).runs == []


def test_it_is_bounded():
    pool, tree = make()
    for start in range(40):
        put(pool, tree, [start] * PAGE)
    put(pool, tree, list(range(100, 200)))
    seen = summarise_tree(tree, [], 7)
    assert len(seen.runs) == 7 and seen.left_out == 34
    assert seen.runs[0].tokens == 100 and seen.runs[0].first == list(range(100, 100 + SHOWN_TOKENS))


def test_only_whole_pages_are_shared():
    pool, tree = make()
    put(pool, tree, list(range(16)))
    texts = ([0, 1], list(range(7)), [*range(9), 77, 78, 79, 80])
    assert [summarise_tree(tree, text, 9).runs[0].shared for text in texts] == [0, 4, 8]
