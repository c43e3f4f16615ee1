"""Attention for drafts: near what attention in float32 computes, for long pieces of one sequence only."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from forerun.cache.pool import PagePool
from forerun.models.build import build_decoder
from forerun.models.cpu.attention import PagedCpuAttention
from forerun.models.cpu.library import _cpu, library
from forerun.models.execution.runner import Runner
from forerun.models.formats.checkpoint import open_checkpoint
from forerun.prefill.recompute import RaggedDepthPass, Rows
from tests.models.cpu.test_attention import CPU, PAGES, SIZE, make_batch, make_config

pytestmark = pytest.mark.usefixtures("kernels")


def has_bf16() -> bool:
    """Whether the kernels as they were compiled multiply pairs of bfloat16."""
    kernels = library()
    return kernels is not None and kernels.fr_isa() not in (b"avx2", b"neon") and "avx512_bf16" in _cpu()


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(14, 2, 64), (12, 2, 128), (9, 3, 64), (4, 4, 96), (8, 1, 32)])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("context", "new"), [(64, 64), (700, 333), (1001, 65)])
def test_near_what_float32_computes(heads: int, kv_heads: int, dim: int, window: int | None, context: int, new: int):
    draw = torch.Generator().manual_seed(context)
    config = make_config(heads, kv_heads, dim, window)
    pages = torch.randperm(PAGES, generator=draw)[: -(-context // SIZE)].tolist()
    batch = make_batch([(pages, context, new)])
    kv = tuple(torch.randn(PAGES * SIZE, kv_heads, dim, generator=draw) for _ in range(2))
    kv[0][:, :, :4] *= 8.0  # scores that differ by far, so that the largest weight moves
    q = torch.randn(new, heads, dim, generator=draw)
    plain = PagedCpuAttention(config, CPU, 4096)
    rough = plain.for_drafts()
    for backend in (plain, rough):
        backend.plan(batch)
    assert bool(rough._rough) == has_bf16() and not plain._rough
    for layer in range(2):
        mine, own = rough.attend(q, layer, kv), plain.attend(q, layer, kv)
        assert (mine - own).norm() < 0.01 * own.norm(), layer
        assert (mine - own).abs().max() < 0.04 * own.abs().max(), layer
        assert torch.equal(mine, own) == (not has_bf16())


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(14, 2, 64), (12, 2, 128), (9, 3, 64)])
@pytest.mark.parametrize(("context", "new"), [(64, 64), (700, 65), (1001, 130)])
def test_what_each_entry_is_given_is_the_sum_of_the_weights(
    heads: int, kv_heads: int, dim: int, context: int, new: int
):
    draw = torch.Generator().manual_seed(dim + context)
    config = make_config(heads, kv_heads, dim, 100)
    pages = torch.randperm(PAGES, generator=draw)[: -(-context // SIZE)]
    batch = make_batch([(pages.tolist(), context, new)])
    kv = tuple(torch.randn(PAGES * SIZE, kv_heads, dim, generator=draw) for _ in range(2))
    kv[0][:, :, :4] *= 8.0
    q = torch.randn(new, heads, dim, generator=draw)
    backend = PagedCpuAttention(config, CPU, 4096)
    backend.plan(batch)
    slots = pages[torch.arange(context) // SIZE] * SIZE + torch.arange(context) % SIZE
    scores = torch.einsum("qhd,khd->hqk", q, kv[0][slots].repeat_interleave(heads // kv_heads, 1)) * config.scale
    entry, seen = torch.arange(context), batch.kv_lens[:, None]
    for layer, window in enumerate(config.windows):
        hidden = (entry >= seen) | (entry < seen - (window or context))
        want = scores.masked_fill(hidden, float("-inf")).softmax(-1).sum((0, 1))
        got = backend.entry_weights(q, layer, kv)
        if not has_bf16():
            assert got is None
            continue
        assert got is not None and got.shape == (context,)
        assert (got - want).norm() < 0.01 * want.norm()
        assert float(got.sum()) == pytest.approx(new * heads, rel=1e-3)


def test_few_tokens_are_not_weighed_at_once():
    config, batch = make_config(4, 2, 64, None), make_batch([([0, 1, 2, 3], 63, 63)])
    backend = PagedCpuAttention(config, CPU, 4096)
    backend.plan(batch)
    kv = torch.randn(PAGES * SIZE, 2, 64), torch.randn(PAGES * SIZE, 2, 64)
    assert backend.entry_weights(torch.randn(63, 4, 64), 0, kv) is None


@pytest.mark.parametrize(
    "rows", [[([0, 1, 2, 3], 63, 63)], [([0, 1, 2, 3, 4], 70, 1)], [([0, 1, 2, 3, 4], 80, 70), ([5, 6], 20, 3)]]
)
def test_short_pieces_and_several_sequences_are_float32(rows: list[tuple[list[int], int, int]]):
    config, batch = make_config(4, 2, 64, None), make_batch(rows)
    kv = tuple(torch.randn(PAGES * SIZE, 2, 64) for _ in range(2))
    q = torch.randn(batch.num_tokens, 4, 64)
    plain = PagedCpuAttention(config, CPU, 4096)
    rough = plain.for_drafts()
    for backend in (plain, rough):
        backend.plan(batch)
    assert torch.equal(rough.attend(q, 0, kv), plain.attend(q, 0, kv))


def test_what_lies_behind_the_last_key_is_not_seen():
    config, batch = make_config(4, 2, 64, None), make_batch([([0, 1, 2, 3, 4, 5], 90, 90)])
    rough = PagedCpuAttention(config, CPU, 4096).for_drafts()
    rough.plan(batch)
    q, kv = torch.randn(90, 4, 64), tuple(torch.randn(PAGES * SIZE, 2, 64) for _ in range(2))
    before = rough.attend(q, 0, kv)
    for cache in kv:
        cache[90:] = 1e4
    assert torch.equal(rough.attend(q, 0, kv), before)


def test_a_decoder_for_drafts_leaves_the_other_as_it_is(tiny_gguf: Callable[..., Path]):
    checkpoint = open_checkpoint(tiny_gguf("qwen3", "Q8_0"))
    decoder, _ = build_decoder(checkpoint, CPU, "file", 512, quiet=True)
    assert isinstance(decoder.attention, PagedCpuAttention)
    runner = Runner(decoder, PagePool(decoder.config, 40, SIZE, decoder.dtype, CPU), 512)
    pages, ids = array("i", runner.pool.allocate(20)), np.arange(3, 203)
    rows = Rows(ids, np.arange(200), pages, np.full(200, decoder.config.num_layers), logits_indices=(199,))
    before = RaggedDepthPass(runner).run(rows).logits
    rough = RaggedDepthPass(runner, replace(decoder, attention=decoder.attention.for_drafts())).run(rows).logits
    assert (rough - before).norm() < 0.1 * before.norm()
    assert torch.equal(RaggedDepthPass(runner).run(rows).logits, before)
