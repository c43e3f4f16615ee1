"""EAGLE-3: a small layer reads a token beside what the target computed of the token before, one round a token.

Trees grow as those of a draft model. Row e of the drafter is token e + 1 beside the vector of token e, so its K/V
lies one entry earlier than the target's; tokens that were drafted with the drafter's own vectors run again with the
target's once they are accepted. Loaded from folders of the `speculators` package, not trained here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forerun.core import Draft
from forerun.decode.draft_context import DraftContext
from forerun.decode.drafters.base import DraftRequest, register
from forerun.decode.drafters.model import ModelDrafter
from forerun.decode.drafters.tree_builder import TreeBuilder
from forerun.errors import BadRequest
from forerun.models.decoder import Output
from forerun.models.execution.runner import Runner, Span
from forerun.models.execution.timing import median_seconds
from forerun.models.hidden_draft import EagleModel


@dataclass
class _ShiftedRequest(DraftRequest):
    """A request whose first token is left out: no vector comes before it."""

    @property
    def tokens(self) -> list[int]:
        return self.context.tokens[1:]


class EagleRunner:
    """Rows with the vectors before them: the target's for tokens of the sequence, its own for nodes of a draft."""

    can_chain, decoding_rows = False, None

    def __init__(self, ctx: DraftContext, model: EagleModel) -> None:
        assert ctx.runner.features is not None and ctx.hidden_kv is not None
        self._target, self._features, self._model = ctx.runner, ctx.runner.features, model
        self.kv, self._size = ctx.hidden_kv.kv, ctx.pool.page_size
        self._own: dict[int, Tensor] = {}  # by slot: what the row there hands on, of the latest drafts

    def start(self) -> None:
        self._own.clear()

    @torch.inference_mode()
    def forward(self, spans: list[Span]) -> Output:
        batch = self._target.batch(spans)
        batch.positions = batch.positions + 1
        logits, hidden = self._model.run(batch, torch.cat([self._before(span) for span in spans]), self.kv)
        for slot, row in zip(batch.slot_mapping.tolist(), hidden, strict=True):
            self._own[slot] = row
        return Output(logits)

    def _before(self, span: Span) -> Tensor:
        """[T, width]"""
        entries = span.entries
        end = min(entries.stop, span.tree_first) if span.parents else entries.stop
        rows = [self._features.rows(span.pages, entries.start, end)] if end > entries.start else []
        for entry in range(max(end, entries.start), entries.stop):
            above = span.tree_first + span.parents[entry - span.tree_first]  # ROOT is -1: the entry before the tree
            rows.append(self._own[span.pages[above // self._size] * self._size + above % self._size][None])
        return torch.cat(rows)

    def chains(self, spans: list[Span], depth: int, least: Sequence[float]) -> None:
        """A launch of several rounds runs whole models only."""

    def time_forward(self, tokens: int, context: int, repeats: int, prompt: bool = False) -> float:
        """Tokens of a prompt run as others do."""
        try:
            with self._target.pool.borrow(context + tokens + 1) as pages:
                span = Span([0] * tokens, context, pages, range(tokens))
                return median_seconds(lambda: self.forward([span]).logits[-1, 0].item(), repeats)
        finally:
            self.start()


@register
class EagleDrafter(ModelDrafter):
    name = "eagle3"

    def __init__(self, ctx: DraftContext) -> None:
        assert isinstance(ctx.hidden, EagleModel) and ctx.hidden_kv is not None and ctx.runner.features is not None
        self._eagle = EagleRunner(ctx, ctx.hidden)
        self._runner: Runner = self._eagle  # type: ignore[assignment]
        self._pool, self._draft_kv, self._features = ctx.pool, ctx.hidden_kv, ctx.runner.features
        self._vocab, self._states = ctx.hidden.vocab, {}
        self.max_context, self.rounds, self.stops_on_device = ctx.hidden.max_context, [], False

    @classmethod
    def problem(cls, ctx: DraftContext) -> BadRequest | None:
        return ctx.hidden_problem(cls.name)

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        self._eagle.start()
        found = super().propose([_shifted(request) for request in requests])
        for state in self._states.values():
            state.run = []  # computed beside the drafter's own vectors: run again beside the target's
        return found

    def catch_up_tokens(self, request: DraftRequest) -> int:
        return super().catch_up_tokens(_shifted(request))

    def _fits(self, request: DraftRequest) -> bool:
        """The target must have left the vectors of all tokens that are still to be read."""
        end, state = len(request.tokens), self._state(request)
        known = end > state.valid and self._features.known_from(request.pages, state.valid, end) == state.valid
        return known and super()._fits(request)

    def _add_candidates(self, tree: TreeBuilder) -> list[int]:
        """None: a node can run only after its parent has."""
        return []


def _shifted(request: DraftRequest) -> _ShiftedRequest:
    values: dict[str, Any] = {name: getattr(request, name) for name in request.__dataclass_fields__}
    return _ShiftedRequest(**values)
