"""Pauses after empty drafting attempts: when they start, how long they are, and what ends them."""

from __future__ import annotations

import pytest

from forerun.core import Draft
from forerun.decode.control.governor import (
    EMPTY_STEPS_BEFORE_PAUSE,
    LARGE_BATCH_SEQS,
    MAX_EMPTY_PAUSE_STEPS,
    MAX_EMPTY_TIME_SHARE,
    EmptyDraftBackoff,
)
from tests.decode.worlds import make

SLOW = 10 * MAX_EMPTY_TIME_SHARE  # of a plain step: ten times what empty attempts may take


def attempts(steps: int, sequences: int = 1, draft_s: float = SLOW, drafted: tuple[int, ...] = ()) -> list[int]:
    """The steps in which drafting was attempted; those in `drafted` gave a draft."""
    backoff, found = EmptyDraftBackoff(), []
    for step in range(steps):
        if not backoff.should_skip():
            found.append(step)
            backoff.record(sequences, step in drafted, draft_s, plain_s=1.0)
    return found


def test_a_few_empty_attempts_in_a_row_start_a_pause():
    assert attempts(40) == [*range(EMPTY_STEPS_BEFORE_PAUSE), 13, 23, 33]


def test_a_draft_starts_the_count_again():
    assert attempts(12, drafted=(2,)) == list(range(3 + EMPTY_STEPS_BEFORE_PAUSE))


def test_in_a_large_batch_one_empty_attempt_is_enough():
    assert attempts(12, sequences=LARGE_BATCH_SEQS) == [0, 10]
    assert attempts(12, sequences=LARGE_BATCH_SEQS - 1) == list(range(EMPTY_STEPS_BEFORE_PAUSE))


def test_attempts_that_take_next_to_nothing_go_on():
    assert attempts(40, draft_s=MAX_EMPTY_TIME_SHARE / 2) == list(range(40))


def test_a_pause_is_no_longer_than_the_maximum():
    found = attempts(300, draft_s=100.0)[EMPTY_STEPS_BEFORE_PAUSE - 1 :]
    assert {b - a for a, b in zip(found, found[1:], strict=False)} == {MAX_EMPTY_PAUSE_STEPS}


def controller_pauses(named: bool = False) -> bool:
    """Whether the controller drafts after empty attempts that took long."""
    c = make()
    for _ in range(EMPTY_STEPS_BEFORE_PAUSE):
        assert c.should_draft(1, named, 0.0)
        c.record_drafting([Draft()], c.target.seconds(1))
    return not c.should_draft(1, named, 0.0)


@pytest.mark.parametrize("named", [False, True])
def test_the_controller_asks_it_also_where_a_drafter_is_named(named: bool):
    assert controller_pauses(named)


def test_a_new_request_ends_the_pause():
    c = make()
    for _ in range(EMPTY_STEPS_BEFORE_PAUSE):
        c.record_drafting([Draft()], c.target.seconds(1))
    c.new_request()
    assert c.should_draft(1, False, 0.0)


def test_a_batch_that_is_slower_with_drafts_drafts_only_where_a_drafter_is_named():
    """The first steps of a batch are plain, to be timed."""
    assert not make().should_draft(8, False, 0.0)
    assert make().should_draft(8, True, 0.0)


def test_emitted_tokens_reach_the_governor():
    """Steps that give more tokens in the same time with drafts: drafting goes on."""
    c, drafted = make(), []
    for step in range(100):
        drafted.append(c.should_draft(8, False, float(step)))
        c.record_drafting([Draft.chain([1], [0.9], "free")] * 8, 0.0)
        for _ in range(8):
            c.record_emitted(2 if drafted[-1] else 1)
    assert sum(drafted[20:]) == 80
