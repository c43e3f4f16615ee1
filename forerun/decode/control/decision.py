"""What is decided in a step, as data: the batch as drafted so far, a paid drafter's plan, the decision and its outcome.

Decides nothing (`controller` does).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from forerun.core import Draft
from forerun.decode.control.acceptance import RequestStats


class Decision(NamedTuple):
    """What one step does, and what plain decoding would have cost."""

    sequences: int
    context: int
    drafters: str  # of the nodes that are verified, joined by +; empty: plain
    depth: int  # of the deepest draft
    rows: int  # of the target's forward
    tokens: float  # expected of the batch
    seconds: float  # expected
    plain_s: float  # of a plain step, which gives a token for each sequence
    why: str


@dataclass(slots=True)
class DraftedBatch:
    """The sequences of a step, and what was drafted for them so far."""

    stats: list[RequestStats]
    drafts: list[Draft]  # with calibrated probabilities
    limits: list[int]  # the most nodes of each
    context: int  # mean
    spent_s: float = 0.0  # what drafting took in this step
    on_device_rows: int = 0  # of each sequence in a launch, where the device drafts without the host; 0: it does not


@dataclass(slots=True)
class OpenStep:
    """The step that is decided."""

    stats: list[RequestStats]
    plain_s: float
    lagging: list[RequestStats]  # sequences that it must not slow down
    paid: bool = False  # a paid drafter runs,
    rate: float = 0.0  # with which so many tokens a second are expected; 0: not known, or it has to read first


class EndedStep(NamedTuple):
    """A step of pure decoding whose tokens are read."""

    wall_s: float
    taken_s: float  # without pauses of the operating system
    plain_s: float
    paid: bool
    rate: float


@dataclass(slots=True)
class PaidPlan:
    """What a paid drafter is to do in a step."""

    drafter: str
    rounds: list[int]  # the most for each sequence; 0: none
    rate: float  # tokens per second, by the mean: of two that pay for certain the one that promises more is chosen
    min_path_probs: list[list[float]]  # by sequence: after so many drafted tokens, the least that is worth a round more
    why: str
    lost_s: float = 0.0  # that exploring takes from every sequence's budget
    start_s: Sequence[float] = ()  # by sequence: what catching up takes in this step, of a long prompt one part
