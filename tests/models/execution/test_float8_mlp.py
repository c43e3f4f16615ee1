"""Which MLPs and projections run in float8, when, and how far their arithmetic is off, with torch's own float8 on the
CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.models.build import build_decoder
from forerun.models.decoder import MIN_FLOAT8_ROWS, Decoder, Layer
from forerun.models.execution import float8_mlp as module
from forerun.models.execution.float8_mlp import float8_decoder, float8_projection, to_float8
from forerun.models.formats.checkpoint import open_checkpoint
from forerun.models.linear import Linear, gate

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def decoder(tiny_folder: Callable[[str], Path]) -> Decoder:
    return build_decoder(open_checkpoint(tiny_folder("qwen2")), CPU, "bf16", 256, quiet=True)[0]


class Marked:
    """Stands for a layer's MLP; counts its calls."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __call__(self, x: Tensor) -> Tensor:
        self.rows.append(x.shape[0])
        return x + 1


@pytest.fixture
def able(monkeypatch: pytest.MonkeyPatch) -> list[Layer]:
    """A device that can; the layers it was asked for."""
    asked: list[Layer] = []

    def make(_: Decoder, layer: Layer) -> Marked:
        asked.append(layer)
        return Marked()

    monkeypatch.setattr(module, "_device_can", lambda _: True)
    monkeypatch.setattr(module, "_float8_mlp", make)
    return asked


