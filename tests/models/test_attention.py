"""The reference backend: the same bits for a token however its batch is cut, which eight-bit weights rely on."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from forerun.cache.pool import PagePool
from forerun.core import EXTRA_KV_SLOTS, ROOT, Draft
from forerun.models.attention import block_keys
from forerun.models.build import build_decoder
from forerun.models.execution.runner import Runner, Span
from forerun.models.formats.checkpoint import open_checkpoint
from tests.cpu_kinds import INSTRUCTIONS, run_with

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


#         root, then two branches; the second branches again; nodes in an order where branches interleave
TREE = [ROOT, 0, ROOT, 2, 2, 4, 3, 1]


@pytest.mark.parametrize("weights", ["int8", "float32"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("base", [5, 30, 127, 509])
def test_a_node_of_a_tree_gets_what_it_would_get_as_an_answer(
    family: str, weights: str, base: int, tiny_folder: Callable[[str], Path]
):
    runner = make_runner(tiny_folder(family), weights)
    pages = array("i", [7 * i % 96 for i in range(44)])  # scattered, and crossing page ends
    runner.forward([Span(IDS[:base], 0, pages, ())])
    nodes = IDS[600 : 600 + len(TREE)]
    span = Span([IDS[base], *nodes], base, pages, range(1 + len(TREE)), base + 1, TREE)
    got = runner.forward([span, Span([7] * 3, 0, array("i", [95, 1]), ())]).logits
    for node in range(len(TREE)):
        path = Draft(nodes, TREE).path(node)
        line = [*IDS[: base + 1], *(nodes[n] for n in path)]
        alone = runner.forward([Span(line, 0, array("i", range(44, 80)), (len(line) - 1,))]).logits[0]
        if weights == "int8":
            assert torch.equal(got[node + 1], alone)
        else:
            assert torch.allclose(got[node + 1], alone, atol=2e-5, rtol=1e-5)


def test_an_accepted_branch_moves_to_where_the_answer_continues(tiny_folder: Callable[[str], Path]):
    runner = make_runner(tiny_folder("llama"), "int8")
    pages, base = array("i", range(10)), 20
    runner.forward([Span(IDS[:base], 0, pages, ())])
    nodes = IDS[600 : 600 + len(TREE)]
    runner.forward([Span([IDS[base], *nodes], base, pages, (), base + 1, TREE)])
    path = [2, 4, 5]
    runner.move(pages, [base + 1 + n for n in path], [base + 1, base + 2, base + 3])
    got = runner.forward([Span([9], base + 4, pages, (0,))]).logits
    line = [*IDS[: base + 1], *(nodes[n] for n in path), 9]
    assert torch.equal(got[0], runner.forward([Span(line, 0, array("i", range(20, 40)), (24,))]).logits[0])


@pytest.mark.parametrize(("context", "keys"), [(1, 128), (128, 128), (129, 512), (512, 512), (513, 640), (641, 1024)])
def test_keys_come_in_few_shapes(context: int, keys: int):
    assert block_keys(context) == keys <= context + EXTRA_KV_SLOTS


# K and V lie as they do in a pool
ROWS_OF_CALLS = """
import torch, torch.nn.functional as F
from forerun.models.attention import row_limits
draw = torch.Generator().manual_seed(1)
for dim in (16, 64, 128):
    multiple, most = row_limits(dim)
    k, v = (torch.randn(640, 2, dim, generator=draw).transpose(0, 1)[None] for _ in "kv")
    q = torch.randn(1, 2, most, dim, generator=draw)
    attend = lambda lo, hi: F.scaled_dot_product_attention(q[:, :, lo:hi], k, v, torch.zeros(hi - lo, 640))
    calls = {rows: attend(0, rows) for rows in range(multiple, most + 1, multiple)}
    for row in range(most - multiple + 1):
        alone = attend(row, row + multiple)[:, :, 0]
        for rows, found in calls.items():
            assert row >= rows or torch.equal(found[:, :, row], alone), (dim, multiple, most, row, rows)
"""


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_a_row_has_the_same_bits_wherever_it_stands_within_the_limits(instructions: str | None):
    run_with(instructions, ROWS_OF_CALLS)
