"""The controller: whole answers in a simulation with measured costs, and single decisions by hand."""

from __future__ import annotations

import json

import pytest

from forerun.core import Draft
from forerun.decode.control.controller import Controller, RequestStats
from forerun.decode.control.cost import CostCurve
from tests.decode.worlds import CPU, H200, World, bursts, make, steady, switching

N = 1000
SCENARIOS = {
    "always good": lambda m: World(m, N, [steady(N, 0.9, 1)]),
    "good, and knows when": lambda m: World(m, N, [steady(N, 0.9, 2, None)]),
    "middling": lambda m: World(m, N, [steady(N, 0.6, 3)]),
    "poor": lambda m: World(m, N, [steady(N, 0.3, 4)]),
    "hopeless": lambda m: World(m, N, [steady(N, 0.05, 5)]),
    "poor, claims to be perfect": lambda m: World(m, N, [steady(N, 0.3, 6, 0.97)]),
    "good, then poor, then good": lambda m: World(m, N, [switching(N, (0.9, 0.2), 250, 7)]),
    "poor in ten requests": lambda m: World(m, N, [steady(N, 0.3, 8)], requests=10),
    "good in every other request": lambda m: World(m, N, [switching(N, (0.9, 0.2), 100, 9)], requests=10),
    "lookups": lambda m: World(m, N, free=[bursts(N, 10)]),
    "lookups that mostly lie": lambda m: World(m, N, free=[bursts(N, 11, 0.02, 0.95, 0.9)]),
    "lookups and a good model": lambda m: World(m, N, [steady(N, 0.85, 12)], [bursts(N, 13)]),
    "lookups and a poor model": lambda m: World(m, N, [steady(N, 0.3, 14)], [bursts(N, 13)]),
    "many lookups, a model that knows": lambda m: World(m, N, [steady(N, 0.85, 15, None)], [bursts(N, 16, 0.6)]),
}


