"""Long prompts are read by a float8 copy of the draft's decoder, and nothing else runs on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.decode.draft_context import DraftContext
from forerun.models import decoder as decoders
from forerun.models.decoder import Decoder
from forerun.models.execution.runner import Span
from forerun.prefill import maps
from forerun.prefill.maps import FastMaps
from forerun.prefill.sources import draft
from forerun.prefill.sources.draft import DraftSource
from forerun.prefill.sources.self_draft import SelfDraftSource
from tests.prefill.sources.common import (
    IDS,
    PAGES,
    make_draft_context,
    make_maps,
    make_profile,
    make_state,
    read_all,
    stored,
)

LEAST = 20


class Float8Fake:
    """Copies whose MLPs add nothing, in place of float8; `asked`: for how many layers, `calls`: rows of each use."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.calls: list[int] = []

    def __call__(self, decoder: Decoder, layers: int) -> Decoder:
        self.asked.append(layers)
        lower = [replace(layer, float8_mlp=self.mlp) for layer in decoder.layers[:layers]]
        return replace(decoder, layers=lower + decoder.layers[layers:])

    def mlp(self, x: Tensor) -> Tensor:
        self.calls.append(x.shape[0])
        return x


@pytest.fixture
def float8(monkeypatch: pytest.MonkeyPatch) -> Float8Fake:
    made = Float8Fake()
    monkeypatch.setattr(draft, "float8_decoder", made)
    monkeypatch.setattr(decoders, "MIN_FLOAT8_ROWS", LEAST)
    return made


@pytest.fixture
def ctx(tiny_folder: Callable[[str], Path]) -> DraftContext:
    return make_draft_context(tiny_folder("qwen2"))


def source_of(ctx: DraftContext, folder: Path, last: int) -> DraftSource:
    """Its maps look at the draft's layers up to `last`."""
    return DraftSource(ctx, make_profile("draft", make_maps(folder, 1, tuple(range(1, last + 1)))))


def test_only_long_pieces_of_the_sources_own_reading(
    float8: Float8Fake, ctx: DraftContext, tiny_folder: Callable[[str], Path]
) -> None:
    source = source_of(ctx, tiny_folder("qwen2"), 3)
    assert float8.asked == [3]
    read_all(source, make_state(), LEAST - 1)
    assert not float8.calls
    assert ctx.draft_runner is not None
    fine = stored(ctx.draft_runner)
    read_all(source, make_state(chooser="draft"), 40)
    assert float8.calls == [40] * 3 + [21] * 3
    assert not torch.equal(stored(ctx.draft_runner)[1][0], fine[1][0])
    float8.calls.clear()
    ctx.draft_runner.forward([Span(IDS, 0, PAGES, (len(IDS) - 1,))])
    ctx.runner.forward([Span(IDS, 0, PAGES, (len(IDS) - 1,))])
    assert not float8.calls
    for mine, true in zip(stored(ctx.draft_runner, 0, 40)[1], fine[1], strict=True):
        assert torch.allclose(mine, true[:40], atol=1e-4)


def test_it_can_be_switched_off_and_readings_to_the_last_layer_stay_as_they_are(
    float8: Float8Fake, ctx: DraftContext, tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source_of(ctx, tiny_folder("qwen2"), 4)
    assert not float8.asked
    monkeypatch.setattr(DraftSource, "float8", False)
    read_all(source_of(ctx, tiny_folder("qwen2"), 3), make_state(), 40)
    assert not float8.asked and not float8.calls


def test_its_maps_may_be_float8_too(
    float8: Float8Fake, ctx: DraftContext, tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever layers they look at; those of the target's own hidden states may not."""
    asked: list[bool] = []

    class Noted(FastMaps):
        def __init__(self, maps: Any, precision: Any, bases: Any, device: Any, float8: bool = False) -> None:
            asked.append(float8)
            super().__init__(maps, precision, bases, device, float8)

    monkeypatch.setattr(maps, "FastMaps", Noted)
    folder = tiny_folder("qwen2")
    source_of(ctx, folder, 3)
    source_of(ctx, folder, 4)
    SelfDraftSource(ctx, make_profile("self", make_maps(folder, 1, (0, 1))))
    monkeypatch.setattr(DraftSource, "float8", False)
    source_of(ctx, folder, 3)
    assert asked == [True, True, False, False]
