"""The reference backend: the same bits for a token however its batch is cut, which eight-bit weights rely on."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from forerun.cache.pool import PagePool
from forerun.engine.runner import Runner, Span
from forerun.models.attention import SLACK, block_keys
from forerun.models.build import build_decoder
from forerun.models.load import open_checkpoint

CPU = torch.device("cpu")
IDS = torch.randint(3, 400, (700,), generator=torch.Generator().manual_seed(3)).tolist()


def make_runner(folder: Path, weights: str) -> Runner:
    decoder, _ = build_decoder(open_checkpoint(folder), CPU, weights, 1024)
    return Runner(decoder, PagePool(decoder.config, 96, 16, decoder.dtype, CPU), 1024)


def cut(runner: Runner, sizes: list[int], beside: list[int] | None = None) -> torch.Tensor:
    """Logits of IDS run in pieces of these sizes, optionally with another sequence in every batch."""
    pages = array("i", runner.pool.allocate(44))
    other = array("i", runner.pool.allocate(44))
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


CUTS = {
    "decode": [600, *[1] * 100],
    "halves": [350, 350],
    "chunks": [*[37] * 18, 34],
    "drafts": [130, *[6] * 95],
    "mixed": [190, 1, 3, 6, 200, 11, 33, 256],
}


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gemma3"])
@pytest.mark.parametrize("name", CUTS)
def test_int8_gives_the_same_bits_however_the_tokens_are_cut(
    family: str, name: str, tiny_folder: Callable[[str], Path]
):
    runner = make_runner(tiny_folder(family), "int8")
    whole = cut(runner, [700])
    assert torch.equal(cut(runner, CUTS[name]), whole)
    assert torch.equal(cut(runner, CUTS[name], beside=[7] * 5), whole)


def test_the_real_model_gives_the_same_bits(smollm2: Path):
    runner = make_runner(smollm2, "int8")
    whole = cut(runner, [700])
    for sizes in CUTS.values():
        assert torch.equal(cut(runner, sizes), whole)


def test_scattered_pages_give_the_same_bits(tiny_folder: Callable[[str], Path]):
    runner = make_runner(tiny_folder("qwen2"), "int8")
    scattered = array("i", [7 * i % 96 for i in range(44)])
    got = runner.forward([Span(IDS, 0, scattered, range(700))]).logits
    assert torch.equal(got, cut(runner, [700]))


@pytest.mark.parametrize(("context", "keys"), [(1, 128), (128, 128), (129, 512), (512, 512), (513, 640), (641, 1024)])
def test_keys_come_in_few_shapes(context: int, keys: int):
    assert block_keys(context) == keys <= context + SLACK
