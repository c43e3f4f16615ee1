"""The state of one drafted prompt: what it consists of, how far its drafting is, and what became of it.

A sequence holds it from its admission until it gives up its pages; the `Prefiller` moves it from stage to stage. Knows
neither how entries are chosen nor when the prompt is scheduled.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from forerun.core import PrefillReport
from forerun.core.batch import send
from forerun.params import Prefill

if TYPE_CHECKING:
    from forerun.prefill.checks import Checker, CheckSpan
    from forerun.prefill.choosers import TailAttention
    from forerun.prefill.plan import Costs
    from forerun.prefill.sources import KVSource


class PrefillStage(enum.Enum):
    READING = enum.auto()  # the source reads the prompt and writes K/V
    RECOMPUTING = enum.auto()  # the target recomputes what the plan chose, and checks compare
    DONE = enum.auto()  # entries before `filled` have K/V
    EXACT = enum.auto()  # not worth it or not good enough: the engine computes the prompt as usual


def _none() -> np.ndarray:
    return np.zeros(0, dtype=np.int64)


@dataclass(eq=False)
class PrefillState:
    """Entries 0 .. first have exact K/V already, first .. end are drafted, the rest (the tail) the engine runs."""

    # the prompt
    id: int  # of the sequence
    tokens: Sequence[int]  # all of it
    pages: array[int]  # of the sequence, with room for all of it
    first: int
    end: int  # the length of the prompt until the prefiller keeps the tail from being drafted
    settings: Prefill
    layers: int  # of the target
    stage: PrefillStage = PrefillStage.READING
    report: PrefillReport = field(init=False)

    # how far it is
    known: int = 0  # entries before it have drafted K/V from an earlier request; `depths` has their depths
    read: int = 0  # entries that the source has read
    filled: int = field(init=False)  # entries before it have K/V once it is done: up to `end`, or most of the tail too
    depths: np.ndarray = field(init=False)  # [end] int16: layers of each entry that the target itself computed so far
    todo: np.ndarray = field(default_factory=_none)  # entries still to be recomputed in this round
    spent: float = 0.0  # work so far, in tokens of the target's prefill
    x: Tensor | None = None  # [read - first, hidden] inputs of layer `base`, where the source's way leads past it
    logits: Tensor | None = None  # [1, V] float32, behind the last token, where all but that is filled

    # what drafts and checks it, from the prefiller's `open` to its `close`
    opened: bool = False
    source: KVSource = field(init=False)
    source_state: Any = None  # what the source keeps about this prompt
    copied: bool = False  # whether reading runs no layer of the target, not those below the source's base either
    tail_attention: TailAttention | None = None  # collected while the tail is read, where tokens are chosen by it
    costs: Costs = field(init=False)
    scores: np.ndarray = field(default_factory=_none)  # [len(tokens)] the chooser's
    attention: np.ndarray | None = None  # [len(tokens)] of the tail over drafted K/V, where tokens are chosen by it
    spans: list[CheckSpan] = field(default_factory=list)  # that the plan placed
    checker: Checker | None = None  # of this round
    compares_tail: bool = False  # whether the first round is compared by the tail's distributions, too
    tail_logits: Tensor | None = None  # [tokens, V] of the tail after the round before
    tail_ran: bool = False  # over the K/V as it is now: its work is counted
    gaps_filled: bool = False  # entries that the source could not draft are computed
    first_checked: bool = False  # whether a first span was checked before all was read
    _sent: Tensor | None = None

    def __post_init__(self) -> None:
        self.filled = self.end
        self.depths = np.zeros(self.end, dtype=np.int16)
        self.depths[: self.first] = self.layers
        self.report = PrefillReport(tokens=len(self.tokens), exact=self.first, layers=self.layers)

    @cached_property
    def ids(self) -> np.ndarray:
        """[len(tokens)] int64: the tokens."""
        return np.array(self.tokens, dtype=np.int64)

    @property
    def read_end(self) -> int:
        """Entries before it are read by the source."""
        return self.end if self.source.leaves_tail and self.report.chooser != "draft" else len(self.tokens)

    def sent(self, device: torch.device) -> Tensor:
        """`ids` on a device, sent once: a source and the target both read them there."""
        if self._sent is None or self._sent.device != device:
            self._sent = send(self.ids, device)
        return self._sent

    def add_known(self, depths: np.ndarray) -> None:
        """The pages hold drafted K/V of these depths already, of the first len(depths) entries."""
        self.known = min(len(depths), self.end) if len(depths) > self.first else 0
        self.depths[self.first : self.known] = depths[self.first : self.known]

    def keep_tail(self, tokens: int) -> None:
        """The last tokens are never drafted: the engine runs them."""
        self.end = self.filled = max(self.first, len(self.tokens) - tokens)
        self.known, self.depths = min(self.known, self.end), self.depths[: self.end]

    @property
    def finished(self) -> bool:
        return self.stage in (PrefillStage.DONE, PrefillStage.EXACT)

    # -- what became of it ---------------------------------------------------------------------------------------------

    def describe(self) -> None:
        """Write into the report what has become of the tokens so far."""
        report, depths = self.report, self.depths
        shallow = depths < self.layers
        report.exact = int(shallow.argmax()) if shallow.any() else len(self.tokens)
        kept = depths[report.exact :]
        report.drafted, report.recomputed = len(kept), int((kept == self.layers).sum())
        report.accepted = report.drafted - report.recomputed
        whole = np.concatenate((depths, np.full(len(self.tokens) - self.end, self.layers, dtype=depths.dtype)))
        report.depth_runs = depth_runs(whole)

    def finish(self) -> None:
        """All before the tail has K/V, and it was described: add up what that cost."""
        tail = 0.0 if self.tail_ran else self.costs.tail
        self.report.token_layers += int(tail) * self.layers
        self.report.cost = (self.spent + tail) / self.costs.exact
        self.stage = PrefillStage.DONE

    def fall_back(self, why: str) -> None:
        """The engine computes the prompt as usual; what was spent on it so far comes on top."""
        report, exact = self.report, len(self.tokens) - self.first
        report.fell_back, report.exact = why, len(self.tokens)
        report.drafted = report.accepted = report.recomputed = 0
        report.token_layers += exact * self.layers
        report.cost = 1.0 + self.spent / max(1, exact)
        report.depth_runs = [(self.layers, len(self.tokens))]
        self.todo, self.stage = _none(), PrefillStage.EXACT

    def close(self) -> None:
        """Drop what only drafting needed; depths, logits and the report stay."""
        self.opened = False
        self.x = self.checker = self.tail_logits = self.source_state = self.tail_attention = self._sent = None
        self.todo, self.scores, self.spans, self.attention = _none(), _none(), [], None


def depth_runs(depths: np.ndarray) -> list[tuple[int, int]]:
    """(depth, tokens) of each run of tokens of one depth, from the first on."""
    if not len(depths):
        return []
    edges = np.concatenate(([0], np.flatnonzero(depths[1:] != depths[:-1]) + 1, [len(depths)]))
    return list(zip(depths[edges[:-1]].tolist(), np.diff(edges).tolist(), strict=True))
