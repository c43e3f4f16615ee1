"""Maps that read the target's own embedding beside a narrower draft: the engine writes what calibration meant."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from forerun.decode.draft_context import DraftContext
from forerun.errors import BadProfile
from forerun.models.formats.checkpoint import open_checkpoint
from forerun.models.rope import rotate
from forerun.prefill import maps as kv_writer
from forerun.prefill.calibration.dense import DenseModel
from forerun.prefill.calibration.model_pair import ModelPair
from forerun.prefill.maps import Maps
from forerun.prefill.profile import Profile, as_stored
from forerun.prefill.sources.draft import DraftSource
from tests.prefill.calibration.common import write_pair
from tests.prefill.sources.common import (
    CPU,
    EMPTY,
    END,
    IDS,
    apart,
    clear,
    exact_kv,
    make_draft_context,
    make_profile,
    make_state,
    put_prefix,
    read_all,
    stored,
)

TAPS, BASE, RANK = (0, 1, 2), 1, 24
DRAFT, TARGET = 32, 64  # widths
_made: dict[str, DraftContext] = {}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def pair(models: tuple[Path, Path]) -> ModelPair:
    target, draft = (DenseModel.from_checkpoint(open_checkpoint(path), CPU, torch.float32) for path in models)
    return ModelPair(target, draft, TAPS, BASE)


def draft_context_of(models: tuple[Path, Path], weights: str) -> DraftContext:
    if weights not in _made:
        _made[weights] = make_draft_context(models[0], weights, models[1])
    clear(_made[weights].pool)
    return _made[weights]


@pytest.fixture(scope="module", autouse=True)
def forget():
    yield
    _made.clear()


def random_maps(pair: ModelPair, target_embedding: bool = True) -> Maps:
    draw = torch.Generator().manual_seed(11)
    inputs = len(TAPS) * DRAFT + target_embedding * TARGET

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw) * shape[-1] ** -0.5

    tensors = some(RANK, inputs), some(RANK), some(40, RANK), some(RANK, 40), some(pair.width, RANK), some(pair.width)
    return Maps(TAPS, BASE, *tensors, target_embedding=target_embedding)


def dense_kv(pair: ModelPair, maps: Maps, ctx: DraftContext) -> list[tuple[Tensor, Tensor]]:
    """The maps of calibration's features, K rotated to its position: [T, Hkv, D] of each mapped layer."""
    c, tokens = pair.target.config, torch.tensor([IDS])
    features = pair.features(tokens, pair.target.trace(tokens))
    out = maps(features[0]).view(len(IDS), -1, 2, c.num_kv_heads, c.head_dim)
    angles = ctx.runner.decoder.attention.ropes[c.rope].at(torch.arange(len(IDS)))
    return [(rotate(out[:, j, 0], *angles), out[:, j, 1]) for j in range(out.shape[1])]


