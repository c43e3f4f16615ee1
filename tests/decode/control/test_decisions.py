"""Single decisions of the controller and its parts, each with the numbers that make it go the other way."""

from __future__ import annotations

import pytest

from forerun.core import ROOT, Draft
from forerun.decode.control.acceptance import MAX_ODDS_RATIO, MIN_ODDS_RATIO, Acceptance, RequestRecord, RequestStats
from forerun.decode.control.controller import FREE_TIME_SHARE, MAX_DRAFT_PLAIN_STEPS, STOPPING_PROBS_AGE_STEPS
from forerun.decode.control.cost import CostCurve
from forerun.decode.control.depth import MAX_SAVED_PROBES, MIN_GAIN_PER_DOUBLING, DepthPlan, Probes
from forerun.decode.control.selection import select
from tests.decode.worlds import CPU, make


def test_the_tokens_of_a_step_count_once():
    """Drafting steps give no more tokens and take longer: counted again in later steps, they would seem to win."""
    c, now, drafted = make(), 0.0, []
    for _ in range(60):
        drafted.append(c.should_draft(8, False, now))
        c.record_drafting([Draft.chain([1], [0.9], "free")] * 8, 0.0)
        c.record_emitted(8)
        now += 1.5 if drafted[-1] else 1.0
    assert sum(drafted) < 10


# -- free drafters -----------------------------------------------------------------------------------------------------


def test_a_free_drafter_that_takes_next_to_nothing_always_runs():
    c = make()
    token_s = c.target.seconds(1)
    for _ in range(100):
        c.record_free_run("lookup", 0.9 * FREE_TIME_SHARE * token_s, 0.0)
    assert all(c.should_run_free("lookup") for _ in range(100))


def test_one_slow_run_does_not_rule_a_free_drafter_out():
    c = make()
    token_s = c.target.seconds(1)
    for _ in range(100):
        c.record_free_run("lookup", 0.5 * FREE_TIME_SHARE * token_s, 0.0)
    c.record_free_run("lookup", 100.0 * token_s, 0.0)
    assert c.should_run_free("lookup")


# -- what a batch owes its sequences -----------------------------------------------------------------------------------


def test_a_costly_start_counts_as_a_few_plain_steps_at_most():
    c = make()
    stats, drafts = [c.new_request(), c.new_request()], [Draft(), Draft()]
    c.select(stats, drafts, [[], []], [8, 8], 0, spent_s=1000.0)
    plain_s = c.target.seconds(2, 2)
    assert stats[0].taken_s == pytest.approx((1.0 + MAX_DRAFT_PLAIN_STEPS) * plain_s)
    assert stats[0].allowance_s == pytest.approx(plain_s)


def test_after_a_paid_draft_lagging_sequences_are_not_weighed_again():
    c = make(({1: 1.0, 2: 1.1, 3: 1.5, 8: 2.0}, {1: 0.2, 8: 0.3}))
    drafts = [Draft.chain([1, 2, 3], [0.95] * 3, "paid"), Draft()]
    probs = [draft.probs for draft in drafts]

    def lagging() -> list[RequestStats]:
        return [RequestStats(), RequestStats(plain_s=1.0, taken_s=2.0)]

    assert c.select(lagging(), drafts, probs, [8, 8], 0) == [[], []]
    assert c.select(lagging(), drafts, probs, [8, 8], 0, spent_s=0.5) == [[0, 1, 2], []]


# -- probes ------------------------------------------------------------------------------------------------------------


def test_a_probe_is_one_round():
    c = make()
    stats = RequestStats(probing="paid")
    rule = c.stopping_rule(stats, "paid")
    assert rule(1.0, 0) and not rule(1.0, 1)
    assert c.min_path_probs(stats, "paid")[0] > 1.0
    assert c.stopping_rule(c.new_request(), "paid")(1.0, 1) and c.min_path_probs(c.new_request(), "paid")[0] < 1.0


def one_plan(sequences: int = 1) -> DepthPlan:
    target = CostCurve(CPU[0])
    free = select(target, [Draft()] * sequences, [[]] * sequences, [16] * sequences, 0, 0.0, [])
    return DepthPlan(target, CostCurve(CPU[1]), 0, free)


def test_an_accepted_probe_is_refunded():
    c = make()
    stats = RequestStats(probing="paid", refund_s=0.25)
    c._probes.save("paid", one_plan())
    before = c._probes._credit_s["paid"]
    c.record_draft(stats, Draft.chain([5], [0.5], "paid"), [6])
    assert c._probes._credit_s["paid"] == before
    c.record_draft(stats, Draft.chain([5], [0.5], "paid"), [5, 6])
    assert c._probes._credit_s["paid"] == pytest.approx(before + 0.25)


def test_credit_is_saved_for_a_few_probes_only_and_a_new_request_has_few_cheap_ones():
    probes, plan = Probes(), one_plan()
    for _ in range(10_000):
        probes.save("paid", plan)
    stats = [RequestStats()]
    probed = 0
    while probes.plan(stats, "paid", plan, [16], [0.0], [0]) == [1]:
        probed += 1
    assert probed <= MAX_SAVED_PROBES
    assert stats[0].trials == 2 - probed


# -- depth and stopping ------------------------------------------------------------------------------------------------


def test_a_gain_must_exceed_a_margin_that_grows_with_the_batch():
    assert one_plan(1).min_rate == pytest.approx(one_plan(1).rate * (1.0 + MIN_GAIN_PER_DOUBLING))
    assert one_plan(16).min_rate == pytest.approx(one_plan(16).rate * (1.0 + 5 * MIN_GAIN_PER_DOUBLING))


def test_thresholds_for_devices_are_computed_anew_after_a_few_steps():
    c, stats = make(), RequestStats()
    first = c.min_path_probs(stats, "paid")
    for _ in range(400):
        c.observe_round("paid", 1, 1, 0, 10 * CPU[1][1])
    again = [c.min_path_probs(stats, "paid") for _ in range(STOPPING_PROBS_AGE_STEPS)]
    assert all(known == first for known in again[:-1]) and again[-1][0] > first[0]


# -- acceptance and selection ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prob", "hit", "limit"), [(0.01, True, MAX_ODDS_RATIO), (0.99, False, MIN_ODDS_RATIO)])
def test_a_requests_odds_have_limits(prob: float, hit: bool, limit: float):
    record = RequestRecord()
    for _ in range(400):
        record.count(prob, hit)
    assert record.factor == limit


def test_side_branches_do_not_count_in_acceptance_by_depth():
    known = Acceptance()
    draft = Draft([1, 2], [ROOT, ROOT], [0.8, 0.1], ["paid"] * 2)
    for _ in range(100):
        known.record_draft(RequestStats(), draft, [1])
    assert known.records["paid"].usual_by_depth()[0] > 0.95


def test_a_side_branch_has_its_own_cost():
    draft = Draft([1, 2], [ROOT, ROOT], [0.6, 0.39], ["free"] * 2)
    curve = CostCurve({1: 1.0, 8: 1.01})
    assert select(curve, [draft], [draft.probs], [8], 0, 0.0, []).nodes == [[0, 1]]
    curve.per_branch = 0.5
    assert select(curve, [draft], [draft.probs], [8], 0, 0.0, []).nodes == [[0]]
