"""Float matrices as blocks, read back by the `gguf` package, which shares no code with the quantiser."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import quants

from forerun.models.cpu.quantise import format_of, q4_1, q4_k, q5_0, q8_0, quantise


def read_back(format: str, raw: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType[format]).copy())


def relative_error(weight: torch.Tensor, format: str, raw: torch.Tensor) -> float:
    return float((read_back(format, raw) - weight).norm() / weight.norm())


def normal(rows: int = 48, cols: int = 512, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("bits", "cols", "limit"), [(8, 512, 0.006), (5, 96, 0.045), (4, 512, 0.078), (4, 96, 0.076)])
def test_a_matrix_comes_back(bits: int, cols: int, limit: float) -> None:
    weight = normal(cols=cols)
    format, raw = quantise(weight, bits)
    assert format == format_of(cols, bits) and raw.dtype == torch.uint8
    assert relative_error(weight, format, raw) < limit


def test_the_search_is_better_than_the_plain_range() -> None:
    weight = normal()
    plain = torch.from_numpy(quants.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q4_1))
    searched = relative_error(weight, "Q4_1", q4_1(weight))
    assert searched < 0.93 * relative_error(weight, "Q4_1", plain)
    assert relative_error(weight, "Q4_K", q4_k(weight)) < 1.05 * searched  # with a tenth fewer bytes


@pytest.mark.parametrize("make", ["Q4_1", "Q4_K", "Q5_0", "Q8_0"])
def test_odd_blocks_come_back(make: str) -> None:
    """Zeros, one value everywhere, values of one sign, one outlier: no NaN, no more than a step of error."""
    weight = torch.zeros(5, 256)
    weight[1] = 0.25
    weight[2] = 1 + torch.rand(256, generator=torch.Generator().manual_seed(1))
    weight[3] = -weight[2]
    weight[4, 7] = 3.0
    raw = {"Q4_1": q4_1, "Q4_K": q4_k, "Q5_0": q5_0, "Q8_0": q8_0}[make](weight)
    back = read_back(make, raw)
    assert torch.equal(back[0], weight[0])
    assert (back - weight).abs().max() < 2 / 15 / 1.9
    assert (back[1] - 0.25).abs().max() < 0.01


@pytest.mark.parametrize("bits", [4, 5, 8])
def test_the_bytes_do_not_depend_on_the_rows_beside(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = normal()
    whole = quantise(weight, bits)[1]
    monkeypatch.setattr("forerun.models.cpu.quantise.CHUNK_WEIGHTS", 5 * 512)
    assert np.array_equal(quantise(weight, bits)[1].numpy(), whole.numpy())
