"""Which nodes are verified: the best of all choices, by brute force where that is possible."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from forerun.core import ROOT, Draft
from forerun.decode.control.cost import CostCurve
from forerun.decode.control.selection import Selection, StepCosts, select
from tests.decode.simulator import CORES

STAIRS = CostCurve({1: 1.0, 2: 1.02, 3: 1.5, 4: 1.52, 5: 1.53, 6: 2.4, 7: 2.41, 12: 2.5})


def chosen(
    target: CostCurve, drafts: list[Draft], limits: list[int], spent_s: float = 0.0, lagging: tuple[int, ...] = ()
) -> Selection:
    return select(
        target, drafts, [draft.probs for draft in drafts], limits, 0, StepCosts(0.0, 0.0, spent_s), list(lagging)
    )


def random_tree(rng: random.Random, num: int) -> Draft:
    draft = Draft()
    for node in range(num):
        draft.add(node, rng.randrange(ROOT, node), rng.choice([0.2, 0.5, 0.8, 0.95, 1.0]), "free")
    return draft


def rate(drafts: list[Draft], chosen: list[list[int]], spent_s: float) -> float:
    tokens = float(len(drafts))
    for draft, nodes in zip(drafts, chosen, strict=True):
        for node in nodes:
            prob = 1.0
            for above in draft.path(node):
                prob *= draft.probs[above]
            tokens += prob
    return tokens / (STAIRS.seconds(len(drafts) + sum(map(len, chosen)), len(drafts)) + spent_s)


def test_the_chosen_nodes_are_the_best_of_all_closed_choices():
    rng = random.Random(0)
    for _ in range(40):
        drafts = [random_tree(rng, rng.randrange(5)) for _ in range(2)]
        limits = [rng.randrange(5), 4]
        closed = []
        for draft, limit in zip(drafts, limits, strict=True):
            subsets = itertools.chain(*(itertools.combinations(range(len(draft)), n) for n in range(limit + 1)))
            closed.append([list(s) for s in subsets if all(draft.parents[n] in (*s, ROOT) for n in s)])
        spent_s = rng.choice([0.0, 0.7])
        found = chosen(STAIRS, drafts, limits, spent_s)
        assert all(nodes in options for nodes, options in zip(found.nodes, closed, strict=True))
        best = max(rate(drafts, list(pair), spent_s) for pair in itertools.product(*closed))
        assert rate(drafts, found.nodes, spent_s) == pytest.approx(best)
        assert sum(found.gains) / found.seconds == pytest.approx(best)


def test_what_was_drawn_at_random_is_verified_whole():
    drawn = Draft([1, 2], [ROOT, 0], [0.01, 0.01], ["paid"] * 2, {ROOT: torch.ones(4) / 4})
    plain = Draft.chain([1, 2], [0.01, 0.01], "free")
    found = chosen(CostCurve(CORES.target), [drawn, plain], [8, 8])
    assert found.nodes == [[0, 1], []]
    assert found.gains == pytest.approx([1.0101, 1.0])
    assert found.size == 4


def test_a_step_does_not_slow_down_sequences_that_lag():
    steep = CostCurve({1: 1.0, 2: 1.1, 3: 1.5, 8: 2.0})
    drafts = [Draft.chain([1, 2, 3], [0.95] * 3, "free"), Draft()]
    assert chosen(steep, drafts, [8, 8]).nodes == [[0, 1, 2], []]
    assert chosen(steep, drafts, [8, 8], lagging=(1,)).nodes == [[], []]
    both = [drafts[0], Draft.chain([1], [0.9], "free")]  # now it gains as much as the step takes longer
    assert chosen(steep, both, [8, 8], lagging=(1,)).nodes == [[0, 1, 2], [0]]


def test_reach_adds_up_the_chosen_nodes_of_a_depth():
    #                0      1 beside it   2 below 0   3 below 1, too unlikely to be chosen
    draft = Draft([1, 2, 3, 4], [ROOT, ROOT, 0, 1], [0.6, 0.3, 0.5, 0.001], ["free"] * 4)
    found = chosen(CostCurve({1: 1.0, 8: 1.2}), [draft, Draft()], [8, 8])
    assert found.nodes == [[0, 1, 2], []]
    assert found.reach(draft, 0) == pytest.approx([0.9, 0.3])
    assert found.reach(Draft(), 1) == []


def test_what_the_host_takes_for_a_draft_counts():
    draft, flat = Draft.chain([1, 2], [0.9, 0.9], "free"), CostCurve({1: 1.0, 8: 1.01})
    for draft_s, nodes in ((0.1, [0, 1]), (1.8, [])):  # of a step that would take 1.0 without a draft
        costs = StepCosts(plain_s=0.0, draft_s=draft_s)
        found = select(flat, [draft], [draft.probs], [8], 0, costs, [])
        assert found.nodes == [nodes]
        assert found.seconds == pytest.approx(1.0 + (draft_s + 0.01 * 2 / 7 if nodes else 0.0))


def test_a_side_branch_has_its_own_cost():
    draft = Draft([1, 2], [ROOT, ROOT], [0.6, 0.39], ["free"] * 2)
    curve = CostCurve({1: 1.0, 8: 1.01})
    assert chosen(curve, [draft], [8]).nodes == [[0, 1]]
    curve.per_branch = 0.5
    assert chosen(curve, [draft], [8]).nodes == [[0]]
