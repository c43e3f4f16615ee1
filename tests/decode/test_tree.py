"""Trees by hand: joining, keeping, and what came true."""

from __future__ import annotations

import pytest

from forerun.core import ROOT, Draft
from forerun.decode.tree import accepted_length, below, below_likeliest, merge, subtree


def paths(draft: Draft) -> set[tuple[int, ...]]:
    return {tuple(draft.tokens[n] for n in draft.path(node)) for node in range(len(draft))}


def probs_of(draft: Draft) -> dict[tuple[int, ...], float]:
    return {tuple(draft.tokens[n] for n in draft.path(i)): prob for i, prob in enumerate(draft.probs)}


def test_merging_shares_what_is_common():
    left = Draft.chain([1, 2, 3], [0.9, 0.5, 0.2], "left")
    right = Draft([1, 4, 7], [ROOT, 0, ROOT], [0.6, 0.6, 0.3], ["right"] * 3)
    merged = merge([left, right, Draft()], [False, False, False])
    assert paths(merged) == {(1,), (1, 2), (1, 2, 3), (1, 4), (7,)}
    assert merged.sources[0] == "left" == merge([right, left], [False, False]).sources[0]  # the surer one is named
    assert merged.problem(vocab=8) is None
    assert merge([left, Draft()], [False, False]) is left and len(merge([], [])) == 0


def test_merged_chances_are_means_of_those_who_guess_there():
    left = Draft.chain([1, 2, 3], [0.9, 0.5, 0.2], "left")
    right = Draft([1, 4, 7], [ROOT, 0, ROOT], [0.6, 0.6, 0.3], ["right"] * 3)
    merged = merge([left, right], [False, False])
    expected = {(1,): 0.75, (7,): 0.15, (1, 2): 0.25, (1, 4): 0.3, (1, 2, 3): 0.2}
    assert probs_of(merged) == pytest.approx(expected)  # under (1, 2) only the left one guesses


def test_free_drafts_share_what_a_model_leaves():
    free = Draft([1, 7, 9, 2], [ROOT, ROOT, 0, 2], [0.6, 0.3, 0.9, 0.8], ["free"] * 4)
    model = Draft([1, 4, 5], [ROOT, ROOT, 0], [0.5, 0.3, 1.0], ["model"] * 3)
    merged = merge([free, model], [False, True])
    left = 1.0 - 0.5 - 0.3
    expected = {(1,): 0.5 + 0.6 * left, (4,): 0.3, (7,): 0.3 * left, (1, 5): 1.0, (1, 9): 0.0, (1, 9, 2): 0.8}
    assert probs_of(merged) == pytest.approx(expected)  # under (1, 9) only the free one guesses
    assert merged.sources[0] == "free"


def test_keeping_lays_the_surest_branch_first_and_branches_in_one_piece():
    draft = Draft([1, 2, 3, 4, 5, 6], [ROOT, ROOT, 0, 1, 3, 1], [0.3, 0.6, 0.9, 0.5, 0.8, 0.4], list("abcdef"))
    kept = subtree(draft, [0, 1, 2, 3, 4, 5])
    assert kept.tokens == [2, 4, 5, 6, 1, 3] and kept.parents == [ROOT, 0, 1, 0, ROOT, 4]
    assert kept.sources == list("bdefac")
    assert paths(subtree(draft, [1, 3, 0])) == {(2,), (2, 4), (1,)}
    assert len(subtree(draft, [])) == 0


def test_what_came_true_is_the_deepest_path_of_the_tokens():
    draft = Draft([1, 2, 1, 3, 4], [ROOT, 0, 1, 0, 3], [0.5] * 5, ["x"] * 5)
    assert accepted_length(draft, [1, 3, 4, 9]) == 3
    assert accepted_length(draft, [1, 2]) == 2
    assert accepted_length(draft, [2, 1]) == 0 == accepted_length(Draft(), [1])


def test_problems_of_drafts_are_named():
    fine = Draft([1, 2], [ROOT, 0], [0.5, 0.5], ["x", "x"])
    assert fine.problem(3) is None and fine.depths() == [1, 2] and fine.children() == {ROOT: [0], 0: [1]}
    assert "vocabulary" in (fine.problem(2) or "")
    assert "parent 1" in (Draft([1, 2], [ROOT, 1], [0.5, 0.5], ["x", "x"]).problem(3) or "")
    assert "parent -2" in (Draft([1], [-2], [0.5], ["x"]).problem(3) or "")
    assert "probability" in (Draft([1], [ROOT], [1.5], ["x"]).problem(3) or "")
    assert "probability" in (Draft([1], [ROOT], [float("nan")], ["x"]).problem(3) or "")
    assert "length" in (Draft([1], [ROOT], [], ["x"]).problem(3) or "")
    assert "same token" in (Draft([1, 1], [ROOT, ROOT], [0.5, 0.5], ["x", "x"]).problem(3) or "")


def test_what_follows_the_likeliest_first_token():
    draft = Draft([1, 2, 3, 4, 5], [ROOT, ROOT, 1, 2, 0], [0.2, 0.7, 0.9, 0.8, 0.5], ["free"] * 5)
    below = below_likeliest(draft)
    assert (below.tokens, below.parents) == ([3, 4], [ROOT, 0])
    assert below.probs == pytest.approx([0.63, 0.8])
    assert len(below_likeliest(Draft())) == 0


def test_below_a_first_token_is_what_follows_it():
    draft = Draft([5, 6, 7, 8, 9], [ROOT, 0, ROOT, 2, 3], [0.5, 0.4, 0.3, 0.2, 0.1], ["a", "a", "b", "b", "b"])
    left = below(draft, 7)
    assert (left.tokens, left.parents, left.probs, left.sources) == ([8, 9], [ROOT, 0], [0.2, 0.1], ["b", "b"])
    assert below(draft, 5).tokens == [6]
    assert not len(below(draft, 6)) and not len(below(Draft(), 5))
