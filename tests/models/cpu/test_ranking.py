"""One call that ranks a drafted block's tokens gives what the operators give, for any sizes and heads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from forerun.decode.drafters.block import BlockDrafter
from forerun.models.cpu.library import library
from forerun.models.cpu.ranking import likeliest
from forerun.models.hidden_draft import BlockModel, BlockRows

pytestmark = pytest.mark.skipif(library() is None, reason="there are no C kernels here")


def drafter(vocab: int, rank: int, width: int, markov: bool, confidence: str) -> BlockDrafter:
    draw, made = torch.Generator().manual_seed(vocab + rank), BlockDrafter.__new__(BlockDrafter)
    model: Any = BlockModel.__new__(BlockModel)
    model.ids = torch.randperm(vocab + 50, generator=draw)[:vocab].sort().values
    model._previous = 0.3 * torch.randn(vocab + 50, rank, generator=draw) if markov else None
    model._next = 0.3 * torch.randn(vocab, rank, generator=draw) if markov else None
    wide = width + (rank if markov else 0)
    sure = 0.1 * torch.randn(1, wide, generator=draw), torch.randn(1, generator=draw)
    model._confidence = None if confidence == "none" else sure
    model._confidence_odds = torch.tensor([0.8]) if confidence == "odds" else None
    made._model = model
    return made


def tree(temperature: float) -> Any:
    params = SimpleNamespace(greedy=temperature == 0.0, temperature=temperature)
    return SimpleNamespace(request=SimpleNamespace(context=SimpleNamespace(params=params)))


@pytest.mark.parametrize("confidence", ["none", "plain", "odds"])
@pytest.mark.parametrize("markov", [True, False])
@pytest.mark.parametrize(("vocab", "rank", "width", "depths"), [(1000, 32, 64, 5), (301, 5, 48, 3), (20, 4, 16, 1)])
def test_one_call_ranks_as_the_operators_do(
    vocab: int, rank: int, width: int, depths: int, markov: bool, confidence: str
) -> None:
    made, draw = drafter(vocab, rank, width, markov, confidence), torch.Generator().manual_seed(1)
    logits = 3.0 * torch.randn(3, depths, vocab, generator=draw)
    rows = BlockRows(logits, torch.randn(3, depths, width, generator=draw))
    trees, lasts = [tree(0.0), tree(0.6), tree(1.0)], [3, 5, vocab + 49]
    found, wanted = made._rank(rows, lasts, trees), made._rank_by_operators(rows, lasts, trees)
    assert np.array_equal(found.tokens, wanted.tokens) and found.children.shape == wanted.children.shape
    for got, expected in ((found.children, wanted.children), (found.probs, wanted.probs)):
        np.testing.assert_allclose(got[:, 1:], expected[:, 1:], rtol=2e-4, atol=2e-6)
        np.testing.assert_allclose(got[:, 0, 0], expected[:, 0, 0], rtol=2e-4, atol=2e-6)  # one token is before it


@pytest.mark.parametrize("vocab", [20, 47, 3000])
def test_the_likeliest_tokens_of_rows_are_those_of_a_softmax(vocab: int):
    logits = torch.randn(5, vocab + 7, generator=torch.Generator().manual_seed(vocab))[:, :vocab] * 4.0
    logits[1, 3:] = float("-inf")
    found = likeliest(logits, 16)
    assert found is not None
    wanted = logits.softmax(-1).topk(16, -1)
    torch.testing.assert_close(found[1], wanted.values, rtol=1e-4, atol=1e-6)
    sure = wanted.values > 0.0
    assert torch.equal(found[0][sure], wanted.indices[sure])
    assert likeliest(logits.double(), 16) is None and likeliest(logits, 40) is None
