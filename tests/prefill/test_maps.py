"""Maps: what they compute, and that those made to run compute the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.models.build import choose_precision
from forerun.models.linear import Linear, Precision, Rotation
from forerun.prefill import maps as maps_module
from forerun.prefill.maps import FastMaps, Maps, unit

HIDDEN, OWN, KV, LAYERS, RANK = 96, 160, 32, 3, 24
CPU = torch.device("cpu")


def made(taps: tuple[int, ...] = (0, 2, 4), inner: int = 40, target_embedding: bool = False) -> Maps:
    draw = torch.Generator().manual_seed(3)

    def some(*shape: int, scale: float) -> Tensor:
        return torch.randn(shape, generator=draw) * scale

    inputs, outputs = len(taps) * HIDDEN + target_embedding * OWN, LAYERS * 2 * KV
    return Maps(
        taps,
        1,
        down=some(RANK, inputs, scale=inputs**-0.5),
        down_bias=some(RANK, scale=0.3),
        mix_in=some(inner, RANK, scale=RANK**-0.5),
        mix_out=some(RANK, inner, scale=inner**-0.5),
        up=some(outputs, RANK, scale=RANK**-0.5),
        up_bias=some(outputs, scale=1.0),
        target_embedding=target_embedding,
    )


def streams(rows: int = 37, taps: int = 3, target_embedding: bool = False) -> list[Tensor]:
    """Hidden states with a few loud channels, as models have them; `own`: another model's, of another width, too."""
    draw = torch.Generator().manual_seed(4)
    found = [torch.randn(rows, HIDDEN, generator=draw) * (i + 1) for i in range(taps)]
    found += [torch.randn(rows, OWN, generator=draw)] * target_embedding
    for x in found:
        x[:, [5, 50]] *= 30.0
    return found


def bases(hidden: list[Tensor], rotated: bool) -> list[tuple[int, Rotation | None]]:
    """What each part comes in; two models of different widths are rotated differently."""
    return [(x.shape[1], Rotation(x.shape[1]) if rotated else None) for x in hidden]


def turned(hidden: list[Tensor], parts: list[tuple[int, Rotation | None]]) -> list[Tensor]:
    return [x if basis is None else basis.apply(x) for x, (_, basis) in zip(hidden, parts, strict=True)]


def test_maps_by_hand() -> None:
    maps, hidden = made(), streams(rows=2)
    features = torch.cat([x / x.square().mean(1, keepdim=True).sqrt() for x in hidden], 1)
    z = features @ maps.down.T + maps.down_bias
    h = z @ maps.mix_in.T
    z = z + (h / (1 + torch.exp(-h))) @ maps.mix_out.T
    wanted = z @ maps.up.T + maps.up_bias
    given = maps(torch.cat([unit(x) for x in hidden], 1))
    torch.testing.assert_close(given, wanted, atol=1e-5, rtol=1e-5)


def test_work_is_counted() -> None:
    assert made(inner=40).macs == 3 * HIDDEN * RANK + 2 * 40 * RANK + RANK * LAYERS * 2 * KV
    assert made().rank == RANK
    assert made(target_embedding=True).macs == made().macs + OWN * RANK


def test_units_ignore_scale_and_rotation() -> None:
    x = streams(rows=5)[0]
    torch.testing.assert_close(unit(1000 * x), unit(x), atol=1e-4, rtol=1e-4)
    basis = Rotation(HIDDEN)
    torch.testing.assert_close(unit(basis.apply(x)), basis.apply(unit(x)), atol=1e-4, rtol=1e-4)
    assert unit(torch.zeros(1, HIDDEN)).isfinite().all()


@pytest.mark.parametrize("target_embedding", [False, True])
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("weights", ["plain", "float32", "fp16", "int8"])
def test_fast_maps_say_the_same(weights: str, rotated: bool, target_embedding: bool) -> None:
    maps, hidden = made(target_embedding=target_embedding), streams(target_embedding=target_embedding)
    wanted = maps(torch.cat([unit(x) for x in hidden], 1))
    plain = Precision("plain", Linear, torch.float32)
    precision = plain if weights == "plain" else choose_precision(weights, CPU, quantised=True)
    parts = bases(hidden, rotated)
    given = FastMaps(maps, precision, parts, CPU)(turned(hidden, parts)).float()
    assert given.shape == wanted.shape
    # Loud channels cost int8 some of its precision, unless they are spread over all channels
    tolerance = {"plain": 1e-5, "float32": 1e-5, "fp16": 3e-3, "int8": 0.015 if rotated else 0.05}[weights]
    assert float((given - wanted).norm() / wanted.norm()) < tolerance


@pytest.mark.parametrize("forgotten", [[0, 1, 2], [1], [3]])
def test_a_forgotten_rotation_is_seen(forgotten: list[int]) -> None:
    """Of the source's hidden states, or of the target's embedding."""
    maps, hidden = made(target_embedding=True), streams(target_embedding=True)
    parts = bases(hidden, rotated=True)
    told = [(width, None if i in forgotten else basis) for i, (width, basis) in enumerate(parts)]
    wrong = FastMaps(maps, Precision("plain", Linear, torch.float32), told, CPU)(turned(hidden, parts))
    wanted = maps(torch.cat([unit(x) for x in hidden], 1))
    assert float((wrong - wanted).norm() / wanted.norm()) > 0.1


