"""Drafts from another machine: how long a step waits for one, and how deep one is where target and server take turns.

A server with memory of its own drafts beside the target's steps, and waiting can save one step at most. One on the
target's memory bus slows these steps down (`Slowdown`); where that is more than a little, it drafts while the target
waits, as a draft model in the target's own process does, as deep as that pays, and nothing beside the target's steps.
Knows figures, no connection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from forerun.decode.control.acceptance import DOUBT, Acceptance, RequestStats
from forerun.decode.control.cost import CostCurve, Slowdown
from forerun.decode.control.decision import OpenStep

MAX_TURN_DEPTH = 8  # of a draft that is waited for whole
TURN_PATIENCE = 2.0  # times what a draft is expected to take, until the step goes on without it


class Turn(NamedTuple):
    """A draft that the target waits for: its depth (0: none pays), and what a step with it gains and takes."""

    depth: int = 0
    gained_s: float = 0.0  # over plain steps for as many tokens
    draft_s: float = 0.0  # until it is here


def best_turn(
    probs: Sequence[float], plain_s: float, verify_s: Callable[[int], float], round_s: float, way_s: float
) -> Turn:
    """`probs`: acceptance by depth, each given the one before; `verify_s`: seconds of a step by tokens of a sequence;
    `round_s`, `way_s`: of the server for one token, and of the way to it and back."""
    best, best_rate = Turn(), 1.0 / plain_s
    path = tokens = 1.0
    for depth, prob in enumerate(probs, 1):
        path *= prob
        tokens += path
        draft_s = way_s + depth * round_s
        seconds = draft_s + verify_s(1 + depth)
        if tokens / seconds > best_rate:
            best, best_rate = Turn(depth, tokens * plain_s - seconds, draft_s), tokens / seconds
    return best


class Waiting:
    """The controller's part for drafters on other machines."""

    target: CostCurve
    slowdowns: dict[str, Slowdown]
    acceptance: Acceptance
    _step: OpenStep | None

    def max_wait_s(self, s: RequestStats, drafter: str) -> tuple[float, float]:
        """How long a batch may wait for a sequence's draft from another machine, and the probability of its first
        token. A plain step meanwhile loses nothing of a draft whose first token is right, as the rest is verified in
        the next one: waiting saves a step then, and is lost where that token is wrong."""
        assert self._step is not None
        (first,) = self.acceptance.records[drafter].by_depth(s.kind, s.own[drafter], 1, 0.0 if s.named else DOUBT)[:1]
        return first * self._step.plain_s / len(self._step.stats), first

    def turn(self, s: RequestStats, drafter: str) -> Turn:
        """The best draft of a server that takes turns with the target; none where the two may compute at once."""
        assert self._step is not None
        slowdown, n, plain_s = self.slowdowns[drafter], len(self._step.stats), self._step.plain_s
        if not (slowdown.takes_turns or slowdown.matters):
            return Turn()
        doubt = 0.0 if s.named else DOUBT
        probs = self.acceptance.records[drafter].by_depth(s.kind, s.own[drafter], MAX_TURN_DEPTH, doubt)
        rest_s = plain_s - self.target.seconds(n, n)
        return best_turn(
            probs, plain_s, lambda rows: rest_s + self.target.seconds(n * rows, n), slowdown.round_s, slowdown.way_s
        )
