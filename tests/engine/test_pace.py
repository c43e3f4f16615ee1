"""Prompt tokens beside streams: chunks follow what steps take, whatever the cost curve said at first."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from forerun.decode.control.cost import CostCurve
from forerun.engine.pace import (
    FIRST_CHUNK_TOKENS,
    GAP_STEPS,
    MAX_DRAFT_STEP_S,
    MIN_CHUNK_TOKENS,
    MIN_GAP_S,
    StepPacer,
    StepWork,
)

PLAIN_S = 0.010


def curve(token_s: float = 0.001, attention_s: float = 0.0) -> CostCurve:
    """Plain steps of 10 ms and so many seconds for each further token; and for each entry that it attends to."""
    return CostCurve({size: PLAIN_S + (size - 1) * token_s for size in (1, 2, 4, 8, 16, 32, 64)}, 0.0, attention_s)


def prefill(pacer: StepPacer, seconds: Callable[[StepWork], float], tokens: int = 6000, most: int = 512) -> list[float]:
    """Steps of a prompt beside streams until all of it has run; what each took."""
    taken, done = [], 0
    while done < tokens:
        count = min(tokens - done, pacer.prompt_tokens(4, done, most))
        work = StepWork(4, count, done, paced=True)
        taken.append(seconds(work))
        pacer.observe(work, 0, taken[-1])
        done += count
    return taken


def test_the_first_chunk_follows_the_curve_and_leaves_room_for_streams():
    pacer = StepPacer(lambda: curve(0.001))
    step = pacer.step_s(4)
    chunk = pacer.prompt_tokens(4, 0, 512)
    assert chunk == pytest.approx((GAP_STEPS - 1) * step / 0.001, abs=1)
    assert StepPacer(lambda: curve(0.0001)).prompt_tokens(4, 0, 512) == FIRST_CHUNK_TOKENS["cpu"]  # no further untimed
    steep = CostCurve({1: PLAIN_S, 16: PLAIN_S, 64: 5000 * PLAIN_S})
    assert StepPacer(lambda: steep).prompt_tokens(4, 0, 512) == MIN_CHUNK_TOKENS  # prompts go on
    assert pacer.prompt_tokens(4, 0, 3) == 3


@pytest.mark.parametrize("wrong", [0.2, 1.0, 5.0], ids=["curve too low", "right", "curve too high"])
def test_gaps_stay_within_the_bound_as_context_grows(wrong: float):
    """Attention over 6,000 entries makes a token eight times as expensive, and the curve knows nothing of that."""
    noise = random.Random(1)
    pacer = StepPacer(lambda: curve(0.001 * wrong))

    def seconds(work: StepWork) -> float:
        each = 0.001 + work.prompt_context * 1.2e-6
        return (pacer.step_s(4) + work.tokens * each) * noise.uniform(0.95, 1.05)

    taken = prefill(pacer, seconds)
    settled = taken[5:]
    assert max(settled) <= 4.0 * pacer.step_s(4)
    assert sum(settled) / len(settled) >= 0.6 * pacer.gap_s(4)  # and the room is used
    again = prefill(pacer, seconds, tokens=600)  # what a long context costs is not charged to a new prompt
    assert max(again) <= 4.0 * pacer.step_s(4) and 600 / len(again) > 10


def test_a_stream_that_attends_to_far_more_is_not_taken_for_slow_prompts():
    """A question beside an answer that has just begun, about a document that nothing was decoded about before: steps
    take twice as long as plain ones did, and the room beside them has to grow with them."""

    def question(untimed: bool) -> int:
        pacer, steps, left = StepPacer(lambda: curve(0.001)), 0, 60
        for _ in range(50):
            pacer.observe(StepWork(1, 0, 0), 0, PLAIN_S)
        while left > 0:
            count = pacer.prompt_tokens(1, 2000, left)
            pacer.observe(StepWork(1, count, 2000, True, untimed), 0, 3 * PLAIN_S + 0.003 * count)
            steps, left = steps + 1, left - count
        assert not untimed or 2 * PLAIN_S < pacer.step_s(1) < 4 * PLAIN_S
        return steps

    assert question(True) <= 7 and question(False) >= 10


def test_one_slow_step_is_not_believed_whole():
    pacer = StepPacer(lambda: curve(0.001))
    before = pacer.prompt_tokens(4, 0, 512)
    pacer.observe(StepWork(4, before, 0), 0, 5.0)
    assert before / 3 < pacer.prompt_tokens(4, 0, 512) < before


def test_plain_steps_are_learnt_and_steps_of_drafts_are_not():
    pacer = StepPacer(lambda: curve(0.001))
    for _ in range(100):
        pacer.observe(StepWork(4, 0, 0), 0, 0.040)
        pacer.observe(StepWork(4, 0, 0), 30, 0.500)
    assert pacer.step_s(4) == pytest.approx(0.040, rel=0.05)
    assert pacer.gap_s(4) == pytest.approx(0.120, rel=0.05)


def test_nodes_of_drafts_share_what_a_step_took_and_have_half_of_the_prompts_room():
    pacer = StepPacer(lambda: curve(0.001))
    for _ in range(100):
        pacer.observe(StepWork(4, 10, 0), 10, pacer.step_s(4) + 0.020)
    assert pacer.prompt_tokens(4, 0, 512) == pytest.approx(2 * pacer.step_s(4) / 0.001, rel=0.15)
    assert pacer.draft_nodes(StepWork(4, 20, 0, paced=True)) == 10
    assert pacer.draft_nodes(StepWork(4, 20, 0)) == pacer.draft_nodes(StepWork(4, 0, 0)) > 1000


def test_drafts_beside_streams_take_half_a_second_at_most():
    pacer, work = StepPacer(lambda: curve(0.004)), StepWork(8, 0, 0, paced=True)
    assert pacer.draft_nodes(work) == pytest.approx((MAX_DRAFT_STEP_S - pacer.step_s(8)) / 0.004, rel=0.05)
    own = StepPacer(lambda: curve(0.004), max_gap_s=0.1)
    assert own.draft_nodes(work) == pytest.approx((0.1 - own.step_s(8)) / 0.004, rel=0.05)
    slow = StepPacer(lambda: curve(1.0), max_gap_s=0.1)
    assert slow.draft_nodes(work) == 8  # a token of each stream goes on


def test_a_gpu_has_a_least_gap_and_grows_by_doubling():
    flat = CostCurve({1: 0.0012, 64: 0.0013})
    pacer = StepPacer(lambda: flat, "cuda")
    assert pacer.gap_s(4) == MIN_GAP_S["cuda"]
    taken = prefill(pacer, lambda work: 0.0015 + 0.001 + work.tokens * 6e-6, tokens=20_000, most=8192)
    assert max(taken) <= 0.060 and len(taken) < 20_000 / 512


def test_a_bound_of_ones_own():
    pacer = StepPacer(lambda: curve(0.001), max_gap_s=0.110)
    assert pacer.gap_s(1) == 0.110 and pacer.prompt_tokens(1, 0, 512) == FIRST_CHUNK_TOKENS["cpu"]
