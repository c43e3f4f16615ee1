"""Linears: close to float32, independent of the neighbours, and free of saturation by construction."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forerun.checks.quality import measure_modes
from forerun.models import linear as module
from forerun.models.linear import (
    EXACT,
    SATURATING,
    Linear,
    PackedFloat16,
    PackedFloat32,
    PackedInt8,
    Range,
    Rotation,
    SpreadInt8,
    hadamard,
    limit_pairs,
    pack_int8,
    quantise_matrix,
    quantise_rows,
    range_for,
)
from tests.cpu_kinds import INSTRUCTIONS, VNNI_ANSWERS, pretend, run_with

KINDS: list[type[Linear]] = [Linear, PackedFloat32, PackedFloat16, PackedInt8, SpreadInt8]
TOLERANCE = {PackedFloat16: 1e-3, PackedInt8: 0.02, SpreadInt8: 0.02}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_contract_against_plain_arithmetic(kind: type[Linear]):
    x, w, b, add, scale = (
        random(5, 96),
        random(64, 96, seed=1),
        random(64, seed=2),
        random(5, 64, seed=3),
        random(96, seed=4),
    )
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * scale
    expected = normed @ w.T + b + add
    got = kind(w, b)(x, norm=(scale, 1e-5), add=add)
    assert float((got - expected).norm() / expected.norm()) < TOLERANCE.get(kind, 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_gated_is_activation_of_one_half_times_the_other(kind: type[Linear]):
    x, w = random(3, 96), random(64, 96, seed=1)
    gate, up = (x @ w.T).chunk(2, -1)
    for name, function in (
        ("silu", torch.nn.functional.silu),
        ("gelu_tanh", lambda v: torch.nn.functional.gelu(v, approximate="tanh")),
    ):
        expected = function(gate) * up
        got = kind(w).gated(x, name)
        assert float((got - expected).norm() / expected.norm()) < TOLERANCE.get(kind, 1e-5) * 2


@pytest.mark.parametrize("kind", [PackedFloat32, PackedInt8, SpreadInt8])
def test_a_row_does_not_depend_on_its_neighbours(kind: type[Linear]):
    linear, x = kind(random(128, 192, seed=1)), random(8, 192)
    among_outliers = x.clone()
    among_outliers[1:] *= 1000.0
    assert torch.equal(linear(x)[0], linear(among_outliers)[0])


ROWS_ALONE = """
import torch
from forerun.models.linear import Rotation, SpreadInt8
rows = lambda *shape: torch.randn(*shape, generator=torch.Generator().manual_seed(0))
for size in (48, 64, 576, 8960):
    x, matrix = rows(40, size), rows(32, size)
    for made in (SpreadInt8(matrix), Rotation(size).apply):
        whole = made(x)
        for cut in (1, 2, 3, 7, 8, 11, 17, 31):
            assert torch.equal(made(x[:cut]), whole[:cut]), (size, made, cut)
