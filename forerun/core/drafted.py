"""Drafted steps that a device runs one after the other without the host: what they start from and what they give.

The contract between engines and devices. No logic of either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

MAX_DRAFTED_SEQUENCES = 4  # of one step: 32 rows of a launch, and trees of fewer than 7 nodes gain little


def rows_of(sequences: int) -> int:
    """Rows of each sequence in a launch of either model: its last token and a tree, or what was accepted and masks."""
    return 16 if sequences <= 2 else 8


@dataclass(frozen=True)
class DraftedStart:
    """Where a sequence stands before its first step."""

    length: int  # tokens; the last one has no K/V
    unread: Sequence[int]  # the last tokens, which the draft model has not run
    pages: Sequence[int]


@dataclass(frozen=True)
class DraftedTokens:
    """What a step gave one sequence."""

    tokens: list[int]  # the accepted path, then one token of the target
    nodes: int  # that were verified
    depth: int  # positions that were drafted


class PendingDrafted(Protocol):
    """A step on its way."""

    def read(self) -> list[DraftedTokens]:
        """By sequence. Waits for the device."""
        ...


class DraftedDevice(Protocol):
    """What runs such steps."""

    def prepare(self) -> None:
        """Compile now what the first steps would."""
        ...

    def begin(self, starts: Sequence[DraftedStart], depth: int, nodes: int) -> None:
        """What the first step starts from; nothing is on its way. `depth`: positions that a step drafts; `nodes` of a
        tree: at most."""
        ...

    def send_pages(self, pages: Sequence[Sequence[int]]) -> None:
        """The pages of each sequence, for the steps that are launched from now on."""
        ...

    def launch(self) -> PendingDrafted:
        """Enqueue a step; at most two may be on their way."""
        ...
