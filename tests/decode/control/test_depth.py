"""Plans for a drafter that runs a model: rounds that make the batch's rate largest, by brute force."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from forerun.core import Draft
from forerun.decode.control.cost import MAX_ROUNDS, CostCurve
from forerun.decode.control.depth import DepthPlan, min_path_probs
from forerun.decode.control.selection import StepCosts, select
from tests.decode.simulator import CORES, H200, Machine

FOREVER = 1 << 20


def make_plan(machine: Machine, drafts: list[Draft]) -> DepthPlan:
    target = CostCurve(machine.target)
    free = select(target, drafts, [draft.probs for draft in drafts], [16] * len(drafts), 0, StepCosts(0.0, 0.0), [])
    return DepthPlan(target, CostCurve(machine.rounds), 0, free, host_s=0.0)


def best(plan: DepthPlan, ahead: list[list[float]], start_s: float = 0.0, remaining: int = FOREVER) -> dict[int, int]:
    num = len(ahead)
    return plan.best(ahead, [[] for _ in ahead], [8] * num, [start_s] * num, [remaining] * num).rounds


def rate(plan: DepthPlan, depths: tuple[int, ...], ahead: list[list[float]]) -> float:
    tokens = 0.0
    for depth, probs in zip(depths, ahead, strict=True):
        path = tokens_here = 1.0
        for prob in probs[:depth]:
            path *= prob
            tokens_here += path
        tokens += tokens_here
    rounds = sum(plan.round_s(sum(depth > j for depth in depths)) for j in range(max(depths)))
    return tokens / (plan.target.seconds(len(depths) + sum(depths), len(depths)) + rounds)


@pytest.mark.parametrize("machine", [CORES, H200], ids=["cores", "h200"])
@pytest.mark.parametrize("accepted", [(0.9,), (0.7,), (0.3,), (0.9, 0.9), (0.6, 0.6)])
def test_the_plan_is_the_best_of_all_for_sequences_that_are_alike(machine: Machine, accepted: tuple[float, ...]):
    ahead = [[prob] * 8 for prob in accepted]
    plan = make_plan(machine, [Draft() for _ in accepted])
    depths = best(plan, ahead)
    every = itertools.product(range(9), repeat=len(accepted))
    most = max((rate(plan, depths, ahead), depths) for depths in every)
    if most[0] < 1.0001 * plan.rate:
        assert depths == {}
    else:
        found = tuple(depths.get(i, 0) for i in range(len(accepted)))
        assert rate(plan, found, ahead) == pytest.approx(most[0], rel=0.01)


def test_only_what_a_free_draft_does_not_reach_is_gained():
    plan = make_plan(CORES, [Draft()])
    ahead = [[0.8] * 8]
    assert plan.best(ahead, [[]], [8], [0.0], [FOREVER]).rounds
    assert plan.best(ahead, [[0.8, 0.64, 0.512, 0.41]], [8], [0.0], [FOREVER]).rounds == {}


def test_a_free_draft_and_a_model_are_right_apart_from_each_other():
    ahead = [[0.8] * 8]
    nodes = DepthPlan._nodes([0], ahead, [[0.5, 0.3]], [8])
    assert [gain for _, _, _, gain in nodes[:3]] == pytest.approx([0.8 * 0.5, 0.64 * 0.7, 0.512])


@pytest.mark.parametrize("sequences", [1, 3])
def test_a_token_by_such_drafts_takes_what_the_best_depth_says(sequences: int):
    plan, ahead = make_plan(CORES, [Draft()] * sequences), [0.9] * 8
    most = max(rate(plan, (depth,) * sequences, [ahead] * sequences) for depth in range(1, 9))
    assert plan.token_s(ahead) == pytest.approx(sequences / most, rel=0.01)


def test_limits_are_kept():
    plan = make_plan(replace(H200, rounds={1: 1e-4, 8: 1.1e-4}), [Draft(), Draft()])
    found = plan.best([[0.95] * 8] * 2, [[], []], [0, 2], [0.0] * 2, [FOREVER] * 2)
    assert found.rounds == {1: 2}
    assert found.slowdown > 1.0 and found.gains == pytest.approx({1: 0.95 + 0.95**2})


def test_a_start_must_pay_within_what_remains():
    plan = make_plan(CORES, [Draft()])
    assert best(plan, [[0.9] * 8], start_s=2.0, remaining=1000)
    assert best(plan, [[0.9] * 8], start_s=2.0, remaining=30) == {}


# -- one more round ----------------------------------------------------------------------------------------------------


def least(machine: Machine = CORES, accepted: float = 0.9, factor: float = 1.0, sequences: int = 1) -> list[float]:
    target, rounds = CostCurve(machine.target), CostCurve(machine.rounds)
    rate = factor * sequences / target.seconds(sequences, sequences)
    return min_path_probs(target, rounds, sequences, 0, [accepted] * MAX_ROUNDS, rate)


def test_a_round_needs_a_path_that_is_probable_enough():
    found = least()
    assert len(found) == MAX_ROUNDS - 1
    target, rounds = CostCurve(CORES.target), CostCurve(CORES.rounds)
    one = (target.seconds(3) - target.seconds(2) + rounds.seconds(1)) / target.seconds(1) / 0.9  # of the first alone
    assert found[0] <= one + 1e-9  # or less, where more rounds together pay sooner


def test_the_rate_that_drafting_gives_has_to_be_beaten():
    assert all(low < high for low, high in zip(least(), least(factor=1.5), strict=True))
    assert min(least(accepted=0.3)) > 1.0  # no path is that probable