@pytest.mark.parametrize("machine", [CPU, H200], ids=["cpu", "h200"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_auto_is_as_fast_as_the_best_fixed_policy_and_as_plain_decoding(name: str, machine):
    world = SCENARIOS[name](machine)
    auto = world.auto()
    assert auto >= 0.97 * world.best_fixed()
    assert auto >= 0.97 * world.fixed()


def test_drafting_goes_off_and_on_again_within_a_request():
    world = World(CPU, 1600, [switching(1600, (0.9, 0.1), 400, 1)])
    world.auto()

    def share(low: int, high: int) -> float:
        rounds = [depth for at, depth in world.rounds if low <= at < high]
        return sum(depth > 0 for depth in rounds) / len(rounds)

    assert share(100, 400) > 0.9
    assert share(500, 800) < 0.15
    assert share(1000, 1200) > 0.6
    assert share(1300, 1600) < 0.15


def test_trying_a_useless_drafter_costs_little():
    world = World(CPU, 2000, [steady(2000, 0.0, 1)])
    control = make()
    world.auto(control)  # learns that it is useless
    assert world.auto(control) >= 0.983 * world.fixed()
    assert any(depth for _, depth in world.rounds[-len(world.rounds) // 2 :])  # and yet goes on trying


@pytest.mark.parametrize("size", [2, 4, 16, 64])
@pytest.mark.parametrize("kind", ["good", "half", "poor", "mixed", "lookups"])
def test_batches_are_never_slower_than_plain(size: int, kind: str):
    num = {2: 400, 4: 400, 16: 200, 64: 60}[size]
    accepted = {"good": (0.9, 0.9), "half": (0.5, 0.5), "poor": (0.2, 0.2), "mixed": (0.95, 0.2)}.get(kind)
    if accepted is None:
        world = World(H200, num, free=[bursts(num, i) for i in range(size)])
    else:
        world = World(H200, num, [steady(num, accepted[i % 2], 100 + i) for i in range(size)])
    assert world.auto() >= 0.95 * world.fixed()


def test_a_good_drafter_is_used_in_small_batches():
    for size, least in ((2, 1.25), (4, 1.2), (8, 1.1)):
        world = World(H200, 400, [steady(400, 0.9, 50 + i) for i in range(size)])
        assert world.auto() >= least * world.fixed()


def test_a_costly_start_is_made_for_long_answers_only():
    for num, pays in ((1000, True), (30, False)):
        world = World(CPU, num, [steady(num, 0.9, 3)], start_s=2.0)
        world.auto()
        assert any(depth for _, depth in world.rounds) == pays


def slow_rounds(times: float) -> tuple[dict[int, float], dict[int, float]]:
    return CPU[0], {tokens: times * seconds for tokens, seconds in CPU[1].items()}


def test_rounds_that_take_longer_than_was_timed_are_noticed():
    world = World(slow_rounds(6.0), 1000, [steady(1000, 0.8, 3)])  # so slow that it does not pay
    told, deaf = make(CPU), make(CPU)
    deaf.observe_round = lambda *_: None  # type: ignore[method-assign]
    for control in (told, deaf):
        world.auto(control)
    assert world.auto(told) >= 0.97 * world.fixed()
    assert world.auto(deaf) < 0.7 * world.fixed()


# -- single decisions ------------------------------------------------------------------------------------------------


def paid_rounds(c: Controller, stats: list[RequestStats], free: Draft | None = None, **start) -> list[int]:
    drafts = [free or Draft() for _ in stats]
    return c.plan_rounds(stats, drafts, [d.probs for d in drafts], "paid", [16] * len(stats), 0, **start)


def test_an_unknown_drafter_is_tried_but_not_beside_a_sure_free_draft():
    c = make()
    assert paid_rounds(c, [c.new_request()]) == [16]
    sure = Draft.chain(list(range(12)), [0.995] * 12, "free")
    assert paid_rounds(c, [c.new_request()], sure) == [0]


def test_what_cannot_pay_even_if_perfect_is_never_tried():
    steep = Controller(CostCurve({1: 1.0, 64: 64.0, 128: 128.0}), {"paid": CostCurve({1: 0.5, 64: 10.0})})
    for _ in range(300):
        assert paid_rounds(steep, [steep.new_request() for _ in range(64)]) == [0] * 64


def test_a_free_drafter_that_takes_long_and_gives_nothing_is_asked_rarely():
    c = make(H200)
    assert c.should_run_free("suffix")
    for _ in range(200):
        c.record_free_run("suffix", 100e-6, 0.0)
    assert 0 < sum(_asked(c) for _ in range(1000)) < 60
    for _ in range(20):
        c.record_free_run("suffix", 100e-6, 2.0)
    assert all(c.should_run_free("suffix") for _ in range(20))


def _asked(c: Controller) -> bool:
    if c.should_run_free("suffix"):
        c.record_free_run("suffix", 100e-6, 0.0)
        return True
    return False


def test_the_report_is_plain_data():
    c = make()
    c.record_draft(c.new_request(), Draft.chain([1, 2], [0.9, 1.0], "free"), [1, 2, 3])
    stats = json.loads(json.dumps(c.stats()))
    assert stats["drafters"]["free"]["by_prob"]["1"]["accepted"] == 1.0
    assert stats["target_s"]["8"] == pytest.approx(0.079)
    assert stats["round_s"]["paid"]["1"] == pytest.approx(0.019)


def test_what_a_round_took_corrects_its_drafters_curve_and_no_other():
    c = Controller(CostCurve(CPU[0]), {"paid": CostCurve(CPU[1]), "other": CostCurve(CPU[1])})
    for _ in range(400):
        c.observe_round("paid", 1, 1, 0, 10 * CPU[1][1])
    assert c.drafters["paid"].seconds(1) == pytest.approx(10 * CPU[1][1], rel=0.05)
    assert c.drafters["other"].points() == pytest.approx(CPU[1])
    assert c.target.points() == pytest.approx(CPU[0])
    assert paid_rounds(c, [c.new_request()]) == [0]


def test_a_drafter_that_was_ruled_out_by_its_costs_is_tried_again_in_the_end():
    c = make()
    for _ in range(400):
        c.observe_round("paid", 1, 1, 0, 10 * CPU[1][1])
    for _ in range(20):
        assert paid_rounds(c, [c.new_request()]) == [0]
    assert any(paid_rounds(c, [c.new_request()]) != [0] for _ in range(12000))


def test_costs_that_rise_while_a_batch_is_drafted_for_count_at_once():
    c = make()
    assert c.stopping_rule(c.new_request(), "paid")(0.9, 1)
    for _ in range(400):
        c.observe_round("paid", 1, 1, 0, 10 * CPU[1][1])
    assert not c.stopping_rule(c.new_request(), "paid")(0.9, 1)


def one_good_one_hopeless() -> tuple[Controller, list[RequestStats]]:
    c = make(({1: 1.0, 64: 1.5}, {1: 0.2, 64: 0.4}))
    good, hopeless = c.new_request(), c.new_request()
    guess = Draft.chain([1], [0.8], "paid")
    for _ in range(60):
        c.record_draft(good, guess, [1])
        c.record_draft(hopeless, guess, [2])
    return c, [good, hopeless]


def test_a_sequence_that_rounds_are_not_run_for_takes_part_now_and_then():
    c, stats = one_good_one_hopeless()
    steps = [paid_rounds(c, stats) for _ in range(8)]
    assert all(good > 1 for good, _ in steps)
    assert [hopeless for _, hopeless in steps] == [0, 0, 0, 1, 0, 0, 0, 1]


def test_nothing_is_drafted_for_others_while_one_is_behind():
    c, stats = one_good_one_hopeless()
    stats[1].plain_s, stats[1].taken_s = 10.0, 20.0
    assert [paid_rounds(c, stats)[0] for _ in range(8)] == [0] * 8
    stats[1].taken_s = 10.0
    assert paid_rounds(c, stats)[0] > 1
