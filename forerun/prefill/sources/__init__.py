"""Sources of drafted K/V by name."""

from __future__ import annotations

from forerun.decode.workshop import Workshop
from forerun.errors import BadRequest
from forerun.prefill.profile import Profile
from forerun.prefill.sources.base import Source

SOURCES = ("draft", "self", "chunk")  # that requests may name; `drop` is a baseline for studies


def make(name: str, workshop: Workshop, profile: Profile | None) -> Source:
    """The source of this name; raises where the profile or the models it needs are missing or do not fit."""
    if name == "draft":
        from forerun.prefill.sources.draft import DraftSource

        return DraftSource(workshop, profile)
    if name == "self":
        from forerun.prefill.sources.lower import LowerSource

        return LowerSource(workshop, profile)
    if name == "chunk":
        from forerun.prefill.sources.chunk import ChunkSource

        return ChunkSource(workshop)
    if name == "drop":
        from forerun.prefill.sources.drop import DropSource

        return DropSource(workshop, profile)
    raise BadRequest(f"the source of prefill is {name!r}", f"use one of auto, {', '.join(SOURCES)}")
