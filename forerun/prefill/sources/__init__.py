"""Sources of drafted K/V by name."""

from __future__ import annotations

from forerun.decode.draft_context import DraftContext
from forerun.errors import BadRequest
from forerun.prefill.profile import Profile
from forerun.prefill.sources.base import KVSource

SOURCES = ("draft", "self", "chunk")


def make_source(name: str, ctx: DraftContext, profile: Profile | None) -> KVSource:
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
