"""Writing mapped K/V, in blocks of rows and groups of layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from forerun.decode.draft_context import DraftContext
from forerun.models.attention import AttentionBackend
from forerun.prefill import maps as kv_writer
from forerun.prefill.maps import Maps
from tests.prefill.sources.common import END, PAGE, PAGES, clear, make_draft_context, make_state, stored

Folder = Callable[[str], Path]


def random_maps(ctx: DraftContext, base: int, rank: int = 8) -> Maps:
    c, draw = ctx.runner.decoder.config, torch.Generator().manual_seed(4)
    high = (c.num_layers - base) * 2 * c.kv_size
    shapes = ((rank, c.hidden_size), (rank,), (4, rank), (rank, 4), (high, rank), (high,))
    return Maps((0,), base, *(torch.randn(shape, generator=draw) for shape in shapes))


def write_plainly(ctx: DraftContext, maps: Maps, hidden: torch.Tensor, first: int, end: int) -> None:
    """Layer by layer, as the attention backend writes K/V from elsewhere."""
    decoder = ctx.runner.decoder
    c, attention = decoder.config, cast(AttentionBackend, decoder.attention)
    out = maps(torch.nn.functional.rms_norm(hidden, (c.hidden_size,), None, 1e-6))
    out = out.view(end - first, -1, 2, c.num_kv_heads, c.head_dim)
    slots = torch.tensor([PAGES[e // PAGE] * PAGE + e % PAGE for e in range(first, end)])
    for j, i in enumerate(range(maps.base, c.num_layers)):
        attention.write(out[:, j, 0], out[:, j, 1], i, ctx.runner.kv[i], torch.arange(first, end), slots)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(("first", "end", "block"), [(0, END, 64), (5, 30, 7), (9, 10, 64)])
def test_all_layers_are_written_as_one_is(
    tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch, first: int, end: int, block: int, together: bool
):
    """Gemma turns the K of its two kinds of layer by different angles."""
    ctx = make_draft_context(tiny_folder("gemma3"))
    maps = random_maps(ctx, base=2)
    hidden = torch.randn(end - first, 64, generator=torch.Generator().manual_seed(6))
    write_plainly(ctx, maps, hidden, first, end)
    expected = stored(ctx.runner)
    clear(ctx.pool)
    monkeypatch.setattr(kv_writer, "CPU_MAP_ROWS", block)
    writer, state = kv_writer.KVWriter(ctx.runner, ctx.runner.decoder, maps), make_state(layers=7)
    if together:
        writer._together = kv_writer._groups(on_gpu(ctx), 2)
    writer.write(state, [hidden], first, end)
    for i, (mine, plain) in enumerate(zip(stored(ctx.runner), expected, strict=True)):
        assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(mine, plain, strict=True)), f"layer {i}"
    assert state.depths.tolist() == [0] * first + [2] * (end - first) + [0] * (END - end)


def on_gpu(ctx: DraftContext) -> Any:
    return SimpleNamespace(config=ctx.runner.decoder.config, device=SimpleNamespace(type="cuda"))


def test_layers_of_equal_angles_are_rotated_together(tiny_folder: Folder):
    gemma, llama = make_draft_context(tiny_folder("gemma3")), make_draft_context(tiny_folder("llama"))
    assert kv_writer._groups(on_gpu(gemma), 2) == [range(2, 5), range(5, 6), range(6, 7)]
    assert kv_writer._groups(on_gpu(llama), 1) == [range(1, 4)]
    assert kv_writer._groups(llama.runner.decoder, 1) == [range(1, 2), range(2, 3), range(3, 4)]
