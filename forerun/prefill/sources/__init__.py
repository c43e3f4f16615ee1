"""Sources of drafted K/V: their interface, and those that requests can name.

A source reads a prompt some tokens at a time and writes K/V for the target's layers from `base` on into the prompt's
own pages, without running the whole target. It knows neither which tokens will be recomputed nor how good its K/V is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from forerun.decode.draft_context import DraftContext
from forerun.errors import BadRequest
from forerun.prefill.profile import Profile
from forerun.prefill.sources.chunk_index import ChunkIndex
from forerun.prefill.state import PrefillState

SOURCES = ("draft", "self", "chunk")


class KVSource(ABC):
    name: str
    base: int  # layers below it the target runs for every token; they are exact as far as their input is
    max_tokens: int | None = None  # longest prompt that it reads
    text_index: ChunkIndex | None = None  # of earlier prompts, where it reads those: it is given all exact K/V
    leaves_gaps: bool = False  # whether `missing` may have entries
    leaves_tail: bool = False  # whether it reads the tail only where its own attention chooses tokens
    min_length_scale: float = 1.0  # of the policy's shortest prompt: less where reading costs next to nothing

    def open(self, state: PrefillState) -> None:  # noqa: B027 (optional)
        """Prepare for a prompt before anything runs; may advance `state.read` past what need not be read."""

    @abstractmethod
    def read(self, state: PrefillState, count: int) -> None:
        """Read entries state.read .. state.read + count (up to state.read_end), and write K/V for those of them before
        state.end that are not known yet; advances state.read, and sets state.x where it runs the target's layers
        below `base`."""

    @abstractmethod
    def cost(self, tokens: int) -> float:
        """Work of reading so many tokens, maps included, in tokens of the target's own prefill."""

    def prepare(self, least: int, most: int) -> None:  # noqa: B027 (optional)
        """Have a device build what prompts of these lengths will run."""

    def finish(self, state: PrefillState) -> None:  # noqa: B027 (optional)
        """The prompt is done or cancelled: release what is held for it."""

    def missing(self, state: PrefillState) -> np.ndarray:
        """Entries before state.end that the target must run through all layers."""
        return np.zeros(0, dtype=np.int64)

    def scores(self, state: PrefillState) -> np.ndarray | None:
        """[len(state.tokens)] how much each token matters to the tail, once everything is read; None: not measured."""
        seen = state.tail_attention
        return seen.reduce() if seen is not None and seen.complete else None


def make_source(name: str, ctx: DraftContext, profile: Profile) -> KVSource:
    """The source of this name; raises where the profile or the models it needs are missing or do not fit."""
    if name == "draft":
        from forerun.prefill.sources.draft import DraftSource

        return DraftSource(ctx, profile)
    if name == "self":
        from forerun.prefill.sources.self_draft import SelfDraftSource

        return SelfDraftSource(ctx, profile)
    if name == "chunk":
        from forerun.prefill.sources.chunk import ChunkSource

        return ChunkSource(ctx)
    raise BadRequest(f"the source of prefill is {name!r}", f"use one of auto, {', '.join(SOURCES)}")
