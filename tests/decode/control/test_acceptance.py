"""What became of drafts: probabilities corrected by outcomes, for all requests, by kind of prompt and for one."""

from __future__ import annotations

import json

import pytest

from forerun.core import ROOT, Draft
from forerun.decode.control.acceptance import (
    FREE_PRIOR_TOKENS,
    MAX_ODDS_RATIO,
    MIN_ODDS_RATIO,
    PAID_PRIOR,
    PAID_PRIOR_ELSEWHERE,
    TRACKED_DEPTHS,
    Acceptance,
    DrafterRecord,
    KindRecord,
    RequestRecord,
    RequestStats,
)


def test_probabilities_begin_with_the_drafters_own_and_end_with_outcomes():
    known = Acceptance()
    draft = Draft.chain([1, 2], [0.9, 0.4], "free")
    assert known.calibrate(RequestStats(), draft) == pytest.approx([0.9, 0.4])
    for i in range(200):
        known.record_draft(RequestStats(), draft, [1, 2, 3] if i % 5 == 0 else [7])
    first, second = known.calibrate(RequestStats(), draft)
    assert first == pytest.approx(0.2, abs=0.06)
    assert second > 0.9  # whenever its parent came, it came


def test_a_request_has_its_own_record():
    known = Acceptance()
    draft = Draft.chain([1], [0.5], "free")
    lucky, usual = RequestStats(), RequestStats()
    for i in range(100):
        known.record_draft(usual, draft, [1] if i % 2 else [2])
    for _ in range(12):
        known.record_draft(lucky, draft, [1])
    assert known.calibrate(lucky, draft)[0] > 0.7
    assert known.calibrate(usual, draft)[0] < 0.65
    assert known.calibrate(lucky, Draft.chain([1], [0.5], "other")) == pytest.approx([0.5])


def test_only_what_could_have_been_seen_is_learnt():
    known = Acceptance()
    #          0: 5    1: 6 below 0   2: 9 below 0   3: 8, a sibling of 0   4: 1 below 3
    draft = Draft([5, 6, 9, 8, 1], [ROOT, 0, 0, ROOT, 3], [0.5] * 5, ["a", "b", "c", "d", "e"])
    known.record_draft(RequestStats(), draft, [5])
    assert set(known.stats()) == {"a", "d"}
    known.record_draft(RequestStats(), draft, [5, 9, 4])
    seen = {name: found["by_prob"]["0.5"] for name, found in known.stats().items()}
    assert set(seen) == {"a", "b", "c", "d"}
    assert [seen[name]["accepted"] for name in "abcd"] == [1.0, 0.0, 1.0, 0.0]


def test_one_node_is_calibrated_as_a_whole_draft_is():
    known, stats = Acceptance(), RequestStats()
    draft = Draft.chain([1, 2, 3], [0.9, 0.7, 1.0], "free")
    for emitted in ([1, 2, 3, 4], [1, 9], [8], [1, 2, 9]):
        known.record_draft(stats, draft, emitted)
    record, factor = known.records["free"], stats.own["free"].factor
    assert factor != 1.0
    one_by_one = [record.prob(raw, node == 0, factor) for node, raw in enumerate(draft.probs)]
    assert one_by_one == pytest.approx(known.calibrate(stats, draft))


@pytest.mark.parametrize(("prob", "hit", "limit"), [(0.01, True, MAX_ODDS_RATIO), (0.99, False, MIN_ODDS_RATIO)])
def test_a_requests_odds_have_limits(prob: float, hit: bool, limit: float):
    record = RequestRecord()
    for _ in range(400):
        record.count(prob, hit)
    assert record.factor == limit


# -- acceptance by depth -----------------------------------------------------------------------------------------------


def by_depth(known: Acceptance, doubt: float = 0.0, kind: str = "text", deepest: int = 12) -> list[float]:
    return known.records["paid"].by_depth(kind, RequestRecord(), deepest, doubt)


def test_acceptance_by_depth_goes_on_as_at_the_last_one_known():
    known = Acceptance()
    chain = Draft.chain(list(range(12)), [0.8] * 12, "paid")
    for _ in range(300):
        known.record_draft(RequestStats(), chain, [*range(3), 99])  # the fourth never comes
    ahead = by_depth(known)
    assert len(ahead) == 12
    assert min(ahead[:3]) > 0.9 and ahead[3] < 0.1
    assert ahead[TRACKED_DEPTHS:] == [ahead[TRACKED_DEPTHS - 1]] * (12 - TRACKED_DEPTHS)


