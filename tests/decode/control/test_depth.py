"""Plans for a drafter that runs a model: rounds that make the batch's rate largest, by brute force."""

from __future__ import annotations

import itertools

import pytest

from forerun.core import Draft
from forerun.decode.control.cost import CostCurve
from forerun.decode.control.depth import DepthPlan
from forerun.decode.control.selection import select
from tests.decode.worlds import CPU, H200, Machine

FOREVER = 1 << 20


def make_plan(machine: Machine, drafts: list[Draft]) -> DepthPlan:
    target = CostCurve(machine[0])
    free = select(target, drafts, [draft.probs for draft in drafts], [16] * len(drafts), 0, 0.0, [])
    return DepthPlan(target, CostCurve(machine[1]), 0, free)


def best(plan: DepthPlan, ahead: list[list[float]], start_s: float = 0.0, remaining: int = FOREVER) -> dict[int, int]:
    num = len(ahead)
    return plan.best(ahead, [[] for _ in ahead], [8] * num, [start_s] * num, [remaining] * num)[0]


def rate(plan: DepthPlan, depths: tuple[int, ...], ahead: list[list[float]]) -> float:
    tokens = 0.0
    for depth, probs in zip(depths, ahead, strict=True):
        path = tokens_here = 1.0
        for prob in probs[:depth]:
            path *= prob
            tokens_here += path
        tokens += tokens_here
    rounds = sum(plan.round_s(sum(depth > j for depth in depths)) for j in range(max(depths)))
    return tokens / (plan.seconds(len(depths) + sum(depths)) + rounds)


@pytest.mark.parametrize("machine", [CPU, H200], ids=["cpu", "h200"])
@pytest.mark.parametrize("accepted", [(0.9,), (0.7,), (0.3,), (0.9, 0.9), (0.6, 0.6)])
def test_the_plan_is_the_best_of_all_for_sequences_that_are_alike(machine: Machine, accepted: tuple[float, ...]):
    ahead = [[prob] * 8 for prob in accepted]
    plan = make_plan(machine, [Draft() for _ in accepted])
    depths = best(plan, ahead)
    every = itertools.product(range(9), repeat=len(accepted))
    most = max((rate(plan, depths, ahead), depths) for depths in every)
    if most[0] < plan.min_rate:
        assert depths == {}
    else:
        found = tuple(depths.get(i, 0) for i in range(len(accepted)))
        assert rate(plan, found, ahead) == pytest.approx(most[0], rel=0.01)


def test_only_what_a_free_draft_does_not_reach_is_gained():
    plan = make_plan(CPU, [Draft()])
    ahead = [[0.8] * 8]
    assert plan.best(ahead, [[]], [8], [0.0], [FOREVER])[0]
    assert plan.best(ahead, [[0.8, 0.64, 0.512, 0.41]], [8], [0.0], [FOREVER])[0] == {}


def test_limits_are_kept():
    plan = make_plan(CPU, [Draft(), Draft()])
    depths, slower = plan.best([[0.95] * 8] * 2, [[], []], [0, 2], [0.0] * 2, [FOREVER] * 2)
    assert depths == {1: 2}
    assert slower > 1.0


def test_a_start_must_pay_within_what_remains():
    plan = make_plan(CPU, [Draft()])
    assert best(plan, [[0.9] * 8], start_s=2.0, remaining=1000)
    assert best(plan, [[0.9] * 8], start_s=2.0, remaining=30) == {}


def test_what_cannot_pay_even_if_perfect_is_known_beforehand():
    assert make_plan(CPU, [Draft()]).can_pay()
    steep = ({1: 1.0, 64: 64.0, 128: 128.0}, {1: 0.5, 64: 10.0})
    assert not make_plan(steep, [Draft() for _ in range(64)]).can_pay()
    sure = Draft.chain(list(range(12)), [0.995] * 12, "free")
    assert not make_plan(CPU, [sure]).can_pay()
