"""Cost curves: few measurements, never falling, corrected by what steps really take and not by noise."""

from __future__ import annotations

import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.decode.control.cost import CostCurve

CPU = {1: 0.051, 2: 0.053, 4: 0.060, 8: 0.079, 16: 0.121, 32: 0.200}


def test_measuring_takes_few_calls_and_separates_context_from_tokens():
    calls = []

    def time_forward(tokens: int, context: int) -> float:
        calls.append((tokens, context))
        return CPU[tokens] + context * (2e-6 + 1e-6 * tokens)

    curve = CostCurve.measure(time_forward, list(CPU), [64, 1000])
    assert len(calls) == len(CPU) + 2
    for tokens, seconds in CPU.items():
        assert curve.seconds(tokens) == pytest.approx(seconds)
        assert curve.seconds(tokens, 1, 3000) == pytest.approx(seconds + 3000 * (2e-6 + 1e-6 * tokens))
    assert curve.seconds(8, 8, 3000) == pytest.approx(CPU[8] + 3000 * (8 * 2e-6 + 8 * 1e-6))


def test_sizes_between_and_beyond_the_measured_ones():
    curve = CostCurve(CPU)
    assert curve.seconds(3) == pytest.approx(0.0565)
    assert curve.seconds(24) == pytest.approx(0.1605)
    assert curve.seconds(64) == pytest.approx(0.2 + 32 * (0.2 - 0.121) / 16)
    assert curve.seconds_range(1, 70, 2, 100) == [curve.seconds(tokens, 2, 100) for tokens in range(1, 71)]
    assert CostCurve({1: 0.02}).seconds(5) == pytest.approx(0.02)


def test_a_disturbed_measurement_is_recognised_by_a_larger_size_that_took_less():
    curve = CostCurve({**CPU, 1: 0.5, 8: 0.3})
    assert curve.seconds(1) == pytest.approx(CPU[2])
    assert curve.seconds(8) == pytest.approx(CPU[16])


@pytest.mark.parametrize("points", [{}, {0: 1.0}, {1: 0.0}, {1: float("nan")}, {1: float("inf")}])
def test_nonsense_is_refused(points: dict[int, float]):
    with pytest.raises(ValueError, match="cost curve"):
        CostCurve(points)


def test_steps_that_take_ten_times_as_long_do_not_move_the_curve():
    rng = random.Random(0)
    curve = CostCurve(CPU)
    for _ in range(2000):
        tokens = rng.choice([1, 1, 1, 5, 8])
        usual = CostCurve(CPU).seconds(tokens) * rng.lognormvariate(0.0, 0.03)
        curve.observe(tokens, 1, 0, usual * (10.0 if rng.random() < 0.03 else 1.0))
    for tokens in CPU:
        assert curve.seconds(tokens) == pytest.approx(CPU[tokens], rel=0.05)


def test_a_machine_that_becomes_slower_is_followed_at_sizes_that_are_not_run_too():
    curve = CostCurve(CPU)
    for i in range(300):
        curve.observe(1 + i % 4, 1, 0, 1.6 * CostCurve(CPU).seconds(1 + i % 4))
    assert curve.seconds(1) == pytest.approx(1.6 * CPU[1], rel=0.05)
    assert curve.seconds(16) > 1.3 * CPU[16]


def test_stairs_are_learnt():
    """CUDA graphs of 8 and 16 tokens: nine tokens cost what sixteen do."""
    curve = CostCurve({1: 1.35e-3, 8: 1.45e-3, 16: 1.85e-3})
    assert curve.seconds(9) < 1.55e-3
    for _ in range(200):
        curve.observe(9, 1, 0, 1.85e-3)
        curve.observe(8, 1, 0, 1.45e-3)
    assert curve.seconds(9) == pytest.approx(1.85e-3, rel=0.04)
    assert curve.seconds(8) == pytest.approx(1.45e-3, rel=0.04)
    assert curve.seconds(12) == pytest.approx(1.85e-3, rel=0.04)


def test_a_curve_follows_a_change_that_another_has_seen():
    curve = CostCurve(CPU)
    for _ in range(32):
        curve.follow(0.02)
    assert curve.seconds(4) == pytest.approx(CPU[4] * math.exp(0.64))


def test_one_token_of_each_sequence():
    curve = CostCurve(CPU, 1e-6, 1e-7)
    assert curve.one_token_each(40, 500) == pytest.approx([0.0, *(curve.seconds(n, n, 500) for n in range(1, 41))])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 80), st.floats(1e-4, 10.0)), max_size=80))
def test_more_tokens_never_cost_less(observed: list[tuple[int, float]]):
    curve = CostCurve(CPU)
    for tokens, seconds in observed:
        curve.observe(tokens, 1, 0, seconds)
    row = curve.seconds_range(1, 120)
    assert all(a <= b * (1 + 1e-9) for a, b in zip(row, row[1:], strict=False))
    assert row[0] > 0.0


def test_what_is_no_time_is_ignored():
    curve = CostCurve(CPU)
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        curve.observe(1, 1, 0, seconds)
    curve.observe(0, 1, 0, 1.0)
    assert curve.points() == CostCurve(CPU).points()


def test_context_of_many_sequences_is_learnt_apart():
    """64 sequences read their context in a fraction of 64 times what one takes: the forward is not what errs."""
    curve = CostCurve(CPU, per_context=1e-4, per_context_token=0.0)
    for _ in range(4000):
        curve.observe(64, 64, 250, 0.4)
    assert curve.seconds(64, 64, 250) == pytest.approx(0.4, rel=0.1)
    for tokens, seconds in CPU.items():
        assert curve.seconds(tokens) == pytest.approx(seconds, rel=0.35)
    assert curve.seconds(1, 1, 250) == pytest.approx(CPU[1] + 250e-4, rel=0.35)


def test_a_long_prompt_is_read_in_parts_and_by_what_prompts_take():
    curve = CostCurve({1: 1e-3, 64: 2e-3})
    curve.start_factor = 1.5
    assert curve.start_s(0) == 0.0 and curve.start_s(32) == pytest.approx(1.5 * curve.seconds(32))
    curve.reading, curve.start_factor = CostCurve({128: 3e-3, 512: 5e-3}), 1.0
    assert curve.start_s(32) == curve.seconds(32)  # runs as rounds do
    assert curve.start_s(320) == pytest.approx(4e-3)
    assert curve.start_s(2 * 512 + 128) == pytest.approx(13e-3)
    again = CostCurve.from_record(json.loads(json.dumps(curve.record())))
    assert again.start_s(320) == pytest.approx(4e-3)
