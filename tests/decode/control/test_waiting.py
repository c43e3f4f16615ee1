"""How deep a draft is that the target waits for."""

from __future__ import annotations

import pytest

from forerun.decode.control.cost import TURNS_SLOWDOWN, ServerRounds, Slowdown
from forerun.decode.control.waiting import Turn, best_turn


def verify_s(rows: int) -> float:
    return 1.0 + 0.1 * (rows - 1)


def test_the_depth_with_the_best_rate() -> None:
    """Depth 1: 1.5 tokens in 1.3 s; depth 2: 2 in 1.6 s (the second is certain); depth 3: 2 in 1.9 s."""
    found = best_turn([0.5, 1.0, 0.0], 1.0, verify_s, lambda depth: 0.2 * depth)
    assert found.depth == 2 and found.gained_s == pytest.approx(2.0 - 1.6) and found.draft_s == pytest.approx(0.4)
    assert found.least == pytest.approx(2.0 / 1.6 * (0.2 + 0.1))  # what another round and row take, in tokens


def test_none_pays_behind_a_long_way_or_where_drafts_are_wrong() -> None:
    assert best_turn([0.9] * 8, 1.0, verify_s, lambda depth: 9.0 + 0.2 * depth) == Turn()
    assert best_turn([0.1] * 8, 1.0, verify_s, lambda depth: 0.2 * depth) == Turn()
    assert best_turn([], 1.0, verify_s, lambda depth: 0.2 * depth) == Turn()


def test_a_round_of_several_tokens_takes_little_more_than_one() -> None:
    rounds = ServerRounds(4, 0.1)
    assert [rounds.seconds(depth, 2.0) for depth in (1, 4, 5)] == pytest.approx([2.0, 2.6, 4.6])
    assert ServerRounds().seconds(3, 2.0) == pytest.approx(6.0)
    probs = [0.8] * 4
    chain = best_turn(probs, 1.0, verify_s, lambda depth: ServerRounds().seconds(depth, 0.3))
    block = best_turn(probs, 1.0, verify_s, lambda depth: rounds.seconds(depth, 0.3))
    assert block.depth == 4 > chain.depth and block.gained_s > chain.gained_s


@pytest.mark.parametrize("shares_memory", [True, False])
def test_turns_are_for_one_memory_bus_and_a_round_that_is_known(shares_memory: bool) -> None:
    slowdown = Slowdown(shares_memory)
    slowdown.round_s = 0.02
    assert slowdown.takes_turns == shares_memory  # expected before any step was timed
    for _ in range(20):
        slowdown.observe(1.0, 1.0 + 2.0 * TURNS_SLOWDOWN)
    assert slowdown.takes_turns == shares_memory
    slowdown.round_s = 0.0
    assert not slowdown.takes_turns  # what a draft takes is not known
