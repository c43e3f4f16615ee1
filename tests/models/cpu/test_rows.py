"""Single rows by the C kernels: embeddings equal in every bit, tokens drawn where the sums of the operators pass."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from forerun.core import SamplingParams
from forerun.decode.sampling import choose_by_number, distribution
from forerun.models.cpu.block_linear import FORMATS, ROW_BYTES
from forerun.models.cpu.library import library
from forerun.models.cpu.rows import MAX_ROWS, BlockEmbeddings, draw
from forerun.models.decoder import likeliest
from forerun.models.formats.dequant import EmbeddingRows

pytestmark = pytest.mark.skipif(library() is None, reason="there are no C kernels here")

HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # where blocks keep scales


def table(kind: str, rows: int, cols: int) -> torch.Tensor:
    draws, per, size = np.random.default_rng(3), FORMATS[kind][1], ROW_BYTES[kind]
    blocks = draws.integers(0, 256, (rows, cols // per, size), dtype=np.uint8)
    for at in HALVES.get(kind, (0,)):
        scales = draws.normal(0, 0.02, blocks.shape[:2]).astype(np.float16)
        scales[0, 0], scales[1, 0] = 6e-8, 0.0  # subnormal, zero
        blocks[:, :, at : at + 2] = scales[:, :, None].view(np.uint8)
    return torch.from_numpy(blocks.reshape(rows, -1))


@pytest.mark.parametrize("kind", FORMATS)
def test_embeddings_are_those_of_the_operators_in_every_bit(kind: str, kernels: None):
    raw = table(kind, 70, 512)
    ours, theirs = BlockEmbeddings(kind, raw), EmbeddingRows(kind, raw)
    for ids in ([0], [69, 1, 1, 5], list(range(MAX_ROWS)), list(range(70))):
        found, wanted = (rows(torch.tensor(ids, dtype=torch.int64)) for rows in (ours, theirs))
        assert found.shape == wanted.shape == (len(ids), 512)
        assert np.array_equal(found.numpy().view(np.int32), wanted.numpy().view(np.int32))


def test_an_embedding_that_there_is_not_is_refused_as_before():
    rows = BlockEmbeddings("Q8_0", table("Q8_0", 5, 64))
    with pytest.raises(IndexError):
        rows(torch.tensor([5]))
    assert torch.equal(rows(torch.tensor([-1])), rows(torch.tensor([4])))


@pytest.mark.parametrize("vocab", [1, 7, 16, 255, 256, 257, 5000])
@pytest.mark.parametrize("temperature", [1e-6, 0.3, 1.0, 5.0])
def test_drawn_tokens_are_where_the_sum_of_probabilities_passes_the_number(
    vocab: int, temperature: float, kernels: None
):
    draws = torch.Generator().manual_seed(vocab)
    logits = 4.0 * torch.randn(6, vocab + 3, generator=draws)[:, :vocab]  # rows with something between them
    logits[1, 1:], logits[2, : vocab // 2] = float("-inf"), float("-inf")
    logits[3] = -50_000.0
    weights = ((logits - logits.amax(1, keepdim=True)).double() / temperature).exp()
    sums = weights.cumsum(1) / weights.sum(1, keepdim=True)
    for number in (0.0, 0.1, 0.5, 0.999, 1 - 2**-53, *torch.rand(20, generator=draws).tolist()):
        found = draw(logits, [temperature] * 6, [number] * 6)
        assert found is not None and found.dtype == torch.int64
        for row, token in enumerate(found.tolist()):
            assert weights[row, token] > 0
            before = float(sums[row, token - 1]) if token else 0.0
            assert before - 1e-6 <= number <= float(sums[row, token]) + 1e-6


def test_rows_are_drawn_and_chosen_as_by_the_operators(monkeypatch: pytest.MonkeyPatch):
    draws = torch.Generator().manual_seed(5)
    logits = 3.0 * torch.randn(40, 900, generator=draws)
    params = [SamplingParams(temperature=(0.0, 0.7, 1.3)[i % 3]) for i in range(40)]
    numbers = torch.rand(40, generator=draws, dtype=torch.float64).tolist()
    found = choose_by_number(logits, params, numbers)
    monkeypatch.setattr("forerun.decode.sampling.draw_at_once", lambda *args: None)
    assert torch.equal(found, choose_by_number(logits, params, numbers))
    assert torch.equal(found[::3], logits[::3].argmax(-1))


def test_what_a_temperature_alone_does_not_say_is_drawn_by_the_operators(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("forerun.decode.sampling.draw_at_once", lambda *args: pytest.fail("not for these"))
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(1))
    for how in ({"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.2}):
        params = [SamplingParams(temperature=1.0, **how), SamplingParams(temperature=1.0)]  # type: ignore[arg-type]
        kept = distribution(logits, params) > 0
        assert all(kept[i, token] for i, token in enumerate(choose_by_number(logits, params, [0.3, 0.9]).tolist()))


def test_the_first_of_several_likeliest_is_taken():
    logits = torch.zeros(3, 400)
    logits[1, 7], logits[1, 300] = 2.0, 2.0
    logits[2] = float("-inf")
    assert likeliest(logits).tolist() == logits.argmax(-1).tolist() == [0, 7, 0]
