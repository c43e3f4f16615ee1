"""What drafters on the target's hidden states have in common: their model, the vectors of the tokens that ran.

The target's forwards leave a vector for every token (`HiddenFeatures`). A drafter of this kind reads the last one, or
K/V made of the last few hundred, and drafts all positions in one pass. Where the last token has none (its K/V was
drafted or read back from disk) nothing is drafted in that step. One that reads the target's K/V alone needs no vectors.
Knows no verifier.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from array import array

from torch import Tensor

from forerun.core import Draft
from forerun.decode.draft_context import DraftContext
from forerun.decode.drafters.base import Drafter, DraftRequest, DraftRound
from forerun.decode.drafters.best_first import Marginals, grow
from forerun.decode.drafters.tree_builder import TreeBuilder
from forerun.errors import BadRequest
from forerun.models.execution.timing import median_seconds
from forerun.models.online_habits import OnlineHabits

TIMED_REPEATS = 3


class HiddenDrafter(Drafter):
    free = False
    can_sample = True

    def __init__(self, ctx: DraftContext) -> None:
        assert ctx.hidden is not None
        self._pool, self._target, self._features = ctx.pool, ctx.runner, ctx.runner.features
        self.tokens_per_round, self.max_context = ctx.hidden.tokens, ctx.hidden.max_context
        self._adapter, self.outcomes = ctx.hidden.adapter, ctx.hidden.outcomes
        self.habits = ctx.hidden.habits
        self.rounds: list[DraftRound] = []

    @classmethod
    def problem(cls, ctx: DraftContext) -> BadRequest | None:
        return ctx.hidden_problem(cls.name)

    @abstractmethod
    def _pass(self, requests: list[DraftRequest], trees: list[TreeBuilder]) -> tuple[list[Marginals], int]:
        """One pass for all of them: what it says of each, and how many rows it ran."""

    @abstractmethod
    def _run_blank(self, tokens: int, context: int, pages: array[int]) -> None:
        """A pass of so many rows on pages of its own, to be timed."""

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        self.rounds = []
        trees = [TreeBuilder(request, self.name) for request in requests]
        ready = [tree for tree in trees if self._ready(tree.request)]
        if ready:
            start = time.perf_counter()
            found, rows = self._pass([tree.request for tree in ready], ready)
            for tree, marginals in zip(ready, found, strict=True):
                grow(tree, marginals, self._habits_after(tree.request, marginals))
            self.rounds.append(DraftRound(rows, len(ready), time.perf_counter() - start))
        return [tree.draft for tree in trees]

    def _habits_after(self, request: DraftRequest, marginals: Marginals) -> OnlineHabits | None:
        """What was learnt of these texts, this request's last tokens included; None: nothing that helps."""
        if self.habits is None:
            return None
        self.habits.observe(request.seq_id, request.tokens, marginals)
        return self.habits if self.habits.active else None

    def _observe(self, requests: list[DraftRequest], rows: Tensor) -> None:
        """Rows of a pass, [N, depth, width], for what learns while serving."""
        if self._adapter is not None:
            for request, own in zip(requests, rows, strict=True):
                self._adapter.record(request.seq_id, request.tokens, own)

    def finish(self, seq_id: int, tokens: list[int], num_prompt: int) -> None:
        if self._features is not None:
            self._features.write_waiting()  # while its pages are its own
        if self._adapter is not None:
            self._adapter.finish(seq_id, tokens)
        if self.habits is not None:
            self.habits.finish(seq_id, tokens)

    def _ready(self, request: DraftRequest) -> bool:
        """Whether there is room, and the token before the last one left its vector, where that is read."""
        length, last = len(request.tokens), len(request.tokens) - 2
        fits = request.max_nodes > 0 and length + self.tokens_per_round < self.max_context
        features = self._features
        return fits and last >= 0 and (features is None or features.known_from(request.pages, last, last + 1) == last)

    def _depth(self, request: DraftRequest) -> int:
        return min(request.max_depth, request.max_nodes, self.tokens_per_round)

    def time_round(self, tokens: int, context: int) -> float:
        with self._pool.borrow(context + tokens + 1) as pages:
            return median_seconds(lambda: self._run_blank(tokens, context, pages), TIMED_REPEATS)