def apart(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


# -- arithmetic --------------------------------------------------------------------------------------------------------


def test_rows_keep_their_scale() -> None:
    rows = torch.randn(6, 64) * torch.tensor([1e-6, 1e-3, 1.0, 1e3, 1e6, 1e9])[:, None]
    values, scales = to_float8(rows)
    assert values.dtype == torch.float8_e4m3fn and scales.shape == (6, 1) and scales.dtype == torch.float32
    assert all(apart(values[i].float() * scales[i], rows[i]) < 0.04 for i in range(6))
    assert (values.float().abs().amax(-1) == 448).all()


def test_rows_without_a_scale() -> None:
    rows = torch.zeros(3, 32)
    rows[1, 3], rows[1, 4], rows[2, 0] = float("inf"), -float("inf"), 1e-40
    values, scales = to_float8(rows)
    assert scales.isfinite().all() and (scales > 0).all() and values.float().isfinite().all()
    assert values[1, 3].item() == 448 and values[1, 4].item() == -448 and (values[0].float() == 0).all()


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_an_mlp_in_float8_is_off_by_a_few_percent(activation: str) -> None:
    """What is added is off by the errors of three roundings; beside the stream that it is added to, by half of that."""
    hidden, inner, draw = 256, 768, torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    def rounded(rows: Tensor) -> Tensor:
        values, scales = to_float8(rows)
        return values.float() * scales

    x, gate_up, down = (
        normal(200, hidden),
        normal(2 * inner, hidden) * hidden**-0.5,
        normal(hidden, inner) * inner**-0.5,
    )
    normed = F.rms_norm(x, (hidden,), None, 1e-6)
    exact = gate(normed @ gate_up.t(), activation) @ down.t()
    inside = (rounded(normed) @ rounded(gate_up).t()).bfloat16().float()
    found = rounded(gate(inside, activation)) @ rounded(down).t()
    assert apart(x + found, x + exact) < 0.05
    assert 0.03 < apart(found, exact) < 0.08


# -- who gets them -----------------------------------------------------------------------------------------------------


def test_a_cpu_does_not(decoder: Decoder) -> None:
    assert float8_decoder(decoder, 2) is decoder


@pytest.mark.parametrize(
    ("capability", "dtype", "known", "can"),
    [
        ((9, 0), torch.bfloat16, True, True),
        ((10, 0), torch.bfloat16, True, True),
        ((8, 9), torch.bfloat16, True, False),
        ((9, 0), torch.float16, True, False),
        ((9, 0), torch.bfloat16, False, False),
    ],
)
def test_which_devices_can(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, capability: Any, dtype: torch.dtype, known: bool, can: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    if not known:
        monkeypatch.delattr(torch, "_scaled_mm")
    assert module._device_can(replace(decoder, device=torch.device("cuda"), dtype=dtype)) is can


def test_copies_of_the_lower_layers_alone(decoder: Decoder, able: list[Layer]) -> None:
    made = float8_decoder(decoder, 3)
    assert made is not decoder and able == decoder.layers[:3]
    assert [layer.float8_mlp is not None for layer in made.layers] == [True, True, True, False]
    assert all(layer.float8_mlp is None for layer in decoder.layers), "others' forwards must not change"
    assert made.attention is decoder.attention and made.layers[0].gate_up is decoder.layers[0].gate_up
    assert float8_decoder(decoder, 0) is decoder


def biased(linear: Linear) -> Linear:
    return Linear(linear.weight, torch.zeros(linear.out_features))


def packed(linear: Linear) -> Linear:
    made = Linear(linear.weight)
    made.packs = True
    return made


@pytest.mark.parametrize(
    "change",
    [
        lambda w: {"post_mlp_norm": w.mlp_norm},
        lambda w: {"mlp_norm": (None, 1e-6)},
        lambda w: {"gate_up": biased(w.gate_up)},
        lambda w: {"down": biased(w.down)},
        lambda w: {"down": packed(w.down)},
        lambda w: {"gate_up": Linear(w.gate_up.weight.float())},
        lambda w: {"gate_up": Linear(w.gate_up.weight[:, :-8])},
        lambda w: {"down": Linear(w.down.weight[:-8])},
    ],
)
def test_layers_that_float8_has_no_pieces_for(
    decoder: Decoder, able: list[Layer], change: Callable[[Layer], dict[str, Any]]
) -> None:
    odd = decoder.layers[1]
    changed = replace(decoder, layers=[decoder.layers[0], replace(odd, **change(odd)), *decoder.layers[2:]])
    assert float8_decoder(changed, 2) is changed and not able
    assert float8_decoder(changed, 1) is not changed  # only layers that get copies count


def test_other_activations(decoder: Decoder, able: list[Layer]) -> None:
    other = replace(decoder, config=replace(decoder.config))
    object.__setattr__(other.config, "activation", "relu")
    assert float8_decoder(other, 2) is other and not able


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_no_memory_and_no_such_product(
    decoder: Decoder, able: list[Layer], monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fail(*_: object) -> None:
        raise error("no")

    monkeypatch.setattr(Marked, "__call__", fail)
    assert float8_decoder(decoder, 2) is decoder and len(able) == 2


def test_few_rows_run_as_ever(decoder: Decoder, able: list[Layer]) -> None:
    made, x = float8_decoder(decoder, 2), torch.randn(MIN_FLOAT8_ROWS, decoder.config.hidden_size).bfloat16()
    marked = made.layers[0].float8_mlp
    assert isinstance(marked, Marked) and marked.rows == [MIN_FLOAT8_ROWS]  # compiled before a request waits
    assert torch.equal(made._mlp(x[1:], 0), decoder._mlp(x[1:], 0)) and marked.rows == [MIN_FLOAT8_ROWS]
    assert torch.equal(made._mlp(x, 0), x + 1) and torch.equal(made._mlp(x, 2), decoder._mlp(x, 2))


# -- projections -------------------------------------------------------------------------------------------------------


class Projection:
    """Stands for a product in float8; `fail`: what its first use raises."""

    def __init__(self, takes: bool = True, fail: type[Exception] | None = None) -> None:
        self._takes, self._fail = takes, fail
        self.shapes: list[list[tuple[int, ...]]] = []

    def takes(self, _: list[Tensor]) -> bool:
        return self._takes

    def __call__(self, parts: list[Tensor]) -> None:
        self.shapes.append([tuple(x.shape) for x in parts])
        if self._fail is not None:
            raise self._fail("no")


def projection(monkeypatch: pytest.MonkeyPatch, made: Projection, linear: Linear) -> object:
    monkeypatch.setattr(module, "_device_can", lambda _: True)
    kernels = SimpleNamespace(Float8Projection=lambda *_: made)
    monkeypatch.setitem(sys.modules, "forerun.models.cuda.float8", kernels)
    return float8_projection(linear, [32, 64], 1e-6)


def matrix(rows: int = 48, columns: int = 96, dtype: torch.dtype = torch.bfloat16) -> Linear:
    return Linear(torch.zeros(rows, columns, dtype=dtype), torch.zeros(rows, dtype=dtype))


def test_a_projection_is_tried_before_a_request_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Projection()
    assert projection(monkeypatch, made, matrix()) is made
    assert made.shapes == [[(MIN_FLOAT8_ROWS, 32), (MIN_FLOAT8_ROWS, 64)]]


def test_a_cpu_has_no_projection() -> None:
    assert float8_projection(matrix(), [32, 64], 1e-6) is None


@pytest.mark.parametrize(
    "linear", [matrix(rows=40), matrix(columns=88), matrix(dtype=torch.float32), packed(matrix())], ids=lambda _: ""
)
def test_matrices_that_float8_does_not_take(monkeypatch: pytest.MonkeyPatch, linear: Linear) -> None:
    made = Projection()
    assert projection(monkeypatch, made, linear) is None and not made.shapes


def test_no_projection_of_such_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Projection(takes=False)
    assert projection(monkeypatch, made, matrix()) is None and not made.shapes


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_no_memory_for_a_projection(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    made = Projection(fail=error)
    assert projection(monkeypatch, made, matrix()) is None and made.shapes


def test_units_need_no_scale() -> None:
    """Fifteen taps and an embedding, with a few loud channels: unit rows as they are, a weight with scales."""
    draw = torch.Generator().manual_seed(5)
    parts = [torch.randn(64, width, generator=draw) for width in [96] * 15 + [160]]
    for x in parts:
        x[:, [5, 50]] *= 30.0
    features = torch.cat([F.rms_norm(x, (x.shape[1],), None, 1e-6) for x in parts], 1)
    weight, bias = torch.randn(128, 1600, generator=draw) * 0.025, torch.randn(128, generator=draw) * 0.3
    values, scales = to_float8(weight)
    z = features.to(module.FLOAT8).float() @ (values.float() * scales).t() + bias
    assert 0.01 < apart(z, features @ weight.t() + bias) < 0.05
