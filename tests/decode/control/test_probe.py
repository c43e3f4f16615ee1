"""Trying again: rarely, at a bounded loss, and sooner for those who are new."""

from __future__ import annotations

from forerun.core import Draft
from forerun.decode.control.acceptance import RequestStats
from forerun.decode.control.cost import CostCurve
from forerun.decode.control.depth import PROBE_TIME_SHARE, DepthPlan, Probes
from forerun.decode.control.selection import select
from tests.decode.worlds import CPU


def make_plan(sequences: int) -> DepthPlan:
    target = CostCurve(CPU[0])
    free = select(target, [Draft()] * sequences, [[]] * sequences, [16] * sequences, 0, 0.0, [])
    return DepthPlan(target, CostCurve(CPU[1]), 0, free)


def steps(probes: Probes, stats: list[RequestStats], num: int, start_s: list[float] | None = None) -> list[list[int]]:
    plan, count = make_plan(len(stats)), len(stats)
    found = []
    for _ in range(num):
        probes.save("paid", plan)
        found.append(probes.plan(stats, "paid", plan, [16] * count, start_s or [0.0] * count, list(range(count))))
    return found


def test_no_more_is_lost_than_was_set_aside():
    probes, stats, plan = Probes(), [RequestStats()], make_plan(1)
    steps(probes, stats, 500)
    cost = plan.round_s(1) + plan.seconds(2) - plan.seconds(1)
    probed = sum(map(sum, steps(probes, stats, 2000)))
    assert 0.8 <= probed * cost / (2000 * PROBE_TIME_SHARE * plan.seconds(1)) <= 1.05


def test_a_new_request_is_tried_sooner():
    def wait(stats: RequestStats) -> int:
        probes = Probes()
        while steps(probes, [RequestStats(trials=0)], 1) == [[1]]:  # what a new drafter begins with
            pass
        while steps(probes, [RequestStats(trials=0)], 1) == [[0]]:
            pass
        return steps(probes, [stats], 500).index([1])

    assert wait(RequestStats(trials=1)) <= 1
    assert wait(RequestStats(trials=0)) > 10


def test_a_hit_gives_time_back():
    plain, lucky = Probes(), Probes()
    stats = [RequestStats(trials=0)]
    for probes in (plain, lucky):
        steps(probes, stats, 500)
    before = sum(map(sum, steps(plain, stats, 200)))
    for _ in range(4):
        lucky.refund("paid", 1.0)
    assert sum(map(sum, steps(lucky, stats, 200))) > before


def test_those_that_are_caught_up_with_are_tried_together_and_others_one_at_a_time():
    stats = [RequestStats() for _ in range(3)]
    together = next(rounds for rounds in steps(Probes(), stats, 500, [0.0, 0.5, 0.0]) if any(rounds))
    assert together == [1, 0, 1]
    assert [s.probing for s in stats] == ["paid", "", "paid"]
    alone = next(rounds for rounds in steps(Probes(), stats, 3000, [0.5, 0.5, 0.9]) if any(rounds))
    assert alone == [1, 0, 0]
