"""The target's own lower layers as a source."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from forerun.decode.draft_context import DraftContext
from forerun.errors import BadProfile
from forerun.models.decoder import Taps
from forerun.models.execution.runner import Span
from forerun.models.rope import rotate
from forerun.prefill.maps import Maps, unit
from forerun.prefill.recompute import Rows
from forerun.prefill.sources.self_draft import SelfDraftSource
from tests.prefill.sources.common import (
    EMPTY,
    END,
    IDS,
    PAGES,
    apart,
    clear,
    exact_kv,
    make_draft_context,
    make_maps,
    make_profile,
    make_state,
    put_prefix,
    read_all,
    stored,
)
from tests.prefill.sources.test_draft import slow_attention

Folder = Callable[[str], Path]
BASE, MAPPED = 2, (1, 2)  # layer 2 can be mapped exactly from its own input, layer 3 cannot


def mapped_kv(ctx: DraftContext, maps: Maps) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """K/V that the maps give for the true hidden states of a whole forward."""
    c, attention = ctx.runner.decoder.config, ctx.runner.decoder.attention
    hidden = ctx.runner.forward([Span(IDS, 0, PAGES, ())], Taps(frozenset(maps.taps))).hidden
    clear(ctx.pool)
    out = maps(torch.cat([unit(hidden[tap]) for tap in maps.taps], 1))
    out = out.view(len(IDS), -1, 2, c.num_kv_heads, c.head_dim)
    angles = attention.ropes[c.rope].at(torch.arange(len(IDS)))
    return [(rotate(out[:, j, 0], *angles), out[:, j, 1]) for j in range(out.shape[1])]


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize(("first", "known", "chunk"), [(0, 0, 100), (0, 0, 7), (19, 0, 16), (0, 21, 9), (8, 24, 1)])
def test_lower_layers_are_exact_and_upper_ones_mapped(
    tiny_folder: Folder, family: str, first: int, known: int, chunk: int
):
    ctx, maps = make_draft_context(tiny_folder(family)), make_maps(tiny_folder(family), BASE, MAPPED)
    expected = mapped_kv(ctx, maps)
    exact = exact_kv(ctx)
    put_prefix(ctx, first)
    state, need = make_state(first, known), max(first, known)
    read_all(SelfDraftSource(ctx, make_profile("self", maps)), state, chunk)
    found = stored(ctx.runner)
    for i in range(BASE):
        assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(found[i], exact[i], strict=True))
    for i in range(BASE, 4):
        for mine, true, drafted in zip(found[i], exact[i], expected[i - BASE], strict=True):
            assert torch.allclose(mine[:first], true[:first], atol=1e-4)
            assert (mine[first:need] == EMPTY).all() and (mine[END:] == EMPTY).all()
            assert torch.allclose(mine[need:END], drafted[need:END], atol=2e-4), f"layer {i}"
            if i == BASE:
                assert torch.allclose(mine[need:END], true[need:END], atol=2e-4)
    assert state.depths.tolist() == [4] * first + [0] * (need - first) + [BASE] * (END - need)


@pytest.mark.parametrize("weights", ["float32", "int8"])
@pytest.mark.parametrize("first", [0, 19])
def test_repair_of_everything_from_the_kept_inputs_is_exact(tiny_folder: Folder, weights: str, first: int):
    ctx = make_draft_context(tiny_folder("qwen2"), weights)
    exact = exact_kv(ctx, END)
    put_prefix(ctx, first)
    state, source = (
        make_state(first),
        SelfDraftSource(ctx, make_profile("self", make_maps(tiny_folder("qwen2"), 2, (2,)))),
    )
    source.open(state)
    while state.read < len(IDS):
        source.read(state, 9)
        assert state.x is not None and len(state.x) == state.read - first
    entries = np.arange(first, END)
    assert state.x is not None
    rows = Rows(np.array(IDS)[entries], entries, PAGES, np.full(len(entries), 4), x=state.x[: END - first], first=BASE)
    source._writer.ragged_pass.run(rows)
    for mine, true in zip(stored(ctx.runner, 0, END), exact, strict=True):
        assert all(apart(a, b) < 1e-5 for a, b in zip(mine, true, strict=True))


def test_scores_are_the_lower_layers_attention(tiny_folder: Folder):
    folder, state = tiny_folder("qwen2"), make_state(chooser="lower")
    source = SelfDraftSource(make_draft_context(folder), make_profile("self", make_maps(folder, BASE, (2,))))
    read_all(source, state, 7)
    scores = source.scores(state)
    assert scores is not None and np.allclose(scores, slow_attention(folder, BASE).mean(0), atol=1e-5)
    source.finish(state)
    assert state.x is None and source.scores(state) is None
    unasked = make_state(chooser="tail")
    read_all(source, unasked, 7)
    assert unasked.tail_attention is None and source.scores(unasked) is None


def test_taps_above_the_base_are_refused(tiny_folder: Folder):
    maps = make_maps(tiny_folder("llama"), BASE, (2, 3))
    with pytest.raises(BadProfile, match=r"reads layers \[2, 3\], allowed is from 0 to 2"):
        SelfDraftSource(make_draft_context(tiny_folder("llama")), make_profile("self", maps))


def test_the_cost_counts_layers_and_maps(tiny_folder: Folder):
    maps = make_maps(tiny_folder("llama"), BASE, (2,))
    source = SelfDraftSource(make_draft_context(tiny_folder("llama")), make_profile("self", maps))
    per_layer = 64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 128
    assert source.cost(100) == pytest.approx(100 * (0.5 + maps.macs / (4 * per_layer)))
