"""Medusa: one head for each of the next tokens, all on the last hidden state of the target.

The cheapest drafter on hidden states: a few matrices, no K/V and no attention. What a head says does not depend on the
tokens between. Knows no verifier.
"""

from __future__ import annotations

from array import array

import torch

from forerun.decode.draft_context import DraftContext
from forerun.decode.drafters.base import DraftRequest, register
from forerun.decode.drafters.best_first import Marginals, PlainMarginals, most_probable, temperatures
from forerun.decode.drafters.hidden import HiddenDrafter
from forerun.decode.drafters.tree_builder import TreeBuilder
from forerun.models.hidden_draft import HeadsModel


@register
class HeadsDrafter(HiddenDrafter):
    name = "heads"

    def __init__(self, ctx: DraftContext) -> None:
        super().__init__(ctx)
        assert isinstance(ctx.hidden, HeadsModel) and ctx.runner.features is not None
        self._model, self._vectors = ctx.hidden, ctx.runner.features

    @torch.inference_mode()
    def _pass(self, requests: list[DraftRequest], trees: list[TreeBuilder]) -> tuple[list[Marginals], int]:
        lasts = [len(request.tokens) - 2 for request in requests]
        features = [self._vectors.rows(r.pages, last, last + 1) for r, last in zip(requests, lasts, strict=True)]
        rows = self._model.rows(torch.cat(features))
        self._observe(requests, rows)
        logits = self._model.full_vocab(self._model.row_logits(rows))  # [N, tokens, V]
        heat = temperatures(trees, logits.device)
        ranked = most_probable((logits if heat is None else logits / heat[:, None, None]).flatten(0, 1))
        found: list[Marginals] = []
        for i, request in enumerate(requests):
            first, own = i * self.tokens_per_round, logits[i]
            if request.sampled and self._adapter is not None:  # what is drawn with a seed must not change
                own = self._model.full_vocab(self._model.row_logits(rows[i], adapted=False))
            found.append(PlainMarginals(own, ranked[first : first + self._depth(request)]))
        return found, len(ranked)

    @torch.inference_mode()
    def _run_blank(self, tokens: int, context: int, pages: array[int]) -> None:
        """Rows beyond one sequence's heads are those of further sequences."""
        count = max(1, tokens // self.tokens_per_round)
        features = self._vectors.rows(pages, 0, 1).expand(count, -1).contiguous()
        most_probable(self._model.logits(features).flatten(0, 1))
