"""The governor against a simulated clock: how often it lets a batch draft, and what that costs."""

from __future__ import annotations

from itertools import groupby

from forerun.decode.control.governor import (
    FIRST_PAUSE_STEPS,
    MAX_PAUSE_STEPS,
    SEQS_PER_FIRST_PAUSE,
    TIMED_STEPS,
    TRUSTED_STEPS,
    Governor,
)


def run(steps: int, speedup: float, sequences: int = 16, spikes: tuple[int, ...] = ()) -> tuple[float, float]:
    """(share of steps that drafted, speed against never drafting) where drafting makes a step's tokens worth more."""
    governor, now, tokens, made, drafted = Governor(), 0.0, 0, 0.0, 0
    for step in range(steps):
        allowed = governor.should_draft(sequences, tokens, now)
        drafted += allowed
        tokens = sequences * 2 if allowed else sequences
        seconds = 2.0 / speedup if allowed else 1.0
        made += tokens
        now += seconds * (40 if step in spikes else 1)
    return drafted / steps, made / now / sequences


def phases(
    steps: int, pays_from: int = 1 << 30, pays_until: int = 1 << 30, sequences: int = 2
) -> list[tuple[bool, int]]:
    """(drafted or not, steps) of each phase. A drafting step takes twice as long; it gives three times the tokens while
    drafting pays, and no more than a plain one otherwise."""
    governor, now, tokens, drafted = Governor(), 0.0, 0, []
    for step in range(steps):
        drafted.append(governor.should_draft(sequences, tokens, now))
        gain = 3 if pays_from <= step < pays_until else 1
        tokens = sequences * gain if drafted[-1] else sequences
        now += 2.0 if drafted[-1] else 1.0
    return [(kind, len(list(group))) for kind, group in groupby(drafted)]


def test_drafts_that_pay_are_made() -> None:
    share, speed = run(1000, 1.3)
    assert share > 0.9
    assert speed > 1.25


def test_drafts_that_do_not_pay_hardly_cost() -> None:
    share, speed = run(1000, 0.6)
    assert share < 0.05
    assert speed > 0.97


def test_a_short_batch_loses_little_too() -> None:
    assert run(128, 0.7)[1] > 0.94


def test_one_hiccup_decides_nothing() -> None:
    assert run(300, 1.3, spikes=(9,))[0] > 0.8
    assert run(300, 0.6, spikes=(3,))[0] < 0.1


def test_one_sequence_alone_always_drafts() -> None:
    assert run(50, 0.5, sequences=1)[0] == 1.0


def test_each_loss_doubles_the_pause_up_to_the_maximum() -> None:
    pauses = [num - TIMED_STEPS for drafted, num in phases(12 * MAX_PAUSE_STEPS) if not drafted][1:-1]
    doubled = [FIRST_PAUSE_STEPS]
    while doubled[-1] < MAX_PAUSE_STEPS:
        doubled.append(2 * doubled[-1])
    assert doubled[-1] == MAX_PAUSE_STEPS
    assert pauses[: len(doubled)] == doubled
    assert pauses[len(doubled) :] and set(pauses[len(doubled) :]) == {MAX_PAUSE_STEPS}


def test_a_win_resets_the_pause() -> None:
    """Three losses, then a win, then losses again: the pauses start from the first one."""
    three_losses = 4 * TIMED_STEPS + 7 * FIRST_PAUSE_STEPS
    found = phases(6000, pays_from=three_losses, pays_until=three_losses + TRUSTED_STEPS // 2)
    drafting = [num for drafted, num in found if drafted]
    won = next(i for i, num in enumerate(drafting) if num > TRUSTED_STEPS)
    assert won == 3
    pauses = [num - TIMED_STEPS for drafted, num in found if not drafted]
    assert pauses[1 : won + 1] == [FIRST_PAUSE_STEPS, 2 * FIRST_PAUSE_STEPS, 4 * FIRST_PAUSE_STEPS]
    assert pauses[won + 2 : won + 4] == [FIRST_PAUSE_STEPS, 2 * FIRST_PAUSE_STEPS]


def test_a_clear_loss_ends_a_comparison_early() -> None:
    trials = [num for drafted, num in phases(1000) if drafted]
    assert max(trials) < TIMED_STEPS


def test_large_batches_pause_longer() -> None:
    few, many = 2, 8 * SEQS_PER_FIRST_PAUSE
    first = [
        [num for drafted, num in phases(2000, sequences=num) if not drafted][1] - TIMED_STEPS for num in (few, many)
    ]
    assert first == [FIRST_PAUSE_STEPS, 8 * FIRST_PAUSE_STEPS]


def test_steps_of_changing_batches_are_not_compared() -> None:
    governor = Governor()
    for step in range(40):
        assert not governor.should_draft(8 + step % 2, 8, float(step))
