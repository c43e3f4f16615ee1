"""A source that writes what a test wants: the target's own K/V, noise, or one with the other in places."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.cache.pool import PagePool
from forerun.decode.draft_context import DraftContext
from forerun.models.build import build_decoder
from forerun.models.execution.runner import Runner, Span
from forerun.models.formats.checkpoint import open_checkpoint
from forerun.params import Prefill
from forerun.prefill.maps import Maps
from forerun.prefill.plan import Policy
from forerun.prefill.prefiller import Prefiller
from forerun.prefill.profile import Profile
from forerun.prefill.recompute import RaggedDepthPass, Rows
from forerun.prefill.sources import KVSource
from forerun.prefill.state import PrefillState

CPU = torch.device("cpu")
PAGE = 8
IDS = np.random.default_rng(5).integers(3, 400, 203).tolist()
POLICY = Policy(first=16, tail=12, shortest=64, spans=4, span=8)
END = len(IDS) - POLICY.tail
SETTINGS = Prefill("speculative")
BY_SOURCE = Prefill("speculative", chooser="draft")  # scores that cost nothing beyond the reading
STRICT = {"key": [0.01] * 4, "attention": [0.999] * 4}  # what only good K/V passes


def make_draft_context(folder: Path) -> DraftContext:
    decoder, _ = build_decoder(open_checkpoint(folder), CPU, "float32", 256, quiet=True)
    pool = PagePool(decoder.config, 256, PAGE, decoder.dtype, CPU)
    return DraftContext(pool, Runner(decoder, pool, 256), None, 256)


def make_profile(kind: str = "draft", share: float = 0.1, **about: Any) -> Profile:
    maps = Maps((0,), 1, *(torch.zeros(1, 1) for _ in range(6)))
    return Profile(kind, "target", "source", {"target": "T", "source": "S"}, maps, 0.2, share, **about)


def own_pages(ctx: DraftContext, tokens: int = len(IDS)) -> array[int]:
    """Neither in order nor side by side."""
    pages = ctx.pool.allocate(2 * ctx.pool.pages_for(tokens))
    return array("i", pages[1::2][::-1])


def exact_kv(ctx: DraftContext, ids: Sequence[int] = IDS) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """K/V of every layer [T, Hkv, D], and the last token's logits, from pages that are given back."""
    pages = array("i", ctx.pool.allocate(ctx.pool.pages_for(len(ids))))
    logits = ctx.runner.forward([Span(list(ids), 0, pages, (len(ids) - 1,))]).logits.clone()
    found = stored(ctx, pages, 0, len(ids))
    ctx.pool.release(pages)
    return found, logits


def stored(ctx: DraftContext, pages: array[int], first: int, end: int) -> list[tuple[Tensor, Tensor]]:
    at = slots(pages, np.arange(first, end))
    return [(k[at].clone(), v[at].clone()) for k, v in ctx.pool.kv]


def slots(pages: array[int], entries: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(pages, dtype=np.int64)[entries // PAGE] * PAGE + entries % PAGE)


def answer(ctx: DraftContext, state: PrefillState) -> Tensor:
    """What the engine does in the end: the tail, and the logits behind it."""
    tail = state.tokens[state.end :]
    return ctx.runner.forward([Span(tail, state.end, state.pages, (len(tail) - 1,))]).logits.clone()


class Fake(KVSource):
    """`bad`: the share of noise in the K/V of entries within these bounds; everything else is the target's own."""

    def __init__(
        self,
        ctx: DraftContext,
        bad: tuple[int, int] = (0, 0),
        noise: float = 1.0,
        price: float = 0.2,
        base: int = 1,
    ) -> None:
        self.name, self.base = "draft", base
        self._ctx, self._price, self._ragged_pass = (
            ctx,
            price,
            RaggedDepthPass(ctx.runner),
        )
        self._kv, _ = exact_kv(ctx)
        rng = torch.Generator().manual_seed(7)
        mixed = slice(*bad)
        for pair in self._kv[base:]:
            for cache in pair:
                other = torch.randn(cache[mixed].shape, generator=rng) * cache.std()
                cache[mixed] = cache[mixed] * (1 - noise) + other * noise
        self.read_entries: list[int] = []
        self.finished = 0

    def read(self, state: PrefillState, count: int) -> None:
        lo, hi = state.read, state.read + count
        first, end = max(lo, state.first, state.known), min(hi, state.end)
        self.read_entries += range(first, end)
        if first < end:
            ids = np.array(state.tokens[first:end])
            depths = np.full(end - first, self.base)
            self._ragged_pass.run(Rows(ids, np.arange(first, end), state.pages, depths))
            at = slots(state.pages, np.arange(first, end))
            for layer in range(self.base, state.layers):
                for cache, mine in zip(self._ctx.pool.kv[layer], self._kv[layer], strict=True):
                    cache[at] = mine[first:end]
        state.read = hi

    def cost(self, tokens: int) -> float:
        return self._price * tokens

    def finish(self, state: PrefillState) -> None:
        self.finished += 1

    def scores(self, state: PrefillState) -> np.ndarray | None:
        return np.random.default_rng(3).random(len(state.tokens))


def make_prefiller(ctx: DraftContext, source: KVSource, profile: Profile | None = None, **about: Any) -> Prefiller:
    policy = about.pop("policy", POLICY)
    return Prefiller(ctx, profile or make_profile(**about), policy, lambda *_: source)


def drive(prefiller: Prefiller, state: PrefillState, budget: int = 4096) -> PrefillState:
    while not state.finished:
        assert prefiller.advance(state, budget) >= 1
    return state


def new_state(
    prefiller: Prefiller, ids: Sequence[int], pages: array[int], settings: Prefill = SETTINGS, first: int = 0
) -> PrefillState:
    return PrefillState(1, ids, pages, first, len(ids), settings, prefiller._config.num_layers)


def start(prefiller: Prefiller, ctx: DraftContext, settings: Prefill = SETTINGS, first: int = 0) -> PrefillState:
    pages = own_pages(ctx)
    if first:
        ctx.runner.forward([Span(IDS[:first], 0, pages, ())])
    return prefiller.open(new_state(prefiller, IDS, pages, settings, first))


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())