def test_a_lower_bound_narrows_with_outcomes_of_this_request():
    known = Acceptance()
    assert by_depth(known) == pytest.approx([PAID_PRIOR_ELSEWHERE] * 12)
    assert by_depth(known, kind="code") == pytest.approx([PAID_PRIOR["code"]] * 12)
    own = RequestRecord()
    record, doubts = known.records["paid"], []
    for _ in range(4):
        doubts.append(record.by_depth("text", own, 1, 0.0)[0] - record.by_depth("text", own, 1, 1.0)[0])
        for i in range(10):
            record.count_level(KindRecord(), own, 0, hit=i % 10 < 7)
    assert doubts == sorted(doubts, reverse=True) and doubts[0] > 0.12 and doubts[-1] < 0.09


def test_what_others_accepted_never_counts_as_much_as_this_requests_own_outcomes():
    known, chain = Acceptance(), Draft.chain([1], [0.7], "paid")
    for _ in range(5000):
        known.record_draft(RequestStats(), chain, [1])
    assert by_depth(known, 1.0)[0] > 0.9
    stats = RequestStats()
    for _ in range(60):
        known.record_draft(stats, chain, [2])
    assert known.records["paid"].by_depth("text", stats.own["paid"], 1, 1.0)[0] < 0.45
    assert by_depth(known, 0.0)[0] > 0.8  # for the next one it was one poor request among many


def test_a_drafters_own_probabilities_count_before_any_outcome():
    known, sure, unsure = Acceptance(), RequestRecord(), RequestRecord()
    draft = Draft.chain([1, 2, 3, 4], [0.99] * 4, "paid")
    sure.state(draft, [0.99] * 4)
    unsure.state(draft, [0.2] * 4)
    record = known.records["paid"]
    usual = by_depth(known)[0]
    assert record.by_depth("text", sure, 1, 0.0)[0] > usual > record.by_depth("text", unsure, 1, 0.0)[0]


def test_candidates_that_a_drafter_only_scored_do_not_stand_for_what_it_is_sure_of():
    own = RequestRecord()
    draft = Draft([7, 8, 1, 2], [ROOT, 0, ROOT, 2], [0.01, 0.5, 0.9, 0.8], ["paid"] * 4)
    own.state(draft, draft.probs)
    assert own.stated == pytest.approx(0.91 + 0.91 * 0.8) and own.stated_levels == pytest.approx(1.91)


def test_of_a_draft_in_one_forward_a_path_counts_to_where_it_ends():
    """Whether the tree ended there or the token was another: what a step gains is what is planned for."""
    known, stats = Acceptance(), RequestStats("code")
    own = stats.own["paid"]
    for accepted in (0, 3, 3, 8):
        own.asked = 8
        known.record_path(stats, "paid", accepted, accepted + 1)
    depths = known.records["paid"].kinds["code"].depths
    assert [round(tries) for _, tries in depths] == [4, 3, 3, 3, 1, 1, 1, 1]
    assert [round(hits) for hits, _ in depths] == [3, 3, 3, 1, 1, 1, 1, 1]
    own.asked = 8
    known.record_path(stats, "paid", 2, 2)  # the answer ended there: no miss
    assert round(depths[2][1]) == 3 and own.asked == 0


def test_what_is_stated_of_a_draft_in_one_forward_is_never_more_than_certain():
    own = RequestRecord(asked=2)
    own.state_reach([1.2, 0.9, 0.8, 0.8])  # siblings that claim more than there is, a free draft that goes deeper
    assert own.stated == pytest.approx(1.9) and own.stated_levels == pytest.approx(2.0)
    assert 0.0 < Acceptance().records["paid"].by_depth("text", own, 4, 1.0)[0] < 1.0


def test_few_outcomes_at_one_depth_do_not_shape_it():
    known, stats = Acceptance(), RequestStats("code")
    for _ in range(3):
        known.record_draft(stats, Draft.chain([1, 2], [0.9, 0.9], "paid"), [7])
    first, later = known.records["paid"].by_depth("code", stats.own["paid"], 2, 0.0)
    assert later - 0.08 < first < later < PAID_PRIOR["code"]


