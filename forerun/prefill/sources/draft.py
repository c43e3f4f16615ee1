"""A smaller model with the target's tokenizer reads the prompt; its hidden states are mapped to the target's K/V.

It runs no further than the highest layer the maps read. Its own K/V stays on its plane of the prompt's pages, where
drafters of the answer continue from. On request it collects the attention of the prompt's tail.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from forerun.cache.pool import PartialForward
from forerun.decode.draft_context import DraftContext
from forerun.models.decoder import Watch
from forerun.models.execution.float8_mlp import float8_decoder
from forerun.models.execution.runner import Span
from forerun.prefill.maps import KVWriter, ReadChunk, tail_attention_for
from forerun.prefill.profile import Profile, require_profile
from forerun.prefill.recompute import RaggedDepthPass, Rows
from forerun.prefill.sources import KVSource
from forerun.prefill.state import PrefillState

WIDE_LAYERS = 2  # lowest layers of a draft, which see all of a long prompt


@dataclass
class _Reading:
    start: int  # first entry that is read
    need: int  # entries from here to the tail get mapped K/V
    kept: list[Tensor] = field(default_factory=list)  # what came out of the highest layer that was run, chunk by chunk


class DraftSource(KVSource):
    name = "draft"
    # whether prompts may be read in float8 or with attention in bfloat16, where the device can: the result is a draft
    float8 = True
    # entries that layers above the lowest two see back at least while they read a prompt longer than that; 0: all.
    # 2,048 saved 9.5 of 65 ms at 16,384 tokens (H200, the pair) and took KL from 0.027 to 0.041, so that only studies
    # set it. Since then a GPU reads in blocks, which see up to twice as far back: not judged yet
    window = 0

    def __init__(self, ctx: DraftContext, profile: Profile) -> None:
        require_profile(profile, self.name)
        if (problem := ctx.draft_problem(f"the source {self.name!r}", through_text=False)) is not None:
            raise problem
        assert ctx.draft is not None and ctx.draft_runner is not None and ctx.draft_kv is not None
        self._pool, self._draft_kv, self._runner = ctx.pool, ctx.draft_kv, ctx.draft_runner
        self._writer = KVWriter(ctx.runner, ctx.draft.decoder, profile.maps, self.float8)
        self.base = profile.maps.base
        self._cost = profile.source_cost + self._writer.cost
        self._taps, self._top = profile.maps.taps, max(max(profile.maps.taps), 1)
        decoder, self._on_cpu = ctx.draft.decoder, ctx.draft.decoder.device.type == "cpu"
        self.leaves_tail = self._on_cpu  # a drafter of the answer reads on
        self._layers = decoder.config.num_layers
        # a float8 copy for reading alone: drafters of answers, and reading to the last layer, use the decoder itself
        partly = self._top < self._layers
        self._reader = decoder
        if self.float8 and partly:
            self._reader = replace(float8_decoder(decoder, self._top), attention=decoder.attention.for_drafts())
        self._ragged_pass = RaggedDepthPass(self._runner, self._reader)
        self.narrow(self.window)
        self.max_tokens = min(ctx.max_context, ctx.draft.decoder.config.max_context)

    def narrow(self, window: int, wide: int = WIDE_LAYERS) -> None:
        """From now on long prompts are read with this window, but in so many of the lowest layers."""
        reader, self.window = self._reader, window
        self._seen = reader.attention.narrowed(window, wide) if window else reader.attention
        self._narrow_pass = RaggedDepthPass(self._runner, replace(reader, attention=self._seen))

    def prepare(self, least: int, most: int) -> None:
        self._seen.prepare_prompts(self._runner.kv[0], most, least)

    def cost(self, tokens: int) -> float:
        return self._cost * tokens

    def open(self, state: PrefillState) -> None:
        """Starts at what the draft has not read yet, or earlier: its K/V is kept, its hidden states are not."""
        need = max(state.first, state.known)
        state.read = min(self._read_entries(state), need, state.end)
        state.source_state = _Reading(state.read, need)
        state.tail_attention = tail_attention_for(state, "draft", self._runner)

    def read(self, state: PrefillState, count: int) -> None:
        piece = ReadChunk(state, min(count, state.read_end - state.read), state.source_state.need, self._taps)
        if piece.lo < piece.hi:
            with self._runner.host_threads():
                self._run(state, piece.lo, piece.hi, piece.watch)
            self._mark_read(state, piece.lo, piece.hi)
        if piece.first < piece.end:
            self._writer.ragged_pass.run(self._writer.rows(state, piece.first, piece.end))
            with self._runner.host_threads():  # the maps are held as the draft is
                self._writer.write(state, [piece.hidden[tap] for tap in self._taps], piece.first, piece.end)
        state.read = piece.hi

    def _run(self, state: PrefillState, lo: int, hi: int, watch: Watch) -> None:
        """These entries through the draft's layers that the maps read."""
        if self._top == self._layers:
            self._runner.forward([Span(state.ids[lo:hi].tolist(), lo, state.pages, ())], watch=watch)
            return
        sent = state.sent(self._runner.decoder.device)[lo:hi]
        rows = Rows(state.ids[lo:hi], np.arange(lo, hi), state.pages, np.full(hi - lo, self._top), sent=sent)
        long = len(state.tokens) > self.window > 0  # of all its parts: what is read first must not see more
        reading = self._narrow_pass if long else self._ragged_pass
        if self._on_cpu and state.tail_attention is None:  # nothing is to be seen inside of layers
            out = reading.run(rows, keep=self._top, taps=self._taps)
            for layer, x in out.taps.items():
                watch(layer, x, None, None)
        else:
            out = reading.run(rows, watch, keep=self._top)
        kept = out.x
        assert kept is not None
        watch(self._top, kept, None, None)
        state.source_state.kept.append(kept)

    def finish(self, state: PrefillState) -> None:
        """Hidden states after the last layer that was run: a drafter of the answer continues from there."""
        if state.source_state is not None and state.source_state.kept:
            self._draft_kv.keep_partial(
                state.id,
                PartialForward(state.pages, state.source_state.start, torch.cat(state.source_state.kept), self._top),
            )
        state.source_state = state.tail_attention = None

    # -- pages of the draft's K/V --------------------------------------------------------------------------------------

    def _read_entries(self, state: PrefillState) -> int:
        """Entries in whole pages, from the first, that the draft has read before, for this prompt or another."""
        size = self._pool.page_size
        return self._draft_kv.full_pages(state.pages, size, lower=self._top < self._layers) * size

    def _mark_read(self, state: PrefillState, lo: int, hi: int) -> None:
        """Pages that are full now. All entries before `lo` have been read."""
        size, marks = self._pool.page_size, self._draft_kv.filled if self._top == self._layers else self._draft_kv.lower
        marks[np.array(state.pages[lo // size : hi // size], dtype=np.int64)] = size
