"""The tree at size: its figures are those of a real tree, and sizes that cannot be are refused."""

from __future__ import annotations

import pytest

from forerun.errors import BadRequest
from forerun_research.bench import sharing_tree


def test_a_small_tree_is_built_as_asked() -> None:
    found = sharing_tree.run(nodes=30, tokens=30 * 100)
    assert found["nodes"] == 30 and found["tokens"] == 30 * 100 // 16 * 16
    assert found["longest_text"] >= 2 * 96  # texts go on from each other
    for kind in ("match_s", "match_and_insert_s"):
        assert 0 < found[kind]["median"] <= found[kind]["p99"] <= found[kind]["max"]
    assert 6 * 16 * 4 < found["bytes_per_node"] < 20_000  # more than its tokens, not absurdly more


def test_slow_trees_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing_tree, "GOAL_S", 1e-9)
    assert not sharing_tree.run(5, 5 * 16)["goal"]["reached"]


def test_a_pause_of_the_interpreter_counts_for_no_side() -> None:
    passes = [([1.0, 2.0], [5.0]), ([1.0, 9.0], [6.0]), ([3.0, 2.0], [50.0])]
    assert sharing_tree._steady(passes) == ([1.0, 2.0], [6.0])


@pytest.mark.parametrize(("nodes", "tokens"), [(0, 100), (10, 100)])
def test_a_node_has_at_least_a_page(nodes: int, tokens: int) -> None:
    with pytest.raises(BadRequest, match="at least one page of 16"):
        sharing_tree.run(nodes, tokens)
