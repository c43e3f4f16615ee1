"""The governor against a clock of its own: how often it lets a batch guess, and what that costs."""

from __future__ import annotations

from forerun.decode.control.governor import FIRST_PAUSE_STEPS, Governor


def run(steps: int, speedup: float, sequences: int = 16, spikes: tuple[int, ...] = ()) -> tuple[float, float]:
    """(share of steps that guessed, speed against never guessing) where guessing makes a step's tokens worth more."""
    governor, now, tokens, made, drafted = Governor(), 0.0, 0, 0.0, 0
    for step in range(steps):
        allowed = governor.should_draft(sequences, tokens, now)
        drafted += allowed
        tokens = sequences * 2 if allowed else sequences
        seconds = 2.0 / speedup if allowed else 1.0
        made += tokens
        now += seconds * (40 if step in spikes else 1)
    return drafted / steps, made / now / sequences


def test_guesses_that_pay_are_made() -> None:
    share, speed = run(1000, 1.3)
    assert share > 0.9
    assert speed > 1.25


def test_guesses_that_do_not_pay_hardly_cost() -> None:
    share, speed = run(1000, 0.6)
    assert share < 0.05
    assert speed > 0.97


def test_a_short_batch_loses_little_too() -> None:
    assert run(128, 0.7)[1] > 0.94


def test_one_hiccup_decides_nothing() -> None:
    assert run(300, 1.3, spikes=(9,))[0] > 0.8
    assert run(300, 0.6, spikes=(3,))[0] < 0.1


def test_one_sequence_is_left_alone() -> None:
    assert run(50, 0.5, sequences=1)[0] == 1.0


def test_what_was_lost_is_tried_again() -> None:
    governor, now, tokens, tried = Governor(), 0.0, 0, []
    for step in range(8 * FIRST_PAUSE_STEPS):
        allowed = governor.should_draft(8, tokens, now)
        if allowed:
            tried.append(step)
        tokens, now = 8, now + (2.0 if allowed else 1.0)
    assert max(tried) - min(tried) > FIRST_PAUSE_STEPS  # more than one trial


def test_steps_of_changing_batches_are_not_compared() -> None:
    governor = Governor()
    for step in range(40):
        assert not governor.should_draft(8 + step % 2, 8, float(step)) or step > 0
    assert not any(governor.should_draft(8 + step % 2, 8, 100.0 + step) for step in range(40))
