"""Options about what outlives the KV pool: host memory, a folder on disk, and sessions kept there.

Knows sizes as people write them. What tiers do is part of the cache.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.errors import BadRequest
from forerun.options import parse_bytes

_keeping = functools.partial(typer.Option, rich_help_panel="What is kept")

Disk = Annotated[
    Path | None,
    _keeping("--disk", help="A folder where K/V outlives the process: the same prompt is read from there next time."),
]
DiskBytes = Annotated[str | None, _keeping("--disk-bytes", help="Most bytes there, such as 500M; default: 8G.")]
HostBytes = Annotated[
    str | None, _keeping("--host-bytes", help="Main memory for K/V that the pool has no room for, such as 2G.")
]
SessionName = Annotated[
    str | None,
    _keeping("--session", help="A conversation under this name, kept in --disk: go on with it, or begin it."),
]


@dataclass(frozen=True, kw_only=True)
class TierOptions:
    """Where K/V goes when the pool needs its room."""

    disk: Disk = None
    disk_bytes: DiskBytes = None
    host_bytes: HostBytes = None

    def tiers(self) -> dict[str, Any]:
        """Arguments for `LLM`."""
        asked: dict[str, Any] = {"disk": self.disk}
        if self.disk_bytes is not None:
            if self.disk is None:
                raise BadRequest("--disk-bytes is about a disk tier, and there is none", "add --disk FOLDER")
            asked["disk_bytes"] = parse_bytes("--disk-bytes", self.disk_bytes)
        if self.host_bytes is not None:
            asked["host_bytes"] = parse_bytes("--host-bytes", self.host_bytes)
        return asked

    def check_session(self, name: str | None) -> None:
        """A session that cannot be continued is a mistake."""
        if name is not None and self.disk is None:
            raise BadRequest(f"session {name!r} would end with this command", "add --disk FOLDER, where it is kept")
