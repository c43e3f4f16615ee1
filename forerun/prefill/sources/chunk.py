"""K/V of the same text at another position of an earlier prompt: copied from there, K rotated to its new positions.

A copied span attended to another context, so its K/V is approximate above layer 0, most of all at its start; entries
that are new have no K/V at all until the target computes them (`missing`). `ChunkIndex` finds the spans and holds
their pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forerun.cache.pool import slots_of
from forerun.core.batch import send
from forerun.decode.draft_context import DraftContext
from forerun.models.rope import rotate
from forerun.prefill.recompute import COPIED_BASE, RaggedDepthPass, Rows
from forerun.prefill.sources import KVSource
from forerun.prefill.sources.chunk_index import ChunkIndex, ChunkMatch
from forerun.prefill.state import PrefillState

# of an entry, in tokens of the target's prefill: 0.7 of a prompt's 9 ms at 8,192 tokens, where exact prefill takes 47
# (one H200)
COPY_COST = 0.005
SPAN_HEAD_TOKENS = 8  # first entries of every span, always recomputed: their context differs most


@dataclass
class _Reuse:
    """What of one prompt is copied from where."""

    matches: list[ChunkMatch]
    pages: list[int]  # referenced until the prompt is done
    first: int  # entries before it have K/V already
    copied: np.ndarray  # [end] bool: entries that have a copy
    deviation: np.ndarray  # [2, end] distance of the copied K and V of layer 1 from the target's own
    norm: np.ndarray  # [2, end] of the target's own


class ChunkSource(KVSource):
    """The first tokens of every span are recomputed, and those that a chooser selects. Choosers of its own: `start`
    (more of each span's beginning) and `deviation` (CacheBlend's: the target runs layer 0 over everything, and tokens
    whose K/V of layer 1 differs most are recomputed)."""

    name = "chunk"
    base = COPIED_BASE
    leaves_gaps = True
    min_length_scale = 1 / 3

    def __init__(self, ctx: DraftContext) -> None:
        self._runner, self._pool = ctx.runner, ctx.pool
        self._decoder = ctx.runner.decoder
        self._ragged_pass = RaggedDepthPass(ctx.runner)
        self.index = self.text_index = ChunkIndex(ctx.pool, ctx.pool.num_pages // 2)

    def open(self, state: PrefillState) -> None:
        first = max(state.first, state.known)
        matches = self.index.find(state.tokens, first, state.end)
        size = self._pool.page_size
        pages = sorted({page for match in matches for page in _pages_of(match.slots, size)})
        self._pool.retain(pages)
        copied = np.zeros(state.end, dtype=bool)
        for match in matches:
            copied[match.start : match.start + match.count] = True
        state.source_state = _Reuse(matches, pages, first, copied, *np.zeros((2, 2, state.end), dtype=np.float32))
        state.read, state.copied = max(state.read, state.first), not self._by_deviation(state)

    @torch.inference_mode()
    def read(self, state: PrefillState, count: int) -> None:
        """Copies of all layers where there are any: layer 0 depends on no context, so that its copy is what the target
        would compute. What has no copy keeps what lies in its pages until it is computed, before anything after it
        attends to it. The deviation is measured by running layer 0."""
        lo, hi = state.read, min(state.read + count, state.end)
        state.read += count
        if lo >= hi:
            return
        by_deviation = self._by_deviation(state)
        self._copy(state, lo, hi, self.base if by_deviation else 0)
        if by_deviation:
            self._measure_deviation(state, lo, hi)
        else:
            state.depths[lo:hi] = np.maximum(state.depths[lo:hi], 1)

    def cost(self, tokens: int) -> float:
        return tokens * COPY_COST

    def finish(self, state: PrefillState) -> None:
        if isinstance(state.source_state, _Reuse):
            self._pool.release(state.source_state.pages)
            state.source_state = None

    def missing(self, state: PrefillState) -> np.ndarray:
        """New entries, and the first of each span."""
        return np.flatnonzero(self._uncopied(state, SPAN_HEAD_TOKENS))

    @staticmethod
    def _uncopied(state: PrefillState, head: int = 0) -> np.ndarray:
        """[end] whether an entry has no copy, or is among the first `head` of a span."""
        reuse: _Reuse = state.source_state
        uncopied = ~reuse.copied
        for match in reuse.matches:
            uncopied[match.start : match.start + min(head, match.count)] = True
        uncopied[: reuse.first] = False
        return uncopied

    def scores(self, state: PrefillState) -> np.ndarray | None:
        """By the chooser that the request names; None for one of other sources."""
        scores = np.zeros(len(state.tokens), dtype=np.float32)
        if state.settings.chooser == "start":
            for match in state.source_state.matches:
                scores[match.start : match.start + match.count] = 1.0 / np.arange(1, match.count + 1)
            return scores
        if not self._by_deviation(state):
            return None
        reuse, read = state.source_state, slice(state.first, state.end)
        mean = reuse.norm[:, read].mean(1, keepdims=True)  # K and V count alike
        scores[read] = (reuse.deviation[:, read] / np.maximum(mean, 1e-6)).sum(0)
        scores[: state.end][self._uncopied(state)] = 0.0  # no copy there that could differ
        return scores

    # -- its parts -----------------------------------------------------------------------------------------------------

    @staticmethod
    def _by_deviation(state: PrefillState) -> bool:
        return state.settings.chooser == "deviation"

    @staticmethod
    def _rows(state: PrefillState, lo: int, hi: int, depth: int) -> Rows:
        return Rows(state.ids[lo:hi], np.arange(lo, hi), state.pages, np.full(hi - lo, depth))

    def _measure_deviation(self, state: PrefillState, lo: int, hi: int) -> None:
        """Run layer 0 and compare its K/V of layer 1 with the copies, which it replaces, being more accurate."""
        slots = self._slots(state, lo, hi)
        old = self._stored(slots)
        recomputed = self._ragged_pass.run(self._rows(state, lo, hi, 2), keep=1)
        new = self._stored(slots)
        state.source_state.deviation[:, lo:hi] = (old - new).norm(dim=-1).cpu().numpy()
        state.source_state.norm[:, lo:hi] = new.norm(dim=-1).cpu().numpy()
        assert recomputed.x is not None
        state.spent += (hi - lo) / self._decoder.config.num_layers
        state.x = recomputed.x if state.x is None else torch.cat((state.x, recomputed.x))
        state.depths[lo:hi] = np.maximum(state.depths[lo:hi], 2)

    def _stored(self, slots: Tensor) -> Tensor:
        """K and V of layer 1 as they are now: [2, T, Hkv * D]."""
        return torch.stack([cache.index_select(0, slots).flatten(1).float() for cache in self._runner.kv[1]])

    def _slots(self, state: PrefillState, lo: int, hi: int) -> Tensor:
        return torch.from_numpy(slots_of(state.pages, lo, hi, self._pool.page_size)).to(self._decoder.device)

    def _copy(self, state: PrefillState, lo: int, hi: int, base: int) -> None:
        """Entries lo .. hi as far as they have copies, the layers from `base` on: what lies in the pool at once."""
        size, reuse = self._pool.page_size, state.source_state
        slots, places = slots_of(state.pages, lo, hi, size), []
        for match in reuse.matches:
            first, end = max(lo, match.start), min(hi, match.start + match.count)
            if first >= end:
                continue
            if match.stored:
                self._copy_stored(state, match, first, end, base)
                continue
            new = np.arange(first, end)
            source = match.slots[first - match.start : end - match.start]
            places.append(np.stack((source, slots[first - lo : end - lo], new + (match.old - match.start), new)))
        if places:
            joined = places[0] if len(places) == 1 else np.concatenate(places, 1)
            self._runner.all_layers_kv.move(base, send(joined, self._decoder.device))

    def _copy_stored(self, state: PrefillState, match: ChunkMatch, lo: int, hi: int, base: int) -> None:
        """Entries lo .. hi of a match that lies in tiers."""
        assert self.index.tiers is not None
        device, size = self._decoder.device, self._pool.page_size
        at, end = (match.old % size + n - match.start for n in (lo, hi))  # entries from the first stored page on
        stored = self.index.tiers.read(match.stored[at // size : -(-end // size)])  # [n, L, 2, page, Hkv, D]
        held = min(end, (at // size + len(stored)) * size) - at
        state.source_state.copied[lo + max(0, held) : hi] = False  # gone since it was found
        hi = lo + max(0, held)
        if lo >= hi:
            return
        source = torch.arange(at % size, at % size + hi - lo, device=device)
        target, new = self._slots(state, lo, hi), torch.arange(lo, hi, device=device)
        old = new + (match.old - match.start)
        rotations = {rope: table.between(old, new) for rope, table in self._decoder.attention.ropes.items()}
        for i in range(base, self._decoder.config.num_layers):
            k, v = self._runner.kv[i]
            old_k, old_v = (stored[:, i, part].flatten(0, 1) for part in (0, 1))
            rotation = rotations[self._decoder.config.layer_ropes[i]]
            k.index_copy_(0, target, rotate(old_k.index_select(0, source), *rotation))
            v.index_copy_(0, target, old_v.index_select(0, source))


def _pages_of(slots: np.ndarray, size: int) -> list[int]:
    """The pages of slots that go through one page after the other."""
    pages = slots // size
    return pages[np.flatnonzero(np.diff(pages, prepend=-1))].tolist()
