"""A draft model that drafts several tokens in one forward: mask tokens after the sequence stand for those to come.

A forward of the sequence's last tokens and k - 1 masks gives k distributions, each of one position whatever the tokens
between are (PARD). Trees grow out of these marginals, the most probable path first (`best_first`), corrected by the
token before where the drafter was trained with a Markov head.
Masks leave nothing: the entries they wrote are overwritten by the next tokens that come. The model's weights were
trained for it (`forerun train drafter`), and still draft chains. Knows no verifier and no target.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from forerun.core import Draft
from forerun.decode.draft_context import DraftContext
from forerun.decode.drafters.base import DraftRequest, DraftRound, register
from forerun.decode.drafters.best_first import (
    MIN_NODE_PATH_PROB,
    Marginals,
    PlainMarginals,
    grow,
    likeliest,
    most_probable,
    temperatures,
)
from forerun.decode.drafters.markov import CANDIDATES, MarkovHead, MarkovMarginals
from forerun.decode.drafters.model import ModelDrafter
from forerun.decode.drafters.tree_builder import TreeBuilder
from forerun.errors import BadRequest
from forerun.models.execution.batch_split import MAX_DECODE_TOKENS
from forerun.models.execution.timing import median_seconds


@register
class ParallelDrafter(ModelDrafter):
    name = "parallel"
    max_unread_tokens = 16  # a whole accepted draft runs along with the masks: one forward a step

    def __init__(self, ctx: DraftContext) -> None:
        super().__init__(ctx)
        assert ctx.draft is not None and ctx.draft.parallel is not None
        self._mask, self.tokens_per_round = ctx.draft.parallel.mask_token, ctx.draft.parallel.tokens
        self.outcomes = ctx.draft.parallel.outcomes
        self.stops_on_device = False
        # On a device a step waits for its host, which this takes 0.1 ms of for 4% more tokens: not measured there
        head = ctx.draft.markov if ctx.draft.decoder.device.type == "cpu" else None
        self._markov = None if head is None else MarkovHead(*head)
        alone = ctx.runner is self._runner  # a draft server's: there is no target to step with
        self.steps = None if alone else ctx.runner.drafted_steps(self._runner, self._mask, MIN_NODE_PATH_PROB)
        if self.steps is not None:
            self.steps.prepare()

    @classmethod
    def problem(cls, ctx: DraftContext) -> BadRequest | None:
        problem = super().problem(ctx)
        if problem is None and ctx.draft is not None and ctx.draft.parallel is None:
            hint = "train it: forerun train drafter --kind parallel; or use the drafter `model`"
            return BadRequest(f"{ctx.draft.source} was not trained to draft several tokens in one forward", hint)
        return problem

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        self.rounds = []
        trees = [TreeBuilder(request, self.name) for request in requests]
        ready = [tree for tree in trees if self._fits(tree.request) and self._catch_up(tree.request)]
        if ready:
            self._draft_block(ready)
        return [tree.draft for tree in trees]

    # -- steps that run without the host (`steps`) ---------------------------------------------------------------------

    def read_up(self, request: DraftRequest, most: int) -> list[int] | None:
        """Run all but at most so many of a sequence's tokens; those that are left, None where a long prompt needs
        another step."""
        fits = len(request.tokens) + self.tokens_per_round < self.max_context
        if not fits or not self._catch_up(request, min(most, self.max_unread_tokens)):
            return None
        return request.tokens[self._states[request.seq_id].valid :]

    def ran(self, seq_id: int, tokens: int) -> None:
        """A step has run so many of a sequence's tokens."""
        self._advance(self._states[seq_id], tokens)

    # -- the contract --------------------------------------------------------------------------------------------------

    def time_round(self, tokens: int, context: int) -> float:
        """With what reads the most probable tokens off, which a device also compiles here and not in a first answer."""
        seconds = super().time_round(tokens, context)
        if tokens > MAX_DECODE_TOKENS:
            return seconds  # a prompt
        decoder = self._runner.decoder
        logits = torch.zeros(min(tokens, self.tokens_per_round), self._vocab, device=decoder.device)
        self._read_off(logits)
        return seconds + median_seconds(lambda: self._read_off(logits), 2)

    def _depth(self, request: DraftRequest) -> int:
        return min(request.max_depth, request.max_nodes, self.tokens_per_round)

    def _read_off(self, logits: Tensor) -> Callable[[Tensor, int, int], Marginals]:
        """What rows [N, V] say of positions: a function of the logits that are drawn from and of which rows are one
        sequence's."""
        markov = self._markov
        if markov is None:
            top = most_probable(logits)
            return lambda own, first, end: PlainMarginals(own[first:end], top[first:end])
        count = min(CANDIDATES, logits.shape[-1])
        found = likeliest(logits, count).numpy()
        tokens, probs = found[:, :count].astype(np.int64), found[:, count:]
        return lambda own, first, end: MarkovMarginals(own[first:end], tokens[first:end], probs[first:end], markov)

    def _grow(self, tree: TreeBuilder, marginals: Marginals) -> None:
        grow(tree, marginals)

    def _draft_block(self, ready: list[TreeBuilder]) -> None:
        """The forward of all sequences, and a tree out of the rows of each."""
        spans = []
        for tree in ready:
            span, depth = self._unread_span(tree.request), self._depth(tree.request)
            unread = len(span.ids)
            span.ids = [*span.ids, *[self._mask] * (depth - 1)]
            span.logits_indices = range(unread - 1, unread - 1 + depth)
            spans.append(span)
        start = time.perf_counter()
        logits = self._runner.forward(spans, wait=False).logits[:, : self._vocab]
        each, heat = [self._depth(tree.request) for tree in ready], temperatures(ready, logits.device)
        per_row = None if heat is None else heat.repeat_interleave(torch.tensor(each, device=heat.device))[:, None]
        marginals = self._read_off(logits if per_row is None else logits / per_row)  # which waits for the device
        rows = sum(len(span.ids) for span in spans)
        self.rounds.append(DraftRound(rows, len(ready), time.perf_counter() - start))
        at = 0
        for tree, depth in zip(ready, each, strict=True):
            self._grow(tree, marginals(logits, at, at + depth))
            self._advance(self._states[tree.request.seq_id], len(tree.request.tokens))
            at += depth
