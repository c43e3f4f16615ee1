"""Self-draft: the target's own lower layers run for every token; K/V of the layers above is mapped from their hidden
states.

No second model. The outputs of the lower layers are kept, so that recomputed tokens start from there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.decode.draft_context import DraftContext
from forerun.prefill.maps import KVWriter, ReadChunk, tail_attention_for
from forerun.prefill.profile import Profile, require_profile
from forerun.prefill.sources import KVSource
from forerun.prefill.state import PrefillState


class SelfDraftSource(KVSource):
    name = "self"

    def __init__(self, ctx: DraftContext, profile: Profile) -> None:
        require_profile(profile, self.name)
        self._runner = ctx.runner
        self._writer = KVWriter(ctx.runner, ctx.runner.decoder, profile.maps)
        self.base = profile.maps.base
        self._cost = self.base / ctx.runner.decoder.config.num_layers + self._writer.cost

    def cost(self, tokens: int) -> float:
        return self._cost * tokens

    def prepare(self, least: int, most: int) -> None:
        self._runner.decoder.attention.prepare_prompts(self._runner.kv[0], most, least)

    def open(self, state: PrefillState) -> None:
        """Reads entries with drafted K/V too: recomputing them starts from inputs of layer `base`."""
        decoder = self._runner.decoder
        rows = len(state.tokens) - state.first
        x = torch.empty(rows, decoder.config.hidden_size, dtype=decoder.dtype, device=decoder.device)
        state.tail_attention = tail_attention_for(state, "lower", self._runner)  # of the lower layers only
        state.source_state, state.read, state.x = x, state.first, x[:0]  # state.x: what of it has been read

    def read(self, state: PrefillState, count: int) -> None:
        x: Tensor = state.source_state  # [tokens - first, hidden] inputs of layer `base`
        piece = ReadChunk(state, count, state.known, self._writer.taps)
        lo, first, end = piece.lo, piece.first, piece.end
        if lo < piece.hi:
            kept = self._writer.ragged_pass.run(self._writer.rows(state, lo, piece.hi), piece.watch, keep=self.base).x
            assert kept is not None
            x[lo - state.first : piece.hi - state.first] = kept
            state.x = x[: piece.hi - state.first]
            if first < end:
                piece.hidden[self.base] = kept[first - lo : end - lo]
                self._writer.write(state, [piece.hidden[tap] for tap in self._writer.taps], first, end)
        state.read = piece.hi

    def finish(self, state: PrefillState) -> None:
        state.source_state = state.x = state.tail_attention = None
