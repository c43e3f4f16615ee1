"""On a GPU the kernels leave float8. Triton's interpreter rounds to it wrongly (it loses a carry out of the mantissa):
there they leave as float32 what is to be rounded, and torch rounds it."""

import pytest
import torch
import torch.nn.functional as F

from forerun.models.cuda import float8
from forerun.models.cuda.float8 import Float8Mlp, act_mul_to_float8, norm_to_float8
from forerun.models.execution.float8_mlp import FLOAT8, to_float8

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEP = 2**-4  # between two neighbours of float8, as a share of them, there is at most twice this


@pytest.fixture(autouse=True)
def rounding(monkeypatch):
    if DEVICE == "cpu":
        product = float8._product
        monkeypatch.setattr(float8, "FLOAT8", torch.float32)
        monkeypatch.setattr(float8, "_product", lambda rows, *rest: product(rows.to(FLOAT8), *rest))


def draw(*shape):
    return torch.randn(*shape, device=DEVICE)


def apart(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm())


def check(found, want):
    """Float8 and scales that stand for these rows, as near as float8 can be; the largest of a row hits its top."""
    values, scales = found[0].to(FLOAT8), found[1]
    assert found[0].dtype == float8.FLOAT8 and values.shape == want.shape
    assert scales.dtype == torch.float32 and scales.shape == (len(want), 1)
    most = want.abs().amax(-1, keepdim=True)
    assert apart(scales, most / 448) < 1e-5
    smallest = most / 448 * 2**-9  # from there down the distance of neighbours is the same
    assert ((values.double() * scales - want).abs() <= want.abs() * STEP * 1.001 + smallest).all()
    assert (values.double().abs().amax(-1) == 448).all()


def norm(x, weight, eps):
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()


def gated(pair, activation):
    gate, up = pair.double().chunk(2, dim=-1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


@pytest.mark.parametrize("n", [64, 100, 896])
def test_norm(n):
    x, weight = draw(5, n).bfloat16() * 3, draw(n).bfloat16()
    check(norm_to_float8(x, weight, 1e-2), norm(x, weight, 1e-2))
    assert norm_to_float8(x[:0], weight, 1e-2)[0].shape == (0, n)


def test_norm_of_rows_apart():
    x, weight = draw(3, 96), draw(64)
    check(norm_to_float8(x[:, :64], weight, 1e-6), norm(x[:, :64], weight, 1e-6))
    with pytest.raises(ValueError, match="contiguous"):
        norm_to_float8(x.t(), draw(3), 1e-6)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("n", [48, 1500, 4864])
def test_act_mul(n, activation):
    pair = draw(3, 2 * n).bfloat16() * 3
    check(act_mul_to_float8(pair, activation), gated(pair, activation))
    assert act_mul_to_float8(pair[:0], activation)[0].shape == (0, n)


@pytest.mark.parametrize("n", [17920, 16400])
def test_act_mul_of_rows_that_no_program_holds(n):
    pair = draw(2, 2 * n).bfloat16()
    pair[:, n - 1], pair[:, 2 * n - 1] = 20.0, 20.0  # the largest lies in the last piece
    check(act_mul_to_float8(pair, "silu"), gated(pair, "silu"))


def test_two_passes_give_the_bits_of_one(monkeypatch):
    pair = draw(3, 2 * 3000).bfloat16()
    values, scales = act_mul_to_float8(pair, "silu")
    monkeypatch.setattr(float8, "MAX_ROW_VALUES", 1024)
    again, scales_again = act_mul_to_float8(pair, "silu")
    assert torch.equal(values.float(), again.float()) and torch.equal(scales, scales_again)


def test_act_mul_of_rows_apart():
    pair = draw(3, 200)
    check(act_mul_to_float8(pair[:, :128], "silu"), gated(pair[:, :128], "silu"))
    with pytest.raises(ValueError, match="contiguous"):
        act_mul_to_float8(pair.t(), "silu")
    with pytest.raises(ValueError, match="relu"):
        act_mul_to_float8(pair, "relu")


def test_rows_of_zeros_stay_zeros():
    for values, scales in (
        norm_to_float8(torch.zeros(2, 64, device=DEVICE), draw(64), 1e-6),
        act_mul_to_float8(torch.zeros(2, 64, device=DEVICE), "silu"),
    ):
        assert (values.float() == 0).all() and (scales > 0).all() and scales.isfinite().all()


def test_infinities_and_tiny_values():
    pair = draw(3, 128)
    pair[0, 0], pair[0, 64], pair[0, 65] = 1.0, float("inf"), -float("inf")
    pair[1] *= 1e-25
    values, scales = act_mul_to_float8(pair, "silu")
    assert values.float().isfinite().all() and scales.isfinite().all()
    assert values[0, 0].item() == 448 and (values[0, 2:].to(FLOAT8).float() == 0).all()
    assert (values[1].float() * scales[1]).abs().max() < 1e-30
    check((values[2:], scales[2:]), gated(pair[2:], "silu"))


def test_the_kernels_round_as_weights_are_rounded():
    pair = draw(4, 640)
    values, scales = act_mul_to_float8(pair, "silu")
    want, want_scales = to_float8(gated(pair, "silu"))
    assert torch.allclose(scales, want_scales, rtol=1e-5)
    assert (values.to(FLOAT8).float() == want.float()).float().mean() > 0.99  # others lie halfway, but for the last bit


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_mlp(activation):
    hidden, inner = 128, 320
    x, weight = draw(40, hidden).bfloat16(), 1 + draw(hidden).bfloat16() / 8
    gate_up, down = (draw(2 * inner, hidden) * hidden**-0.5).bfloat16(), (draw(hidden, inner) * inner**-0.5).bfloat16()
    before = x.clone()
    got = Float8Mlp(weight, 1e-6, to_float8(gate_up), to_float8(down), activation)(x)
    added = gated(norm(x, weight, 1e-6) @ gate_up.double().t(), activation) @ down.double().t()
    assert got.dtype == torch.bfloat16 and torch.equal(x, before)
    assert apart(got, x + added) < 0.05
    assert 0.01 < apart(got.double() - x, added) < 0.09  # what it adds; bf16 would be below
