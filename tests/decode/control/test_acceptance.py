"""What became of guesses: probabilities corrected by experience, for all requests and for one."""

from __future__ import annotations

import json

import pytest

from forerun.core import ROOT, Draft
from forerun.decode.control.acceptance import TRACKED_DEPTHS, Acceptance, DrafterRecord, RequestStats


def test_chances_begin_with_the_drafters_word_and_end_with_experience():
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


def test_a_probes_hits_are_told():
    known, stats = Acceptance(), RequestStats(probing="paid")
    draft = Draft([5, 6, 9], [ROOT, 0, 1], [0.5] * 3, ["paid", "free", "paid"])
    assert known.record_draft(stats, draft, [5, 6, 9, 1]) == 2
    assert known.record_draft(stats, draft, [5, 7]) == 1
    assert known.record_draft(RequestStats(), draft, [5, 6, 9, 1]) == 0


def test_one_node_is_judged_as_a_whole_draft_is():
    known, stats = Acceptance(), RequestStats()
    draft = Draft.chain([1, 2, 3], [0.9, 0.7, 1.0], "free")
    for emitted in ([1, 2, 3, 4], [1, 9], [8], [1, 2, 9]):
        known.record_draft(stats, draft, emitted)
    record, factor = known.records["free"], stats.own["free"].factor
    assert factor != 1.0
    one_by_one = [record.prob(raw, node == 0, factor) for node, raw in enumerate(draft.probs)]
    assert one_by_one == pytest.approx(known.calibrate(stats, draft))


def test_acceptance_by_depth_goes_on_as_at_the_last_one_known():
    known = Acceptance()
    chain = Draft.chain(list(range(12)), [0.8] * 12, "paid")
    for _ in range(300):
        known.record_draft(RequestStats(), chain, [*range(3), 99])  # the fourth never comes
    ahead = known.records["paid"].acceptance_by_depth(1.0, 12)
    assert len(ahead) == 12
    assert min(ahead[:3]) > 0.9 and ahead[3] < 0.1
    assert ahead[TRACKED_DEPTHS:] == [ahead[TRACKED_DEPTHS - 1]] * (12 - TRACKED_DEPTHS)
    for _ in range(300):
        known.record_draft(RequestStats(), chain, [*range(10), 99])  # now the eleventh does not
    ahead = known.records["paid"].acceptance_by_depth(1.0, 12)
    assert ahead[0] > 0.95 and 0.7 < ahead[-1] < 0.8  # three of four from the eighth on
    assert DrafterRecord().acceptance_by_depth(2.0, 2) == pytest.approx(
        [0.8 * 2 / (0.2 + 0.8 * 2)] * 2
    )  # twice the odds


def test_a_sequence_is_owed_what_drafting_took_beyond_a_little():
    assert not RequestStats(plain_s=10.0, taken_s=10.9, allowance_s=1.0).lagging
    assert RequestStats(plain_s=10.0, taken_s=11.2, allowance_s=1.0).lagging


def test_the_report_is_plain_data():
    known = Acceptance()
    known.record_draft(RequestStats(), Draft.chain([1, 2], [0.9, 1.0], "free"), [1, 2, 3])
    stats = json.loads(json.dumps(known.stats()))
    assert stats["free"]["by_prob"]["1"] == {"tries": 1.0, "accepted": 1.0}
    assert stats["free"]["by_depth"] == [1.0, 1.0]