def test_one_model_may_be_rotated_and_the_other_not() -> None:
    maps, hidden = made(target_embedding=True), streams(target_embedding=True)
    wanted = maps(torch.cat([unit(x) for x in hidden], 1))
    for plain in ([3], [0, 1, 2]):
        parts = [(w, None if i in plain else basis) for i, (w, basis) in enumerate(bases(hidden, rotated=True))]
        given = FastMaps(maps, Precision("plain", Linear, torch.float32), parts, CPU)(turned(hidden, parts))
        torch.testing.assert_close(given, wanted, atol=1e-4, rtol=1e-4)


def test_maps_of_other_numbers_are_of_the_same_kind() -> None:
    maps = made(target_embedding=True)
    before = maps.up.clone()
    other = maps.with_tensors({"up": maps.up + 1.0})
    assert (other.taps, other.base, other.target_embedding) == (maps.taps, maps.base, True)
    assert set(maps.tensors()) == {"down", "down_bias", "mix_in", "mix_out", "up", "up_bias"}
    assert torch.equal(other.up, before + 1.0) and torch.equal(maps.up, before) and other.down is maps.down


def test_maps_move_between_dtypes() -> None:
    half = made().to(CPU, torch.float16)
    assert made(target_embedding=True).to(CPU, torch.float16).target_embedding and not half.target_embedding
    assert all(t.dtype == torch.float16 for t in half.tensors().values())
    assert (half.taps, half.base) == (made().taps, made().base)
    x = F.normalize(streams()[0].repeat(1, 3))
    torch.testing.assert_close(half.to(CPU, torch.float32)(x), made()(x), atol=1e-2, rtol=1e-2)


# -- in float8 ---------------------------------------------------------------------------------------------------------


class Float8Fake:
    """Stands for a projection in float8: takes `LEAST` rows and more, gives zeros."""

    LEAST, nbytes = 20, 5

    def __init__(self, linear: Linear, widths: list[int], eps: float) -> None:
        self.linear, self.widths, self.eps = linear, widths, eps

    def takes(self, parts: list[Tensor]) -> bool:
        return len(parts[0]) >= self.LEAST

    def __call__(self, parts: list[Tensor]) -> Tensor:
        return torch.zeros(len(parts[0]), self.linear.out_features)


@pytest.mark.parametrize("weights", ["plain", "bf16", "int8"])
def test_float8_maps_are_as_ever_where_the_device_cannot(weights: str) -> None:
    maps, hidden = made(target_embedding=True), streams(target_embedding=True)
    kinds = {"plain": torch.float32, "bf16": torch.bfloat16}
    precision = Precision(weights, Linear, kinds[weights]) if weights in kinds else choose_precision(weights, CPU, True)
    hidden = [x.to(precision.dtype) for x in hidden]
    parts = bases(hidden, rotated=False)
    fine, float8 = (FastMaps(maps, precision, parts, CPU, float8=float8) for float8 in (False, True))
    assert float8.nbytes == fine.nbytes and torch.equal(float8(hidden), fine(hidden))


def test_bf16_maps_have_the_bits_of_the_parts_one_by_one() -> None:
    maps, hidden = made(target_embedding=True), [x.bfloat16() for x in streams(target_embedding=True)]
    held = maps.to(CPU, torch.bfloat16)
    given = FastMaps(maps, Precision("bf16", Linear, torch.bfloat16), bases(hidden, rotated=False), CPU)(hidden)
    features = torch.cat([F.rms_norm(x, (x.shape[1],), None, 1e-6) for x in hidden], 1)
    z = F.linear(F.pad(features, (0, 0, 0, 3)), held.down, held.down_bias)  # as many rows as `few_shapes` makes of 37
    z = F.linear(F.silu(F.linear(z, held.mix_in)), held.mix_out) + z
    assert torch.equal(given, F.linear(z, held.up, held.up_bias)[:37])


def test_only_many_rows_are_projected_in_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    made_of: list[Float8Fake] = []

    def make(*args: object) -> Float8Fake:
        made_of.append(Float8Fake(*args))  # type: ignore[arg-type]
        return made_of[-1]

    monkeypatch.setattr(maps_module, "float8_projection", make)
    maps, hidden = made(target_embedding=True), streams(target_embedding=True)
    plain, parts = Precision("plain", Linear, torch.float32), bases(hidden, rotated=True)
    fine = FastMaps(maps, plain, parts, CPU)
    assert not made_of
    float8 = FastMaps(maps, plain, parts, CPU, float8=True)
    assert made_of[0].widths == [HIDDEN] * 3 + [OWN] and made_of[0].eps == maps_module.EPS
    assert torch.equal(made_of[0].linear.weight, fine._down.weight) and float8.nbytes == fine.nbytes + 5
    few = [x[: Float8Fake.LEAST - 1] for x in turned(hidden, parts)]
    assert torch.equal(float8(few), fine(few))
    given = float8(turned(hidden, parts))
    torch.testing.assert_close(given, maps.up_bias.expand_as(given))  # which is what comes of zeros
