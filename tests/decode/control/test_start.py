"""When a draft model reads: by what waiting has lost against its drafts, and later where free drafts show more."""

from __future__ import annotations

from forerun.decode.control.acceptance import DrafterRecord, RequestStats
from forerun.decode.control.start import FIRST_TOKENS, WAITED_SHARE, Unread, too_early

START_S, TOKEN_S, PLAIN_S = 0.095, 0.01, 0.02


def paid() -> DrafterRecord:
    record = DrafterRecord()
    record.add_measured({"text": [[80.0, 100.0]]})
    return record


def early(s: RequestStats, record: DrafterRecord, free: bool = False, more_s: float = PLAIN_S - TOKEN_S) -> bool:
    return too_early(s, record, START_S, TOKEN_S, more_s, free)


def test_what_was_lost_counts_since_free_drafts_were_last_better() -> None:
    unread = Unread()
    unread.count(1, 0.5, TOKEN_S)  # what came before it was asked is nothing
    assert unread.lost_s == 0.0
    unread.count(3, 0.5 + 2 * PLAIN_S, TOKEN_S)
    assert abs(unread.lost_s - 2 * (PLAIN_S - TOKEN_S)) < 1e-12
    unread.count(20, 0.6, TOKEN_S)  # a long copy
    assert unread.lost_s == 0.0
    unread.count(21, 0.62, TOKEN_S)
    assert abs(unread.lost_s - 0.01) < 1e-12


def test_one_that_has_paid_reads_once_waiting_costs_its_share_of_reading() -> None:
    s, record = RequestStats("text", tokens=1), paid()
    assert early(s, record, more_s=0.9 * WAITED_SHARE * START_S)
    assert not early(s, record, more_s=1.1 * WAITED_SHARE * START_S)


def test_a_free_draft_in_hand_is_waited_for_until_that_lost_as_much_as_reading_takes() -> None:
    s, record = RequestStats("text", tokens=1), paid()
    waited = 0
    while early(s, record, free=True):
        s.tokens, s.taken_s, waited = s.tokens + 1, s.taken_s + PLAIN_S, waited + 1
    assert waited == int(START_S / (PLAIN_S - TOKEN_S))
    assert not early(RequestStats("text", tokens=1), record)  # without one it reads at once


def test_copies_that_go_on_keep_it_from_reading() -> None:
    s, record = RequestStats("text", tokens=1), paid()
    for _ in range(20):
        assert early(s, record, free=True, more_s=PLAIN_S - 4 * TOKEN_S)
        s.tokens, s.taken_s = s.tokens + 4, s.taken_s + PLAIN_S


def test_one_that_has_not_paid_waits_for_the_first_tokens_unless_it_is_named() -> None:
    record = DrafterRecord()
    assert early(RequestStats("text", tokens=FIRST_TOKENS - 1), record)
    assert not early(RequestStats("text", tokens=FIRST_TOKENS), record)
    assert not early(RequestStats("text", tokens=1, named=True), record)
