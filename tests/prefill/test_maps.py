"""Maps: what they compute, and that those made to run compute the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.models.build import choose_precision
from forerun.models.linear import Linear, Precision
from forerun.models.rotation import Rotation
from forerun.prefill.maps import FastMaps, Maps, unit

HIDDEN, KV, LAYERS, RANK = 96, 32, 3, 24
CPU = torch.device("cpu")


def made(taps: tuple[int, ...] = (0, 2, 4), inner: int = 40) -> Maps:
    draw = torch.Generator().manual_seed(3)

    def some(*shape: int, scale: float) -> Tensor:
        return torch.randn(shape, generator=draw) * scale

    inputs, outputs = len(taps) * HIDDEN, LAYERS * 2 * KV
    return Maps(
        taps,
        1,
        down=some(RANK, inputs, scale=inputs**-0.5),
        down_bias=some(RANK, scale=0.3),
        mix_in=some(inner, RANK, scale=RANK**-0.5),
        mix_out=some(RANK, inner, scale=inner**-0.5),
        up=some(outputs, RANK, scale=RANK**-0.5),
        up_bias=some(outputs, scale=1.0),
    )


def streams(rows: int = 37, taps: int = 3) -> list[Tensor]:
    """Hidden states with a few loud channels, as models have them."""
    draw = torch.Generator().manual_seed(4)
    loud = torch.ones(HIDDEN)
    loud[[5, 50]] = 30.0
    return [torch.randn(rows, HIDDEN, generator=draw) * loud * (i + 1) for i in range(taps)]


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


def test_units_ignore_scale_and_rotation() -> None:
    x = streams(rows=5)[0]
    torch.testing.assert_close(unit(1000 * x), unit(x), atol=1e-4, rtol=1e-4)
    basis = Rotation(HIDDEN)
    torch.testing.assert_close(unit(basis.apply(x)), basis.apply(unit(x)), atol=1e-4, rtol=1e-4)
    assert unit(torch.zeros(1, HIDDEN)).isfinite().all()


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("weights", ["plain", "float32", "fp16", "int8"])
def test_fast_maps_say_the_same(weights: str, rotated: bool) -> None:
    maps, hidden = made(), streams()
    wanted = maps(torch.cat([unit(x) for x in hidden], 1))
    plain = Precision("plain", Linear, torch.float32)
    precision = plain if weights == "plain" else choose_precision(weights, CPU, quantised=True)
    basis = Rotation(HIDDEN) if rotated else None
    fast = FastMaps(maps, precision, basis, CPU)
    given = fast([basis.apply(x) for x in hidden] if basis is not None else hidden).float()
    assert given.shape == wanted.shape
    # Loud channels cost int8 some of its precision, unless they are spread over all channels
    tolerance = {"plain": 1e-5, "float32": 1e-5, "fp16": 3e-3, "int8": 0.015 if rotated else 0.05}[weights]
    assert float((given - wanted).norm() / wanted.norm()) < tolerance


def test_a_forgotten_rotation_is_seen() -> None:
    maps, hidden = made(), streams()
    basis = Rotation(HIDDEN)
    wrong = FastMaps(maps, Precision("plain", Linear, torch.float32), None, CPU)([basis.apply(x) for x in hidden])
    wanted = maps(torch.cat([unit(x) for x in hidden], 1))
    assert float((wrong - wanted).norm() / wanted.norm()) > 0.1


def test_maps_move_between_dtypes() -> None:
    half = made().to(CPU, torch.float16)
    assert all(t.dtype == torch.float16 for t in half.tensors().values())
    assert (half.taps, half.base) == (made().taps, made().base)
    x = F.normalize(streams()[0].repeat(1, 3))
    torch.testing.assert_close(half.to(CPU, torch.float32)(x), made()(x), atol=1e-2, rtol=1e-2)
