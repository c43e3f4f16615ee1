"""One prompt whose K/V is being drafted: what it consists of, how far it is, what became of it.

Only state; who moves it on is the `Prefiller`.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.core import PrefillReport
from forerun.core.transfer import send
from forerun.params import Prefill


class PrefillStage(enum.Enum):
    READING = enum.auto()  # the source reads the prompt
    RECOMPUTING = enum.auto()  # the target recomputes what the plan chose
    DONE = enum.auto()  # entries before `end` have K/V
    EXACT = enum.auto()  # not worth it or not good enough: the engine computes the prompt as usual


@dataclass(eq=False)
class PrefillState:
    """Entries 0 .. first have exact K/V already, first .. end are drafted, the rest (the tail) the engine runs."""

    id: int
    tokens: Sequence[int]  # the whole prompt
    pages: array[int]  # of the sequence, with room for all of it
    first: int
    end: int
    settings: Prefill
    layers: int  # of the target
    stage: PrefillStage = PrefillStage.READING
    read: int = 0  # entries that the source has read
    known: int = 0  # entries before it have drafted K/V from an earlier request; `depths` says how deep they are
    filled: int = field(init=False)  # entries before it have K/V once it is done: up to `end`, or most of the tail too
    ids: np.ndarray = field(init=False)  # [len(tokens)] int64: the same
    depths: np.ndarray = field(init=False)  # [end] int16: layers of each entry that the target itself computed so far
    x: Tensor | None = None  # [read - first, hidden] inputs of layer `base`, where the source's way leads past it
    logits: Tensor | None = None  # [1, V] float32, behind the last token, where all but that is filled
    source_state: Any = None  # what the source keeps about this prompt
    todo: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # entries still to be recomputed
    report: PrefillReport = field(init=False)
    _sent: Tensor | None = None

    def __post_init__(self) -> None:
        self.ids = np.array(self.tokens, dtype=np.int64)
        self.filled = self.end
        self.depths = np.zeros(self.end, dtype=np.int16)
        self.depths[: self.first] = self.layers
        self.report = PrefillReport(tokens=len(self.tokens), exact=self.first, layers=self.layers)

    def sent(self, device: torch.device) -> Tensor:
        """`ids` on a device, sent once: a source and the target both read them there."""
        if self._sent is None or self._sent.device != device:
            self._sent = send(self.ids, device)
        return self._sent

    @property
    def finished(self) -> bool:
        return self.stage in (PrefillStage.DONE, PrefillStage.EXACT)
