"""Text met before at another place: found wherever it lies, turned to where it is now, and computed where it is new."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from forerun.cache.pool import PagePool
from forerun.decode.draft_context import DraftContext
from forerun.models.build import build_decoder
from forerun.models.config import RopeConfig
from forerun.models.execution.runner import Runner, Span
from forerun.models.formats.checkpoint import open_checkpoint
from forerun.models.rope import RopeTable, rotate
from forerun.params import Prefill
from forerun.prefill.prefiller import Prefiller
from forerun.prefill.profile import CHUNK_DAMAGE
from forerun.prefill.recompute import RaggedDepthPass, Rows
from forerun.prefill.sources.chunk import SPAN_HEAD_TOKENS, ChunkSource
from forerun.prefill.state import PrefillStage, PrefillState
from tests import tiny
from tests.prefill.fakes import answer, drive, make_prefiller, make_profile, new_state

CPU = torch.device("cpu")
ROPES = [
    RopeConfig(),
    RopeConfig(theta=1e6, kind="linear", factor=8.0),
    RopeConfig(kind="llama3", factor=8.0, original_context=64, low_freq_factor=1.0, high_freq_factor=4.0),
    RopeConfig(kind="yarn", factor=4.0, original_context=64),
]


def words(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, tiny.VOCAB, count).tolist()


def draft_context_of(folder: Path, pages: int = 128) -> DraftContext:
    decoder, _ = build_decoder(open_checkpoint(folder), CPU, "float32", 512)
    pool = PagePool(decoder.config, pages, 8, decoder.dtype, CPU)
    return DraftContext.build(pool, Runner(decoder, pool, 512), None, 512, None)


def exact(ctx: DraftContext, tokens: list[int]) -> tuple[array[int], Tensor]:
    """Pages with a text's own K/V, and the logits of its last token."""
    pages = array("i", ctx.pool.allocate(ctx.pool.pages_for(len(tokens))))
    return pages, ctx.runner.forward([Span(tokens, 0, pages, [len(tokens) - 1])]).logits.clone()