def worst(ctx: DraftContext, wanted: list[tuple[Tensor, Tensor]]) -> float:
    """Of the drafted layers, relative to what is wanted there."""
    found = stored(ctx.runner, 0, END)[BASE:]
    pairs = ((a, b[:END]) for mine, true in zip(found, wanted, strict=True) for a, b in zip(mine, true, strict=True))
    return max(apart(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    ("first", "known", "chunk", "block"), [(0, 0, 100, 64), (0, 0, 7, 64), (19, 0, 16, 5), (8, 24, 9, 4)]
)
def test_the_engine_writes_what_calibration_meant(
    models: tuple[Path, Path],
    pair: ModelPair,
    monkeypatch: pytest.MonkeyPatch,
    first: int,
    known: int,
    chunk: int,
    block: int,
):
    ctx, maps = draft_context_of(models, "float32"), random_maps(pair)
    exact, wanted = exact_kv(ctx), dense_kv(pair, maps, ctx)
    monkeypatch.setattr(kv_writer, "CPU_MAP_ROWS", block)
    put_prefix(ctx, first)
    state, need = make_state(first, known), max(first, known)
    read_all(DraftSource(ctx, make_profile("draft", maps)), state, chunk)
    found = stored(ctx.runner)
    assert all(torch.allclose(a[need:END], b[need:END], atol=1e-4) for a, b in zip(found[0], exact[0], strict=True))
    for i, (mine, true, drafted) in enumerate(zip(found[BASE:], exact[BASE:], wanted, strict=True)):
        for a, b, c in zip(mine, true, drafted, strict=True):
            assert torch.allclose(a[:first], b[:first], atol=1e-4) and (a[first:need] == EMPTY).all()
            assert torch.allclose(a[need:END], c[need:END], atol=2e-4), f"layer {BASE + i}"
            assert (a[END:] == EMPTY).all()


def test_both_models_may_be_rotated(models: tuple[Path, Path], pair: ModelPair, monkeypatch: pytest.MonkeyPatch):
    """Eight-bit decoders keep their streams in a basis of their own; the embedding comes in the target's."""
    ctx, maps = draft_context_of(models, "int8"), random_maps(pair)
    assert ctx.draft is not None
    target, draft = ctx.runner.decoder, ctx.draft.decoder
    assert target.basis is not None and draft.basis is not None
    assert (target.basis.size, draft.basis.size) == (TARGET, DRAFT)
    wanted, profile = dense_kv(pair, maps, ctx), make_profile("draft", maps)
    read_all(DraftSource(ctx, profile), make_state(), 20)
    assert worst(ctx, wanted) < 0.04
    for forgotten in (target, draft):  # the figure above means something: with one of them it is far off
        clear(ctx.pool)
        source = DraftSource(ctx, profile)
        with monkeypatch.context() as patch:
            patch.setattr(forgotten, "basis", None)
            source._writer = kv_writer.KVWriter(ctx.runner, draft, maps)
        read_all(source, make_state(), 20)
        assert worst(ctx, wanted) > 0.3


def test_without_it_the_embedding_does_not_count(models: tuple[Path, Path], pair: ModelPair):
    """The same numbers with the embedding's columns cut off, or set to zero, say the same."""
    ctx, maps = draft_context_of(models, "float32"), random_maps(pair)
    zero = maps.with_tensors({"down": maps.down.clone()})
    zero.down[:, len(TAPS) * DRAFT :] = 0.0
    narrow = replace(maps, down=maps.down[:, : len(TAPS) * DRAFT], target_embedding=False)
    found = []
    for each in (zero, narrow, maps):
        clear(ctx.pool)
        read_all(DraftSource(ctx, make_profile("draft", each)), make_state(), 20)
        found.append(torch.stack([torch.stack(layer) for layer in stored(ctx.runner, 0, END)[BASE:]]))
    torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=1e-4)
    assert apart(found[2], found[1]) > 0.1


def test_a_profile_from_disk_drafts_the_same(models: tuple[Path, Path], pair: ModelPair, tmp_path: Path):
    ctx, maps = draft_context_of(models, "float32"), random_maps(pair)
    make_profile("draft", maps).save(tmp_path / "a.profile")
    wanted, unrounded = (dense_kv(pair, kept, ctx) for kept in (as_stored(maps), maps))
    read_all(DraftSource(ctx, Profile.load(tmp_path / "a.profile")), make_state(), 20)
    assert worst(ctx, wanted) < 1e-4 < worst(ctx, unrounded) < 3e-2  # stored in int8


@pytest.mark.parametrize("target_embedding", [True, False])
def test_maps_of_another_width_are_refused(models: tuple[Path, Path], pair: ModelPair, target_embedding: bool):
    """The columns of the embedding are missing, or not declared."""
    ctx, maps = draft_context_of(models, "float32"), random_maps(pair, target_embedding=not target_embedding)
    maps = replace(maps, target_embedding=target_embedding)
    have, need = (96, 160) if target_embedding else (160, 96)
    with pytest.raises(BadProfile, match=f"maps {have} values to 192, these models need {need} to 192"):
        DraftSource(ctx, make_profile("draft", maps))


def test_the_cost_counts_the_embeddings_columns(models: tuple[Path, Path], pair: ModelPair):
    ctx = draft_context_of(models, "float32")
    one, other = (
        DraftSource(ctx, make_profile("draft", random_maps(pair, target_embedding)))
        for target_embedding in (True, False)
    )
    extra = RANK * TARGET / ctx.runner.decoder.config.macs
    assert one.cost(100) - other.cost(100) == pytest.approx(100 * extra)
