"""How different answers are, and when a group of branches is stopped."""

from __future__ import annotations

import random

import pytest

from forerun.sharing.diversity import FIRST_COMPARED_TOKENS, SiblingGroup, edit_distance, mean_pairwise_distance


def slow_distance(a: list[int], b: list[int]) -> int:
    table = {(i, 0): i for i in range(len(a) + 1)} | {(0, j): j for j in range(len(b) + 1)}
    for i in range(1, len(a) + 1):
        for j in range(1, len(b) + 1):
            same = table[i - 1, j - 1] + (a[i - 1] != b[j - 1])
            table[i, j] = min(table[i - 1, j] + 1, table[i, j - 1] + 1, same)
    return table[len(a), len(b)]


def test_edit_distance_equals_the_plain_table():
    rng = random.Random(1)
    for _ in range(200):
        a, b = ([rng.randrange(3) for _ in range(rng.randrange(9))] for _ in range(2))
        assert edit_distance(a, b) == slow_distance(a, b), (a, b)


def test_mean_pairwise_distance_looks_at_beginnings_only():
    assert mean_pairwise_distance([[1, 2, 3], [1, 2, 4], [1, 2, 5]], prefix=2) == 0.0
    assert mean_pairwise_distance([[1, 2], [3, 4]]) == 1.0
    assert mean_pairwise_distance([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 4]]) == pytest.approx((0.25 + 0 + 0.25) / 3)
    assert mean_pairwise_distance([[1, 2]]) == 1.0


def test_an_alike_group_keeps_its_first_branch():
    group, alike = (
        SiblingGroup(0.5),
        [
            list(range(FIRST_COMPARED_TOKENS)),
            list(range(FIRST_COMPARED_TOKENS)),
            list(range(FIRST_COMPARED_TOKENS - 1)),
        ],
    )
    for member, tokens in enumerate(alike):
        group.add(member, tokens)
    assert group.find_duplicates() == []  # the third has too few tokens yet
    alike[2].append(99)
    assert group.find_duplicates() == [1, 2]
    assert group.find_duplicates() == []


def test_a_branch_like_a_finished_sibling_is_stopped_alone():
    tokens = list(range(FIRST_COMPARED_TOKENS))
    group = SiblingGroup(0.5, others=[[7, *tokens]])  # the same text, moved by a token
    group.add(4, tokens)
    assert group.find_duplicates() == [4]


def test_different_branches_and_groups_without_a_limit_go_on():
    for min_distance, second in ((0.5, range(100, 100 + FIRST_COMPARED_TOKENS)), (0.0, range(FIRST_COMPARED_TOKENS))):
        group = SiblingGroup(min_distance)
        group.add(0, list(range(FIRST_COMPARED_TOKENS)))
        group.add(1, list(second))
        assert group.find_duplicates() == []


def test_a_sibling_is_compared_when_the_branch_it_waits_for_ends():
    group, long = SiblingGroup(0.9), list(range(FIRST_COMPARED_TOKENS))
    group.add(0, long)
    group.add(1, long[:8])
    assert group.find_duplicates() == []
    assert group.remove(1) == [0]  # 8 of 16 tokens are shared: alike enough for this limit
