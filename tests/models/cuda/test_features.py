"""Against torch, part by part. Triton's interpreter rounds to float8 wrongly (see test_float8): there the kernel leaves
as float32 what is to be rounded, and torch rounds it."""

import pytest
import torch
import torch.nn.functional as F

from forerun.models.cuda import float8 as features
from forerun.models.cuda.float8 import Float8Projection, fits, unit_features
from forerun.models.decoder import MIN_FLOAT8_ROWS
from forerun.models.execution.float8_mlp import FLOAT8, to_float8
from forerun.prefill import maps

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-6
NEAR = {torch.float32: 1e-5, torch.bfloat16: 2**-7}  # the interpreter cuts off what bfloat16 cannot hold


def draw(rows, *widths, dtype=torch.bfloat16):
    """Rows of every loudness."""
    loud = torch.logspace(-2, 3, rows, device=DEVICE)[:, None]
    return [(torch.randn(rows, width, device=DEVICE) * loud).to(dtype) for width in widths]


def plain(parts, eps=EPS):
    return torch.cat([F.rms_norm(x.float(), (x.shape[1],), None, eps) for x in parts], 1)


def check(parts, dtype, eps=EPS):
    got, want = unit_features(parts, eps, dtype), plain(parts, eps)
    assert got.dtype == dtype and got.shape == want.shape and got.is_contiguous()
    assert torch.allclose(got.float(), want, rtol=NEAR[dtype], atol=1e-5)


def apart(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize(
    "widths", [(16,), (896,), (1536,), (896, 896, 1536), (16, 1536), (1536, 16, 896), (1024, 512, 2048), (48, 32, 64)]
)
@pytest.mark.parametrize("rows", [1, 7])
def test_as_torch_does(rows, widths, dtype):
    check(draw(rows, *widths), dtype)


@pytest.mark.parametrize("values", [16, 256, 8192])
def test_any_number_of_rows_at_once(monkeypatch, values):
    monkeypatch.setattr(features, "VALUES_AT_ONCE", values)
    check(draw(37, 48, 16, 64), torch.float32)


def test_more_parts_than_two_models_have():
    check(draw(3, *[32] * 40, 80), torch.bfloat16)


def test_slices_of_rows():
    whole = draw(20, 16, 896, 1536)
    assert all(not torch.equal(x[3], x[4]) for x in whole)
    check([x[4:13] for x in whole], torch.bfloat16)
    check([whole[0][19:], whole[1][:1], whole[2][7:8]], torch.bfloat16)


def test_parts_of_float32():
    check(draw(5, 48, 96, dtype=torch.float32), torch.float32)


def test_the_epsilon_counts_and_zeros_stay():
    check(draw(9, 64, 32), torch.float32, eps=0.5)
    parts = draw(2, 64, 32)
    parts[0][1] = 0
    got = unit_features(parts, EPS, torch.float32)
    assert (got[1, :64] == 0).all() and torch.allclose(got, plain(parts), rtol=1e-5, atol=1e-6)


def test_no_rows():
    assert unit_features(draw(0, 16, 32), EPS, torch.bfloat16).shape == (0, 48)


def test_widths_are_not_confused():
    """Tables are kept: by all widths in their order."""
    for widths in ((16, 64), (64, 16), (64, 16, 16), (16, 64)):
        check(draw(4, *widths), torch.float32)


def test_what_fits():
    good = draw(4, 16, 896)
    assert fits(good) and fits([x[1:3] for x in good])
    assert not fits([*good, draw(4, 24)[0]])
    assert not fits([*good, draw(4, 16, dtype=torch.float32)[0]])
    assert not fits([*good, draw(4, 32)[0][:, :16]])
    assert not fits([*good, draw(5, 16)[0].flatten()[1:65].view(4, 16)])
    assert not fits([*good, torch.empty(0, 32768, dtype=torch.bfloat16, device=DEVICE)])


def test_refusals():
    with pytest.raises(ValueError, match=r"16, 32, \.\.\. 16384 wide, not \[16, 24\]"):
        unit_features(draw(4, 16, 24), EPS, torch.bfloat16)
    with pytest.raises(ValueError, match="as many rows"):
        unit_features(draw(4, 16) + draw(5, 16), EPS, torch.bfloat16)
    with pytest.raises(ValueError, match="one dtype"):
        unit_features(draw(4, 16) + draw(4, 16, dtype=torch.float32), EPS, torch.bfloat16)
    with pytest.raises(ValueError, match="contiguous"):
        unit_features([draw(4, 32)[0][:, :16]], EPS, torch.bfloat16)


def test_maps_choose_by_what_they_are_given(monkeypatch):
    made = maps._fused_features(torch.bfloat16, [16, 48], torch.device(DEVICE))
    good, apart_in_memory = draw(5, 16, 48), [draw(5, 64)[0][:, :16], draw(5, 64)[0][:, :48]]
    assert torch.allclose(made(good).float(), plain(good), rtol=NEAR[torch.bfloat16], atol=1e-5)
    monkeypatch.setattr(maps, "features_of", len)
    assert made(apart_in_memory) == 2 and made([x.float() for x in good]) == 2 and made(good).shape == (5, 64)
    assert maps._fused_features(torch.bfloat16, [16, 40], torch.device(DEVICE)) is len


# -- products in float8 ------------------------------------------------------------------------------------------------


@pytest.fixture
def rounding(monkeypatch):
    if DEVICE == "cpu":
        product = features._product
        monkeypatch.setattr(features, "FLOAT8", torch.float32)
        monkeypatch.setattr(features, "_product", lambda rows, *rest: product(rows.to(FLOAT8), *rest))


@pytest.mark.parametrize("biased", [True, False])
def test_projection(rounding, biased):
    torch.manual_seed(3)
    weight = torch.randn(48, 896 + 16 + 64, device=DEVICE) * 0.03
    values, scales = to_float8(weight)
    bias = torch.randn(48, device=DEVICE).bfloat16() if biased else None
    added = None if bias is None else bias.float()
    made = Float8Projection((values, scales), bias, EPS)
    for rows in (16, 4, 40, 33):  # scales are kept from more rows to fewer, and grown
        parts = draw(rows, 896, 16, 64)
        got, want = made(parts), F.linear(plain(parts), weight, added)
        assert got.dtype == torch.bfloat16 and got.shape == want.shape
        assert 0.005 < apart(got, want) < 0.05
        same = F.linear(plain(parts).to(FLOAT8).float(), values.float() * scales, added)
        assert apart(got, same) < 0.01
    assert made.nbytes == weight.numel() + 4 * 48


def test_projections_take_many_rows_that_fit():
    made = Float8Projection(to_float8(torch.randn(16, 48, device=DEVICE)), None, EPS)
    many = draw(MIN_FLOAT8_ROWS, 16, 32)
    assert made.takes(many) and not made.takes([x[1:] for x in many])
    assert not made.takes([x.float() for x in many])
