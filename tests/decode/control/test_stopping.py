"""One more round: worth it while the path is likely, by one sequence's share of the costs."""

from __future__ import annotations

import pytest

from forerun.core import Draft
from forerun.decode.control.acceptance import Acceptance, DrafterRecord, RequestStats
from forerun.decode.control.cost import MAX_ROUNDS, CostCurve
from forerun.decode.control.stopping import SharedCosts, StoppingRule, first_round_only
from tests.decode.worlds import CPU, H200, Machine


def costs(machine: Machine = CPU, sequences: int = 1, context: int = 0) -> SharedCosts:
    return SharedCosts(CostCurve(machine[0]), CostCurve(machine[1]), sequences, context)


def stopping_rule(factor: float = 1.0, recent: float = 0.0) -> StoppingRule:
    return StoppingRule(DrafterRecord(), factor, costs(), recent)


def test_costs_are_shared():
    shared = costs(H200, sequences=4)
    target, rounds = CostCurve(H200[0]), CostCurve(H200[1])
    assert shared.round_s == pytest.approx(rounds.seconds(4, 4) / 4)
    shared.extend(9)
    assert shared.verify_s == pytest.approx([target.seconds(4 * (1 + k), 4) / 4 for k in range(10)])


def test_a_round_is_worth_it_while_the_path_is_likely():
    sure = stopping_rule()
    assert sure(0.98, 1) and sure(0.96, 2)
    assert not stopping_rule()(0.1, 1)


def test_a_word_that_is_known_to_be_worth_nothing_does_not_count():
    known, stats = Acceptance(), RequestStats()
    for _ in range(60):
        known.record_draft(stats, Draft.chain([1], [0.98], "paid"), [2])
    assert not StoppingRule(known.records["paid"], stats.own["paid"].factor, costs(), 0.0)(0.98, 1)


def test_a_request_that_does_worse_than_others_goes_less_far():
    def rounds(factor: float) -> int:
        more, k = stopping_rule(factor), 1
        while more(0.9**k, k):
            k += 1
        return k

    assert rounds(0.2) < rounds(1.0) < rounds(5.0)


def test_the_rate_of_recent_steps_has_to_be_beaten():
    assert stopping_rule(recent=1.0)(0.5, 1)
    assert not stopping_rule(recent=1000.0)(0.5, 1)


def test_it_ends_at_the_deepest_that_is_planned_for_and_takes_long_chains_of_others():
    cheap = costs(({1: 1.0, 64: 1.001}, {1: 1e-4, 64: 1e-4}))
    sure = StoppingRule(DrafterRecord(), 1.0, cheap, 0.0)
    assert sure(1.0, MAX_ROUNDS - 1)
    assert not sure(1.0, MAX_ROUNDS)
    assert not sure(1.0, 3 * MAX_ROUNDS)  # began with a long draft of another's
    assert not sure(1e-6, 2)  # a side branch of it


def test_trying_is_one_round():
    assert first_round_only(1.0, 0)
    assert not first_round_only(1.0, 1)