"""


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_a_row_does_not_depend_on_how_many_there_are(instructions: str | None):
    run_with(instructions, ROWS_ALONE)


@pytest.mark.parametrize("kind", [PackedInt8, SpreadInt8])
def test_a_row_of_zeros_gives_the_bias(kind: type[Linear]):
    bias = random(64, seed=2)
    x = torch.cat((torch.zeros(1, 96), random(2, 96)))
    got = kind(random(64, 96, seed=1), bias)(x)
    assert torch.equal(got[0], bias) and got.isfinite().all()
    assert torch.equal(kind(random(64, 96, seed=1), bias)(x[:1], norm=(None, 1e-6))[0], bias)


def worst_sum(levels: torch.Tensor, allowed: Range) -> int:
    """The largest 16-bit sum of two neighbouring products that any activations could cause."""
    top = allowed.zero + allowed.levels
    pairs = levels.to(torch.int64).view(levels.shape[0], -1, 2)
    return int(torch.maximum(pairs.clamp_min(0).sum(-1), -pairs.clamp_max(0).sum(-1)).max()) * top


def test_sums_of_the_saturating_kernel_fit_in_16_bits_whatever_comes():
    outliers = random(64, 256) * torch.where(random(64, 256, seed=5) > 1.5, 20.0, 1.0)
    same = torch.ones(4, 256)  # every weight at its largest, all of one sign: the worst matrix there is
    for weight in (outliers, same, -same, random(64, 256)):
        levels, _ = quantise_rows(weight, SATURATING)
        assert worst_sum(levels, SATURATING) < 2**15
        assert worst_sum(quantise_rows(same, EXACT)[0], EXACT) > 2**15  # without the limit it would not fit


def test_limiting_pairs_touches_only_pairs_beyond_the_limit():
    levels = torch.tensor([[127.0, 127.0, 100.0, -100.0, 50.0, 60.0, -120.0, -90.0]])
    assert limit_pairs(levels, 163).tolist() == [[81.0, 81.0, 100.0, -100.0, 50.0, 60.0, -96.0, -66.0]]


def adversarial() -> list[torch.Tensor]:
    """Rows whose activations all lie at an end of their range."""
    draw = torch.Generator().manual_seed(9)
    return [torch.ones(1, 128), -torch.ones(1, 128), torch.randint(0, 2, (4, 128), generator=draw).float() * 2 - 1]


def integer_product(x: torch.Tensor, weight: torch.Tensor, allowed: Range, vnni: bool) -> torch.Tensor:
    """What the kernel computes, in int64: activations are zero +- levels; without VNNI pairs of products saturate."""
    levels, scales = quantise_rows(weight, allowed)
    unsigned = (x * allowed.levels).round().to(torch.int64) + allowed.zero  # [T, K] 0..255
    pairs = (unsigned[:, None] * levels.to(torch.int64)[None]).unflatten(-1, (-1, 2)).sum(-1)  # [T, N, K / 2]
    sums = (pairs if vnni else pairs.clamp(-(2**15), 2**15 - 1)).sum(-1)
    sums -= allowed.zero * levels.to(torch.int64).sum(-1)
    return sums.double() * scales.double() / allowed.levels


@pytest.mark.parametrize("vnni", VNNI_ANSWERS)
def test_the_kernel_computes_what_integers_say(vnni: bool):
    """The range that such a CPU packs for, through the real kernel, against integer arithmetic."""
    weight, allowed = random(32, 128, seed=1), range_for(vnni)
    for x in adversarial():
        got = module._packed_int8(x, 1.0 / allowed.levels, allowed.zero, pack_int8(quantise_matrix(weight, allowed)))
        assert torch.allclose(got.double(), integer_product(x, weight, allowed, vnni), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("vnni", [False, True])
def test_a_range_is_exact_on_the_cpus_it_is_for(vnni: bool):
    """In plain integers, so that both kinds are computed on any CPU: no sum saturates."""
    weight, allowed = torch.cat((random(32, 128, seed=1), torch.ones(1, 128))), range_for(vnni)
    for x in adversarial():
        levels, scales = quantise_rows(weight, allowed)
        exact = (x * allowed.levels).round().double() @ levels.double().T * scales.double() / allowed.levels
        assert torch.allclose(integer_product(x, weight, allowed, vnni), exact, rtol=1e-12)
    clipped = integer_product(torch.ones(1, 128), weight, EXACT, vnni=False)
    assert not torch.allclose(clipped, integer_product(torch.ones(1, 128), weight, EXACT, vnni=True), rtol=1e-2)


@pytest.mark.parametrize("allowed", [EXACT, SATURATING], ids=["vnni", "16-bit-sums"])
def test_rows_of_one_size_are_not_clipped(allowed: Range):
    """Weights of +-1 times a little noise: the largest level must leave room for two neighbours of one sign."""
    weight = random(64, 256, seed=3).sign() * (1 + random(64, 256, seed=4) / 100)
    levels, scales = quantise_rows(weight, allowed)
    assert float((levels * scales[:, None] - weight).norm() / weight.norm()) < 0.01


@pytest.mark.parametrize("size", [64, 96, 576, 896])
def test_a_rotation_is_orthogonal_and_its_three_forms_agree(size: int):
    rotation, x, w = Rotation(size), random(5, size), random(size, 7, seed=1)
    q = rotation.apply(torch.eye(size))
    assert torch.allclose(q @ q.T, torch.eye(size), atol=1e-5)
    assert torch.allclose(rotation.undo(rotation.apply(x)), x, atol=1e-4)
    assert torch.allclose(rotation.apply_output(w), q.T @ w, atol=1e-4)
    assert float(rotation.apply(torch.eye(size)).abs().max()) < 0.7  # no channel keeps to itself
    assert torch.equal(hadamard(4) * 2, torch.tensor([[1.0, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]))


@pytest.mark.parametrize("vnni", VNNI_ANSWERS)
def test_int8_stays_close_to_float32_on_the_real_model(vnni: bool, smollm2: Path, monkeypatch: pytest.MonkeyPatch):
    """With either kernel's arithmetic: limited weights cannot saturate, so both compute the same thing from them."""
    pretend(monkeypatch, vnni)
    for quality in measure_modes(str(smollm2), ["int8"], tokens=384, device="cpu"):
        assert quality.kl < 0.02 and quality.top1 > 0.88


@pytest.mark.parametrize("kind", [Linear, PackedFloat32])
def test_the_kernel_meets_few_shapes(kind: type[Linear], monkeypatch: pytest.MonkeyPatch):
    """oneDNN keeps a compiled kernel for every number of rows: with every one of them, memory would grow for long."""
    met: set[int] = set()
    original = module.few_shapes

    def note(x: torch.Tensor) -> torch.Tensor:
        rows = original(x)
        met.add(rows.shape[0])
        return rows

    monkeypatch.setattr(module, "few_shapes", note)
    weight, linear = random(24, 32, seed=1), kind(random(24, 32, seed=1))
    for count in range(1, 260):
        x, add = random(count, 32, seed=count), random(count, 24, seed=count + 1)
        assert torch.allclose(linear(x), x @ weight.T, atol=1e-4)
        assert torch.allclose(linear(x, add=add), x @ weight.T + add, atol=1e-4)
    assert met == {*range(1, 17), *range(20, 65, 4), *range(72, 129, 8), *range(144, 273, 16)}
