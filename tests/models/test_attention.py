"""The reference backend: the same bits for a token however its batch is cut, which eight-bit weights rely on."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from forerun.cache.pool import PagePool
from forerun.engine.runner import Runner, Span
from forerun.models.build import build_decoder
from forerun.models.load import open_checkpoint

CPU = torch.device("cpu")
IDS = torch.randint(3, 400, (150,), generator=torch.Generator().manual_seed(3)).tolist()


def make_runner(folder: Path, weights: str) -> Runner:
    decoder, _ = build_decoder(open_checkpoint(folder), CPU, weights, 512)
    return Runner(decoder, PagePool(decoder.config, 64, 16, decoder.dtype, CPU), 512)


def cut(runner: Runner, sizes: list[int], beside: list[int] | None = None) -> torch.Tensor:
    """Logits of IDS run in pieces of these sizes, optionally with another sequence in every batch."""
    pages = array("i", runner.pool.allocate(10))
    other = array("i", runner.pool.allocate(10))
    parts, at = [], 0
    for size in sizes:
        spans = [Span(IDS[at : at + size], at, pages, range(size))]
        if beside:
            spans.append(Span(beside, 0, other, ()))
        parts.append(runner.forward(spans).logits)
        at += size
    assert at == len(IDS)
    runner.pool.release(pages)
    runner.pool.release(other)
    return torch.cat(parts)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gemma3"])
@pytest.mark.parametrize(
    "sizes", [[1] * 150, [100, 50], [37] * 4 + [2], [120, *[6] * 5], [140, 1, 8, 1]], ids=["decode", "halves", "chunks", "drafts", "mixed"]
)
def test_int8_gives_the_same_bits_however_the_tokens_are_cut(family: str, sizes: list[int], tiny_folder: Callable[[str], Path]):
    runner = make_runner(tiny_folder(family), "int8")
    whole = cut(runner, [150])
    assert torch.equal(cut(runner, sizes), whole)
    assert torch.equal(cut(runner, sizes, beside=[7] * 5), whole)


def test_the_real_model_gives_the_same_bits(smollm2: Path):
    runner = make_runner(smollm2, "int8")
    whole = cut(runner, [150])
    for sizes in ([1] * 150, [64, 64, 22], [142, 8]):
        assert torch.equal(cut(runner, sizes), whole)
