"""K/V of the same text met before at another place: copied from there, K turned to its new positions.

What a copied span saw before it is not what comes before it now, so its K/V is approximate above layer 0, most of all
at its start; entries that were never met have no K/V at all until the target computes them (`missing`). `Texts` finds
the spans and keeps their pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forerun.decode.draft_context import DraftContext
from forerun.models.rope import rotate
from forerun.prefill.attention_scores import slots_of
from forerun.prefill.depth import RaggedDepthPass, Rows
from forerun.prefill.sources.base import KVSource
from forerun.prefill.sources.chunk_index import ChunkIndex, ChunkMatch
from forerun.prefill.state import PrefillState

COPY = 0.005  # copying an entry, in tokens of the target's prefill
HEAD = 8  # first entries of every span that are recomputed whatever the chooser says: what they saw is most amiss


@dataclass
class _Reuse:
    """What of one prompt is copied from where."""

    matches: list[ChunkMatch]
    pages: list[int]  # referenced until the prompt is done
    first: int  # entries before it need nothing
    apart: np.ndarray  # [2, end] distance of the copied K and V of layer 1 from the target's own
    size: np.ndarray  # [2, end] norms of the latter


class ChunkSource(KVSource):
    """The first tokens of every span are recomputed, and what a chooser says: by default what the question looks at.
    Choosers of its own: `start` (more of each span's beginning) and `deviation` (CacheBlend's: the target runs its
    layer 0 over everything, and what its K/V of layer 1 differs most in is recomputed)."""

    name = "chunk"
    base = 1
    start = 1 / 3

    def __init__(self, ctx: DraftContext, most_pages: int | None = None) -> None:
        self._runner, self._pool = ctx.runner, ctx.pool
        self._decoder = ctx.runner.decoder
        self._ragged_pass = RaggedDepthPass(ctx.runner)
        self.texts = ChunkIndex(ctx.pool, ctx.pool.num_pages // 2 if most_pages is None else most_pages)

    # -- what was met before -------------------------------------------------------------------------------------------

    def remember(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """A prompt whose K/V on these pages is exact; the pages are kept until `release` or more recent texts."""
        self.texts.remember(tokens, pages)

    def release(self, count: int) -> int:
        """Give up references on up to `count` pages; returns on how many. Others may still hold the pages."""
        return self.texts.release(count)

    def clear(self) -> None:
        self.texts.release(self.texts.num_pages)

    # -- the contract --------------------------------------------------------------------------------------------------

    def open(self, state: PrefillState) -> None:
        first = max(state.first, state.known)
        matches = self.texts.find(state.tokens, first, state.end)
        size = self._pool.page_size
        pages = sorted({int(page) for match in matches for page in np.unique(match.slots // size)})
        self._pool.retain(pages)
        state.source_state = _Reuse(matches, pages, first, *np.zeros((2, 2, state.end), dtype=np.float32))
        state.read = max(state.read, state.first)

    @torch.inference_mode()
    def read(self, state: PrefillState, count: int) -> None:
        """Layer 0 of every entry, and the layers above where there is something to copy."""
        reuse: _Reuse = state.source_state
        lo, hi = state.read, min(state.read + count, state.end)
        state.read += count
        if lo >= hi:
            return
        for match in reuse.matches:
            self._copy(state, match, max(lo, match.start), min(hi, match.start + match.count))
        self._blank(state, lo, hi)
        if self._deviates(state):
            self._compare(state, lo, hi)
        else:
            self._ragged_pass.run(self._rows(state, lo, hi, 1))
            state.depths[lo:hi] = np.maximum(state.depths[lo:hi], 1)

    def cost(self, tokens: int) -> float:
        """With the one layer that `deviation` runs."""
        return tokens * (COPY + 1.0 / self._decoder.config.num_layers)

    def finish(self, state: PrefillState) -> None:
        if isinstance(state.source_state, _Reuse):
            self._pool.release(state.source_state.pages)
            state.source_state = None

    def missing(self, state: PrefillState) -> np.ndarray:
        """Entries before state.end that the target must run through all layers: what was never met before, and the
        first
        ones of each span."""
        return np.flatnonzero(self._bare(state, HEAD))

    @staticmethod
    def _bare(state: PrefillState, head: int = 0) -> np.ndarray:
        """[end] whether an entry has nothing to be copied, or is among the first `head` of a span."""
        reuse: _Reuse = state.source_state
        bare = np.ones(state.end, dtype=bool)
        bare[: reuse.first] = False
        for match in reuse.matches:
            bare[match.start + head : match.start + match.count] = False
        return bare

    def scores(self, state: PrefillState) -> np.ndarray | None:
        """By the chooser that the request names; None for one that is not this source's."""
        scores = np.zeros(len(state.tokens), dtype=np.float32)
        if state.settings.chooser == "start":
            for match in state.source_state.matches:
                scores[match.start : match.start + match.count] = 1.0 / np.arange(1, match.count + 1)
            return scores
        if not self._deviates(state):
            return None
        reuse, read = state.source_state, slice(state.first, state.end)
        mean = reuse.size[:, read].mean(1, keepdims=True)  # K and V count alike
        scores[read] = (reuse.apart[:, read] / np.maximum(mean, 1e-6)).sum(0)
        scores[: state.end][self._bare(state)] = 0.0  # nothing was copied there that could differ
        return scores

    # -- its parts -----------------------------------------------------------------------------------------------------

    @staticmethod
    def _deviates(state: PrefillState) -> bool:
        return state.settings.chooser == "deviation"

    @staticmethod
    def _rows(state: PrefillState, lo: int, hi: int, depth: int) -> Rows:
        return Rows(state.ids[lo:hi], np.arange(lo, hi), state.pages, np.full(hi - lo, depth))

    def _compare(self, state: PrefillState, lo: int, hi: int) -> None:
        """Run layer 0 and see how its K/V of layer 1 differs from what lay there; it stays, being the better one."""
        slots = self._slots(state, lo, hi)
        old = self._stored(slots)
        recomputed = self._ragged_pass.run(self._rows(state, lo, hi, 2), keep=1)
        new = self._stored(slots)
        state.source_state.apart[:, lo:hi] = (old - new).norm(dim=-1).cpu().numpy()
        state.source_state.size[:, lo:hi] = new.norm(dim=-1).cpu().numpy()
        assert recomputed.x is not None
        state.x = recomputed.x if state.x is None else torch.cat((state.x, recomputed.x))
        state.depths[lo:hi] = np.maximum(state.depths[lo:hi], 2)

    def _stored(self, slots: Tensor) -> Tensor:
        """K and V of layer 1 as they are now: [2, T, Hkv * D]."""
        return torch.stack([cache.index_select(0, slots).flatten(1).float() for cache in self._runner.kv[1]])

    def _slots(self, state: PrefillState, lo: int, hi: int) -> Tensor:
        return torch.from_numpy(slots_of(state.pages, lo, hi, self._pool.page_size)).to(self._decoder.device)

    def _copy(self, state: PrefillState, match: ChunkMatch, lo: int, hi: int) -> None:
        """Entries lo .. hi of a match, all layers above the first."""
        if lo >= hi:
            return
        device, attention = self._decoder.device, self._decoder.attention
        source = torch.from_numpy(match.slots[lo - match.start : hi - match.start]).to(device)
        target = self._slots(state, lo, hi)
        new = torch.arange(lo, hi, device=device)
        old = new + (match.old - match.start)
        turns = {rope: table.between(old, new) for rope, table in attention.ropes.items()}
        for i in range(self.base, self._decoder.config.num_layers):
            k, v = self._runner.kv[i]
            k.index_copy_(0, target, rotate(k.index_select(0, source), *turns[self._decoder.config.layer_ropes[i]]))
            v.index_copy_(0, target, v.index_select(0, source))

    def _blank(self, state: PrefillState, lo: int, hi: int) -> None:
        """Zeros where nothing was met: whoever looks before these are computed must not see another prompt's rest."""
        mine = torch.from_numpy(np.flatnonzero(self._bare(state)[lo:hi])).to(self._decoder.device)
        slots = self._slots(state, lo, hi)[mine]
        for layer in self._runner.kv[self.base :]:
            for cache in layer:
                cache.index_fill_(0, slots, 0.0)
