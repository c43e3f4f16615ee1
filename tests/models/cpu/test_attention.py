"""Attention in C: a softmax in double precision is what it computes, and a token's bits do not depend on its batch."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forerun.cache.pool import PagePool
from forerun.core import ROOT, Draft, TokenBatch
from forerun.models.attention import AttentionBackend
from forerun.models.build import build_decoder
from forerun.models.config import ModelConfig
from forerun.models.cpu.all_layers_kv import CpuAllLayersKV
from forerun.models.cpu.attention import PagedCpuAttention
from forerun.models.decoder import AllLayersKV, Taps
from forerun.models.execution.runner import Runner, Span
from forerun.models.formats.checkpoint import open_checkpoint
from tests.models.test_attention import CUTS, IDS, TREE, cut

CPU, SIZE, PAGES = torch.device("cpu"), 16, 160
Rows = list[tuple[list[int], int, int]]  # pages, entries, new tokens of each sequence


def make_config(heads: int, kv_heads: int, dim: int, window: int | None) -> ModelConfig:
    return ModelConfig(
        "llama", 8, 96, 2, heads, kv_heads, dim, 8, 4096, sliding_window=window, window_layers=(False, True)
    )


def make_batch(rows: Rows) -> TokenBatch:
    cu_seqlens, kv_lens = [0], []
    tables = torch.zeros(len(rows), max(len(pages) for pages, _, _ in rows), dtype=torch.int32)
    for row, (pages, context, count) in enumerate(rows):
        tables[row, : len(pages)] = torch.tensor(pages)
        cu_seqlens.append(cu_seqlens[-1] + count)
        kv_lens += range(context - count + 1, context + 1)
    zeros = torch.zeros(cu_seqlens[-1], dtype=torch.int64)
    lens = torch.tensor(kv_lens, dtype=torch.int32)
    return TokenBatch(zeros, zeros, zeros, lens, tables, cu_seqlens, [row[1] for row in rows], SIZE, zeros)


def attend(config: ModelConfig, batch: TokenBatch, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor]):
    backend = PagedCpuAttention(config, CPU, 4096)
    backend.plan(batch)
    return torch.stack([backend.attend(q, layer, kv) for layer in range(2)])


def reference(config: ModelConfig, batch: TokenBatch, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor]):
    out = torch.zeros(2, *q.shape, dtype=torch.float64)
    for s in range(batch.num_seqs):
        for t in range(batch.cu_seqlens[s], batch.cu_seqlens[s + 1]):
            for layer, window in enumerate(config.windows):
                seen = int(batch.kv_lens[t])
                entry = torch.arange(max(0, seen - window) if window else 0, seen)
                slots = batch.block_tables[s][entry // SIZE] * SIZE + entry % SIZE
                k, v = (c[slots].repeat_interleave(q.shape[1] // c.shape[1], 1).double() for c in kv)
                weights = torch.einsum("hd,khd->hk", q[t].double() * config.scale, k).softmax(-1)
                out[layer, t] = torch.einsum("hk,khd->hd", weights, v)
    return out.view(2, q.shape[0], -1)


SHAPES = [(4, 2, 64), (9, 3, 64), (12, 2, 128), (3, 3, 16), (5, 1, 80), (2, 1, 256)]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize("window", [None, 40, 700])
def test_it_is_a_softmax_over_what_a_token_sees(heads: int, kv_heads: int, dim: int, window: int | None):
    make = torch.Generator().manual_seed(dim)
    pages = torch.randperm(PAGES, generator=make).tolist()
    shared = pages[:40]
    rows = [
        ([*shared, *pages[40:50]], 790, 1),
        ([*shared, *pages[50:60]], 641, 3),
        (pages[60:65], 70, 70),
        ([*shared, *pages[65:70]], 700, 1),
        (pages[70:71], 1, 1),
    ]
    config, batch = make_config(heads, kv_heads, dim, window), make_batch(rows)
    kv = tuple(torch.randn(PAGES * SIZE, kv_heads, dim, generator=make) for _ in range(2))
    q = 3 * torch.randn(batch.num_tokens, heads, dim, generator=make)
    got = attend(config, batch, q, kv)
    torch.testing.assert_close(got.double(), reference(config, batch, q, kv), atol=2e-5, rtol=1e-4)
    separate = PagedCpuAttention(config, CPU, 4096)
    separate.share_prefix = False
    separate.plan(batch)
    assert torch.equal(torch.stack([separate.attend(q, layer, kv) for layer in range(2)]), got)
    for s in range(len(rows)):  # each sequence alone: the same bits
        own = slice(batch.cu_seqlens[s], batch.cu_seqlens[s + 1])
        assert torch.equal(attend(config, make_batch(rows[s : s + 1]), q[own], kv), got[:, own])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("base", "tokens"), [(0, 1), (1, 40)])
def test_k_and_v_of_all_layers_are_written_as_operators_write_them(base: int, tokens: int):
    config, draw = make_config(9, 3, 64, 40), torch.Generator().manual_seed(tokens)
    decoder: Any = SimpleNamespace(config=config, attention=PagedCpuAttention(config, CPU, 4096))
    mapped, slots = torch.randn(tokens, 2 - base, 2, 3, 64, generator=draw), torch.randperm(64, generator=draw)[:tokens]
    found = []
    for way in (CpuAllLayersKV, AllLayersKV):
        kv = [(torch.zeros(64, 3, 64), torch.zeros(64, 3, 64)) for _ in range(2)]
        way(decoder, kv).write(mapped, 700, slots, [range(i, i + 1) for i in range(base, 2)])
        found.append(torch.stack([cache for layer in kv for cache in layer]))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
    assert float(found[0][2 * base :].abs().sum()) > 0.0 and not found[0][: 2 * base].any()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("tokens", [1, 3, 20])
@pytest.mark.parametrize("normed", [False, True])
def test_k_and_v_from_elsewhere_are_written_as_operators_write_them(tokens: int, normed: bool):
    config, draw = make_config(9, 3, 64, None), torch.Generator().manual_seed(tokens)
    backend = PagedCpuAttention(config, CPU, 4096)
    made = torch.randn(tokens, 2 * 3 * 64, generator=draw)
    positions, slots = torch.arange(700, 700 + tokens), torch.randperm(64, generator=draw)[:tokens]
    norm = (torch.rand(64, generator=draw), 1e-5) if normed else None
    ours, theirs = ([torch.zeros(64, 3, 64), torch.zeros(64, 3, 64)] for _ in range(2))
    backend.write_rows(made, 1, (ours[0], ours[1]), positions, slots, norm)
    AttentionBackend.write_rows(backend, made, 1, (theirs[0], theirs[1]), positions, slots, norm)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert float(ours[0].abs().sum()) > 0.0


def test_large_scores_and_equal_scores():
    config, batch = make_config(4, 2, 64, None), make_batch([(list(range(40)), 600, 1)])
    kv = (torch.ones(PAGES * SIZE, 2, 64), torch.randn(PAGES * SIZE, 2, 64))
    kv[0][333] *= 40
    for size in (0.0, 1.0, 100.0):
        q = torch.full((1, 4, 64), size)
        torch.testing.assert_close(
            attend(config, batch, q, kv).double(), reference(config, batch, q, kv), atol=2e-5, rtol=1e-4
        )


def make_runner(folder: Path, weights: str) -> Runner:
    decoder, _ = build_decoder(open_checkpoint(folder), CPU, weights, 1024)
    decoder.attention = PagedCpuAttention(decoder.config, CPU, 1024)
    return Runner(decoder, PagePool(decoder.config, 96, 16, decoder.dtype, CPU), 1024)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gemma3"])
def test_the_same_bits_however_the_tokens_are_cut(family: str, tiny_folder: Callable[[str], Path]):
    runner = make_runner(tiny_folder(family), "int8")
    whole = cut(runner, [700])
    for sizes in CUTS.values():
        assert torch.equal(cut(runner, sizes), whole)
        assert torch.equal(cut(runner, sizes, beside=[7] * 5), whole)


def test_a_real_model_in_its_own_blocks_has_the_same_bits_however_it_is_run(smollm2: Path):
    runner = make_runner(smollm2, "file")
    whole = cut(runner, [700])
    for sizes in CUTS.values():
        assert torch.equal(cut(runner, sizes), whole)
    pages = array("i", [7 * i % 96 for i in range(44)])
    layer_by_layer = runner.forward([Span(IDS, 0, pages, range(700))], Taps(hidden=frozenset({3})))
    assert torch.equal(layer_by_layer.logits, whole)


@pytest.mark.parametrize("base", [5, 127, 509])
def test_a_node_of_a_tree_gets_what_it_would_get_as_an_answer(base: int, smollm2: Path):
    runner = make_runner(smollm2, "file")
    pages = array("i", [7 * i % 96 for i in range(44)])  # scattered, and crossing page ends
    runner.forward([Span(IDS[:base], 0, pages, ())])
    nodes = IDS[600 : 600 + len(TREE)]
    span = Span([IDS[base], *nodes], base, pages, range(1 + len(TREE)), base + 1, TREE)
    got = runner.forward([span, Span([7] * 3, 0, array("i", [95, 1]), ())]).logits
    assert ROOT in TREE
    for node in range(len(TREE)):
        line = [*IDS[: base + 1], *(nodes[n] for n in Draft(nodes, TREE).path(node))]
        alone = runner.forward([Span(line, 0, array("i", range(44, 80)), (len(line) - 1,))]).logits[0]
        assert torch.equal(got[node + 1], alone)