def stored(ctx: DraftContext, pages: array[int], layer: int, entries: range) -> Tensor:
    """[2, T, Hkv, D]"""
    slots = torch.tensor([pages[e // 8] * 8 + e % 8 for e in entries])
    return torch.stack([cache[slots] for cache in ctx.runner.kv[layer]])


def drafted(
    source: ChunkSource, ctx: DraftContext, tokens: list[int], upto: int = 512, **settings: Any
) -> PrefillState:
    """A prompt that the source has read, 50 tokens at a time, on pages of its own; the last 16 are the tail."""
    pages = array("i", ctx.pool.allocate(ctx.pool.pages_for(len(tokens))))
    layers = ctx.runner.decoder.config.num_layers
    state = PrefillState(
        0, tokens, pages, 0, len(tokens) - 16, Prefill("speculative", source="chunk", **settings), layers
    )
    source.open(state)
    while (left := min(upto, len(tokens)) - state.read) > 0:
        source.read(state, min(50, left))
    return state


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope.kind)
def test_a_second_rotation_moves_heads_to_another_position(rope: RopeConfig):
    table = RopeTable(rope, 16, 5000, CPU)
    k = torch.randn(4, 2, 16, generator=torch.Generator().manual_seed(0))
    old, new = torch.tensor([0, 7, 900, 4999]), torch.tensor([4999, 3, 901, 0])
    moved = rotate(rotate(k, *table.at(old)), *table.between(old, new))
    torch.testing.assert_close(moved, rotate(k, *table.at(new)), atol=1e-5, rtol=1e-5)
    assert (moved - rotate(k, *table.at(old))).abs().max() > 0.5


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral", "gemma3"])
@pytest.mark.parametrize("chooser", ["start", "deviation"])
def test_copied_keys_are_those_of_the_new_place(family: str, chooser: str, tiny_folder: Callable[[str], Path]):
    """Layer 0 depends on no context. With a window of 8 a token of layer i depends on the 7 i tokens before it, so
    deep in a chunk every layer up to the first that sees everything (Gemma's sixth) must be what the target computes,
    its own kind of rope included."""
    ctx = draft_context_of(tiny_folder(family))
    source = ChunkSource(ctx)
    a, b = words(1, 53), words(2, 110)
    source.index.remember([*a, *b], exact(ctx, [*a, *b])[0])
    x = words(3, 29)
    state = drafted(source, ctx, [*x, *b, *words(4, 20)], chooser=chooser)
    truth, _ = exact(ctx, state.tokens)
    (match,) = state.source_state.matches
    assert (match.start, match.old) == (29, 53) and 103 <= match.count <= 107  # whole pages of [a][b]
    assert source.missing(state).tolist() == [*range(29 + SPAN_HEAD_TOKENS), *range(29 + match.count, state.end)]
    everything, copied = range(state.end), range(29, 29 + match.count)
    computed = everything if chooser == "deviation" else copied  # of layer 0, or copied, which is the same
    mine, own = stored(ctx, state.pages, 0, computed), stored(ctx, truth, 0, computed)
    torch.testing.assert_close(mine, own, atol=1e-5, rtol=1e-4)
    same = {"mistral": 4, "gemma3": 6}.get(family, 1)
    for layer in range(1, same):
        entries = range(29 + 7 * layer, 29 + match.count)
        mine, own = stored(ctx, state.pages, layer, entries), stored(ctx, truth, layer, entries)
        torch.testing.assert_close(mine, own, atol=2e-4, rtol=1e-3)
    if chooser == "deviation":  # the target's own: it ran layer 0
        mine, own = stored(ctx, state.pages, 1, everything), stored(ctx, truth, 1, everything)
        torch.testing.assert_close(mine, own, atol=2e-4, rtol=1e-3)
        assert (state.depths == 2).all()


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 100.0},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128},
        {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_layer_0_is_copied_just_as_well(rope: dict[str, Any], tmp_path: Path):
    """It depends on no context: what is copied must be what is computed, if positions and rotations are right."""
    ctx = draft_context_of(tiny.write_folder(tmp_path, "llama", rope_parameters=rope))
    source = ChunkSource(ctx)
    b = words(2, 120)
    source.index.remember([*words(1, 40), *b], exact(ctx, [*words(1, 40), *b])[0])
    prompt = [*words(3, 101), *b, *words(4, 30)]
    state = drafted(source, ctx, prompt)
    truth, _ = exact(ctx, prompt)
    mine, own = (stored(ctx, pages, 0, range(101, 221)) for pages in (state.pages, truth))
    torch.testing.assert_close(mine, own, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_recomputing_everything_is_exact_prefill(family: str, tiny_folder: Callable[[str], Path]):
    """From embeddings, and from the inputs of layer 1 that the deviation left behind."""
    ctx = draft_context_of(tiny_folder(family))
    source = ChunkSource(ctx)
    b = words(2, 120)
    source.index.remember([*words(1, 40), *b], exact(ctx, [*words(1, 40), *b])[0])
    for chooser, first in (("start", 0), ("deviation", 1)):
        state = drafted(source, ctx, [*words(3, 30), *b], chooser=chooser)
        end, layers = state.end, state.layers
        x = None if first == 0 else state.x
        rows = Rows(np.array(state.tokens[:end]), np.arange(end), state.pages, np.full(end, layers), x=x, first=first)
        RaggedDepthPass(ctx.runner).run(rows)
        tail = Span(state.tokens[end:], end, state.pages, [len(state.tokens) - end - 1])
        logits = ctx.runner.forward([tail]).logits
        torch.testing.assert_close(logits, exact(ctx, state.tokens)[1], atol=2e-4, rtol=1e-3)


def test_reuse_with_the_start_recomputed_is_nearer_than_without(tiny_folder: Callable[[str], Path]):
    """A short window: what the first tokens of a chunk saw before is all that is wrong with it."""
    ctx = draft_context_of(tiny_folder("mistral"))
    source = ChunkSource(ctx)
    b = words(2, 120)
    source.index.remember([*words(1, 40), *b], exact(ctx, [*words(1, 40), *b])[0])
    prompt = [*words(3, 30), *b]
    truth, _ = exact(ctx, prompt)
    errors = []
    for count in (0, 10, 30):
        state = drafted(source, ctx, prompt, chooser="start")
        scores = source.scores(state)
        assert scores is not None and len(scores) == len(prompt)
        chosen = np.union1d(source.missing(state), np.argsort(-scores[: state.end], kind="stable")[:count])
        rows = Rows(np.array(prompt)[chosen], chosen, state.pages, np.full(len(chosen), state.layers))
        RaggedDepthPass(ctx.runner).run(rows)
        entries = range(30, state.end)
        errors.append(float((stored(ctx, state.pages, 3, entries) - stored(ctx, truth, 3, entries)).norm()))
    assert errors[0] > errors[1] > errors[2] and errors[2] < 1e-3, errors


def test_deviation_points_to_where_the_context_is_missed(tiny_folder: Callable[[str], Path]):
    ctx = draft_context_of(tiny_folder("mistral"))
    source = ChunkSource(ctx)
    b = words(2, 120)
    source.index.remember([*words(1, 40), *b], exact(ctx, [*words(1, 40), *b])[0])
    state = drafted(source, ctx, [*words(3, 30), *b], chooser="deviation")
    scores = source.scores(state)
    assert scores is not None and set(np.flatnonzero(scores > 1e-3)) == set(range(30, 37))  # the window less one
    state.settings = Prefill("speculative", chooser="draft")
    assert source.scores(state) is None


def test_pages_are_kept_while_they_are_used_and_given_back(tiny_folder: Callable[[str], Path]):
    ctx = draft_context_of(tiny_folder("qwen2"))
    pool, source = ctx.pool, ChunkSource(ctx)
    b = words(2, 120)
    pages, _ = exact(ctx, b)
    source.index.remember(b, pages)
    pool.release(pages)
    assert pool.used == source.index.num_pages == 15
    prompt = [*words(3, 30), *b]
    undisturbed = drafted(source, ctx, prompt)
    source.finish(undisturbed)

    state = drafted(source, ctx, prompt, upto=60)
    held = 13  # entries 4 to 103 of b are copied
    assert source.index.release(1000) == 15 and pool.used == held + 2 * 19  # room is needed between two steps
    for page in pool.allocate(pool.free):
        for cache in (cache for layer in ctx.runner.kv for cache in layer):
            cache[page * 8 : page * 8 + 8] = 99.0
    source.read(state, 200)
    for layer in range(state.layers):
        mine, other = (stored(ctx, j.pages, layer, range(34, state.end)) for j in (state, undisturbed))
        torch.testing.assert_close(mine, other)
    assert pool.free == 0
    source.finish(state)
    source.finish(state)
    assert pool.free == held and source.index.release(5) == 0


@pytest.mark.parametrize(("chooser", "right"), [("start", 3), ("deviation", 1), ("random", 0)])
def test_a_whole_prompt_from_plan_to_repair(chooser: str, right: int, tiny_folder: Callable[[str], Path]):
    """The window is short, so a chunk is wrong at its start only, more so in upper layers. The deviation
    knows layer 1, and probability knows nothing."""
    ctx = draft_context_of(tiny_folder("mistral"))
    source = ChunkSource(ctx)
    b = words(2, 150)
    pages, _ = exact(ctx, [*words(1, 40), *b])
    source.index.remember([*words(1, 40), *b], pages)
    ctx.pool.release(pages)
    prompt = [*words(3, 30), *b[:140], *words(4, 20)]
    prefiller = make_prefiller(ctx, source, make_profile("chunk", share=0.3))
    own = array("i", ctx.pool.allocate(24))
    state = prefiller.open(new_state(prefiller, prompt, own, Prefill("speculative", source="chunk", chooser=chooser)))
    drive(prefiller, state, budget=40)
    assert state.stage is PrefillStage.DONE, state.report
    assert not set(source.missing(state)) - set(np.flatnonzero(state.depths == state.layers))
    prefiller.close(state)
    assert ctx.pool.used == 24 + source.index.num_pages
    truth, logits = exact(ctx, prompt)
    apart = [
        float((stored(ctx, state.pages, i, range(state.end)) - stored(ctx, truth, i, range(state.end))).abs().max())
        for i in range(state.layers)
    ]
    assert max(apart[: right + 1]) < 1e-3 and (apart[3] < 1e-3) == (right == 3), apart
    if right == 3:
        torch.testing.assert_close(answer(ctx, state), logits, atol=2e-4, rtol=1e-3)


def edited(
    ctx: DraftContext, source: ChunkSource, spoil: float = 0.0, found: float = 0.0
) -> tuple[Prefiller, PrefillState]:
    """A prompt met before under another first line, drafted to its end; `spoil`: noise in what is remembered of it,
    `found`: what lies in its own pages at first. The models' profile is of another source, whose thresholds no copied
    K/V passes."""
    body, zeros = words(2, 180), {"key": [0.0] * 4, "value": [0.0] * 4, "attention": [1.0] * 4}
    old = [*words(1, 40), *body]
    pages, _ = exact(ctx, old)
    for cache in (cache for layer in ctx.runner.kv for cache in layer):
        slots = torch.tensor([page * 8 + i for page in pages for i in range(8)])
        noise = torch.randn(cache[slots].shape, generator=torch.Generator().manual_seed(5)) * cache[slots].std()
        cache[slots] += spoil * noise
    source.index.remember(old, pages)
    ctx.pool.release(pages)
    prompt = [*words(3, 30), *body[:170], *words(4, 20)]
    prefiller = make_prefiller(ctx, source, make_profile("self", thresholds=zeros))
    own = array("i", ctx.pool.allocate(ctx.pool.pages_for(len(prompt))))
    for page in own:
        for cache in (cache for layer in ctx.runner.kv for cache in layer):
            cache[page * 8 : page * 8 + 8] = found
    state = prefiller.open(new_state(prefiller, prompt, own, Prefill("speculative", source="chunk")))
    return prefiller, drive(prefiller, state, budget=60)


def test_what_lay_in_the_pages_before_is_not_seen(tiny_folder: Callable[[str], Path]):
    """New tokens are computed before anything after them attends to them."""
    ctx = draft_context_of(tiny_folder("qwen2"))
    (_, clean), (_, other) = (edited(ctx, ChunkSource(ctx), found=value) for value in (0.0, 50.0))
    for layer in range(clean.layers):
        mine, own = (stored(ctx, state.pages, layer, range(state.end)) for state in (other, clean))
        torch.testing.assert_close(mine, own)
    torch.testing.assert_close(answer(ctx, other), answer(ctx, clean))


def source_cost(state: PrefillState) -> float:
    return state.source.cost(len(state.tokens))


def test_a_changed_first_line_needs_no_ranking(tiny_folder: Callable[[str], Path]):
    """The first round computes what has no copy, the first tokens of the span and the check spans, and nothing else;
    the tail runs once."""
    ctx = draft_context_of(tiny_folder("mistral"))
    prefiller, state = edited(ctx, ChunkSource(ctx))
    policy, report = prefiller.policy, state.report
    must = len(state.source.missing(state))
    assert state.stage is PrefillStage.DONE and report.rounds == 1 and state.attention is None
    assert int((state.depths == state.layers).sum()) == must + policy.spans * policy.span
    assert report.token_layers == (must + policy.spans * policy.span + policy.tail) * state.layers
    assert report.cost * len(state.tokens) == pytest.approx(
        report.token_layers / state.layers + source_cost(state) + state.costs.checks(policy.spans * policy.span)
    )


def test_a_changed_first_line_is_accepted_by_the_damage_that_is_predicted(tiny_folder: Callable[[str], Path]):
    ctx = draft_context_of(tiny_folder("mistral"))
    source = ChunkSource(ctx)
    prefiller, state = edited(ctx, source)
    report = state.report
    assert state.stage is PrefillStage.DONE, report
    assert report.rounds == 1 and report.predicted_kl is not None and report.predicted_kl < CHUNK_DAMAGE.max_kl
    assert report.cost < 1.0 and report.recomputed < report.drafted and all(span["passed"] for span in report.spans)
    assert state.filled == len(state.tokens) - 1 and state.tail_ran  # with the first round
    prefiller.close(state)


def test_copied_kv_that_would_change_the_answer_is_not_accepted(tiny_folder: Callable[[str], Path]):
    """What is remembered is spoilt: the prediction grows with the damage, more is recomputed, and then all of it."""
    ctx = draft_context_of(tiny_folder("llama"))
    _, clean = edited(ctx, ChunkSource(ctx))
    _, spoilt = edited(ctx, ChunkSource(ctx), spoil=2.0)
    assert clean.report.predicted_kl is not None and spoilt.report.predicted_kl is not None
    assert spoilt.report.spans[0]["value"] > clean.report.spans[0]["value"]
    assert spoilt.report.spans[0]["passed"] is False
    assert spoilt.stage is PrefillStage.EXACT and "predicted KL" in spoilt.report.fell_back
    assert 1.0 < spoilt.report.cost < 2.0
