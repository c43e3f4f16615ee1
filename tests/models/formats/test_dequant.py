"""Every block format against the `gguf` package's own (slow) dequantisation, bit for bit."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize

from forerun.models.formats.dequant import CHUNK_WEIGHTS, FORMATS, MIN_THREADED_WEIGHTS, SPAN_CHUNKS, dequantise

QUANTISED = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
# Where the float16 scales of a block lie: random bytes there would be infinities, so they get real numbers
SCALES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0],
    "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
}  # fmt: skip


def random_rows(kind: str, rows: int, blocks: int) -> np.ndarray:
    """Blocks with every bit pattern possible in the integers and moderate scales."""
    size = gguf.GGML_QUANT_SIZES[Kind[kind]][1]
    rng = np.random.default_rng(7)
    raw = rng.integers(0, 256, (rows * blocks, size), dtype=np.uint8)
    for at in SCALES[kind]:
        scales = rng.normal(size=rows * blocks).astype(np.float16)
        raw[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return raw.reshape(rows, blocks * size)


@pytest.mark.parametrize("kind", QUANTISED)
def test_equals_reference(kind: str) -> None:
    raw = random_rows(kind, rows=6, blocks=5)
    want = dequantize(raw, Kind[kind])
    got = dequantise(torch.from_numpy(raw), kind)
    assert got.dtype == torch.float32 and got.shape == want.shape
    np.testing.assert_array_equal(got.numpy(), want)


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_1", "Q6_K"])
def test_chunks_spans_and_threads(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a span of chunks, with a rest, on three threads: the same numbers."""
    weights = gguf.GGML_QUANT_SIZES[Kind[kind]][0]
    raw = random_rows(kind, rows=5, blocks=max(SPAN_CHUNKS * CHUNK_WEIGHTS, MIN_THREADED_WEIGHTS) // weights // 4 + 3)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    np.testing.assert_array_equal(dequantise(torch.from_numpy(raw), kind).numpy(), dequantize(raw, Kind[kind]))


@pytest.mark.parametrize(("kind", "dtype"), [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)])
def test_floats(kind: str, dtype: torch.dtype) -> None:
    values = torch.randn(3, 8).to(dtype)
    got = dequantise(values.view(torch.uint8), kind)
    assert torch.equal(got, values.float())
    values.zero_()
    assert got.abs().sum() > 0  # a copy, not a view of the file


def test_rows_of_a_view() -> None:
    """Rows picked from a mapped file are not contiguous blocks of it."""
    raw = torch.from_numpy(random_rows("Q5_K", rows=8, blocks=2))
    assert torch.equal(dequantise(raw[::3], "Q5_K"), dequantise(raw, "Q5_K")[::3])


def test_many_rows_in_inference_mode() -> None:
    """Large tables are filled by threads, which must be able to write what inference mode made."""
    rows = -(-MIN_THREADED_WEIGHTS // 256) + 1
    raw = torch.zeros(rows, FORMATS["Q8_0"].size * 8, dtype=torch.uint8)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with torch.inference_mode():
            found = dequantise(raw, "Q8_0")
    finally:
        torch.set_num_threads(threads)
    assert found.shape == (rows, 256) and not found.any()
