"""Bits by importance: within the limit, near the best there is, and a least memory that is true."""

from __future__ import annotations

import itertools
import random

import pytest

from forerun.errors import BadRequest
from forerun.models.cpu.importance import (
    STREAM_BUFFERS,
    UnitCost,
    WeightPlan,
    fit_memory,
    fit_quality,
    size_text,
    stream_plan,
    total_bytes,
    total_kl,
)
from forerun.options import parse_bytes


def some_units(seed: int, count: int = 6) -> list[UnitCost]:
    rng = random.Random(seed)
    found = []
    for i in range(count):
        size = 1000 if i < count - 1 else 3000  # the head
        kl4 = rng.lognormvariate(-5, 1)
        found.append(UnitCost.measured({16: 16 * size, 8: 85 * size // 10, 4: 45 * size // 10}, kl4, kl4 / 50))
    return found


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("share", [0.3, 0.4, 0.5, 0.7, 1.0])
def test_memory_is_kept_at_nearly_the_least_kl(seed: int, share: float) -> None:
    units = some_units(seed)
    limit = int(total_bytes(units, [16] * 6) * share)
    bits = fit_memory(units, limit)
    possible = [b for b in itertools.product((4, 8, 16), repeat=6) if total_bytes(units, b) <= limit]
    assert bits in possible
    best = min(total_kl(units, b) for b in possible)
    worst = max(total_kl(units, b) for b in possible)
    assert total_kl(units, bits) <= best + 0.1 * (worst - best)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("limit", [1e-9, 1e-3, 0.01, 0.05, 1.0])
def test_quality_is_kept_at_nearly_the_fewest_bytes(seed: int, limit: float) -> None:
    units = some_units(seed)
    bits = fit_quality(units, limit)
    assert total_kl(units, bits) <= limit
    possible = [b for b in itertools.product((4, 8, 16), repeat=6) if total_kl(units, b) <= limit]
    assert total_bytes(units, bits) <= 1.2 * min(total_bytes(units, b) for b in possible)
    if limit == 1.0:
        assert set(bits) == {4}


def test_the_important_layer_gets_more_bits() -> None:
    sizes = {16: 160, 8: 85, 4: 45}
    units = [UnitCost.measured(sizes, kl, kl / 50) for kl in (0.01, 0.5, 0.01, 0.01)]
    assert fit_memory(units, 45 * 3 + 85) == (4, 8, 4, 4)
    assert fit_quality(units, 0.05) == (4, 8, 4, 4)


def test_more_bits_are_never_worse() -> None:
    assert UnitCost.measured({}, 0.001, 0.002).kl == {16: 0.0, 8: 0.002, 4: 0.002}
    assert UnitCost.measured({}, 0.001, -1e-9).kl[8] == 0.0


def test_what_does_not_fit_is_streamed_and_the_least_is_true() -> None:
    units = some_units(0)
    layer, whole = units[0].bytes[4], total_bytes(units, [4] * 6)
    assert stream_plan(units, whole).streamed == 0
    for limit in range(whole - 3 * layer, whole, 500):
        plan = stream_plan(units, limit)
        resident = whole - plan.streamed * layer
        assert plan.streamed >= 1 and resident + STREAM_BUFFERS * layer <= limit
        assert limit < resident + (STREAM_BUFFERS + 1) * layer or plan.streamed == 1  # no more than has to be
    with pytest.raises(BadRequest, match="this model needs") as problem:
        stream_plan(units, layer)
    least = str(problem.value.hint).split("memory=")[1].split()[0]
    assert stream_plan(units, parse_bytes("memory", least)).streamed == 5


@pytest.mark.parametrize("count", [1, 1023, 1 << 20, 123_456_789, 5_000_000_001])
def test_sizes_in_messages_can_be_given(count: int) -> None:
    assert count <= parse_bytes("memory", size_text(count)) <= count * 1.01 + 11


def test_a_plan_names_its_layers() -> None:
    plan = WeightPlan((4, 8, 8, 4, 16), streamed=2)
    assert [plan.streams(f"layers.{i}.down") for i in range(4)] == [False, False, True, True]
    assert not plan.streams("embed") and not plan.streams("head")
    assert "2 in 4, 2 in 8" in plan.summary and plan.text == "4,8,8,4,16 streamed 2"