def test_kinds_of_prompts_are_learnt_apart():
    known, chain = Acceptance(), Draft.chain([1], [0.7], "paid")
    for _ in range(200):
        known.record_draft(RequestStats("code"), chain, [1])
        known.record_draft(RequestStats("text"), chain, [2])
    assert by_depth(known, kind="code")[0] > 0.95 and by_depth(known, kind="text")[0] < 0.1
    assert by_depth(known, kind="numbers")[0] == pytest.approx(PAID_PRIOR["numbers"])


def test_by_depth_it_counts_whether_any_branch_goes_on():
    known = Acceptance()
    draft = Draft([1, 2, 3], [ROOT, ROOT, 0], [0.8, 0.1, 0.9], ["paid"] * 3)
    for _ in range(100):
        known.record_draft(RequestStats(), draft, [1, 3])
        known.record_draft(RequestStats(), draft, [2, 3])  # right too, but its path ends where the other goes on
    first, second = by_depth(known, deepest=2)
    assert first > 0.95 and 0.4 < second < 0.6


def test_what_a_drafters_file_has_counts_as_outcomes_of_others():
    known = Acceptance()
    record = known.records["paid"]
    record.add_measured({"text": [[90.0, 100.0], [40.0, 80.0]]})
    first, second = by_depth(known, deepest=2)
    assert first > 0.75 and second < 0.6 and record.has_paid("text")
    assert by_depth(known, 1.0, deepest=1)[0] > first - 0.12  # requests of a kind differ by about 0.1
    record.add_measured({"text": [[0.0, 100.0]], "code": [[1.0, 1.0]]})
    assert by_depth(known, deepest=1)[0] == first  # what was learnt since stays
    assert not record.has_paid("code")


# -- free drafters and answers -----------------------------------------------------------------------------------------


def test_a_run_is_worth_less_with_every_one_that_gives_nothing():
    record, stats = DrafterRecord(), RequestStats(prompt_tokens=100)
    own = stats.own["free"]
    values = []
    for _ in range(30):
        values.append(record.run_tokens("text", own))
        record.count_run(stats, own, 0, 1e-4)
    assert 0.0 < values[0] < FREE_PRIOR_TOKENS
    assert values == sorted(values, reverse=True) and values[-1] < 0.03
    for _ in range(3):
        record.count_run(stats, own, 8, 1e-4)
    assert record.run_tokens("text", own) > 0.5  # it finds something again


def test_reading_a_prompt_counts_apart_from_runs_and_pauses_are_cut():
    record, stats = DrafterRecord(), RequestStats(prompt_tokens=999)
    own = stats.own["free"]
    record.count_run(stats, own, 0, 1e-3)
    assert record.read_s == pytest.approx(1e-6) and record.run_s == 0.0
    for _ in range(10):
        record.count_run(stats, own, 0, 50e-6)
    record.count_run(stats, own, 0, 1.0)  # the operating system had other work
    assert record.run_s < 70e-6


def test_a_request_that_is_unlike_the_others_is_believed():
    """A file may have outcomes that are wrong for a text: drafts must not go on by them."""
    record = DrafterRecord()
    record.add_measured({"code": [[95.0, 100.0]] * TRACKED_DEPTHS})
    for drafted, least, most in ((5, 0.3, 0.75), (15, 0.25, 0.55)):
        own = RequestRecord(levels=[0.3 * drafted, float(drafted)])
        assert least < record.by_depth("code", own, 1, 0.0, block=True)[0] < most
    alike = RequestRecord(levels=[13.0, 15.0])
    assert record.by_depth("code", alike, 1, 0.0, block=True)[0] > 0.87


def test_the_report_is_plain_data_and_a_record_comes_back():
    known = Acceptance()
    known.record_draft(RequestStats("code"), Draft.chain([1, 2], [0.9, 1.0], "free"), [1, 2, 3])
    stats = json.loads(json.dumps(known.stats()))
    assert stats["free"]["by_prob"]["1"] == {"tries": 1.0, "accepted": 1.0}
    assert stats["free"]["kinds"]["code"]["by_depth"] == [1.0, 1.0]
    record = known.records["free"]
    again = DrafterRecord.from_record(json.loads(json.dumps(record.record())))
    assert again.record() == record.record()
    for damage in ({"first": []}, {"kinds": {"code": [[], [0, 0], [0, 0]]}}, {"s": [-1.0, 0.0]}):
        with pytest.raises(ValueError):
            DrafterRecord.from_record({**record.record(), **damage})
