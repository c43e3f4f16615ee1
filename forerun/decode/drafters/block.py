"""A block of tokens in one pass, over K/V made of the target's hidden states (DFlash, DSpark, SpecBlock).

The last token and a mask for each further one run through one to three layers. Their K/V of tokens before lies on the
same pages as the target's and is made of the vectors that the target's forwards left; tokens without a vector count as
zeros, which training knows. With a sliding window only the last few hundred tokens are read, so neither the length of
the text nor a drafted prompt matters. A block may read the target's own K/V instead, or besides. A Markov head corrects
a position by the token before it, for the most probable tokens of both; the confidence head's estimate becomes a node's
probability. Knows no verifier.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forerun.cache.pool import slots_of
from forerun.decode.draft_context import DraftContext
from forerun.decode.drafters.base import DraftRequest, register
from forerun.decode.drafters.best_first import MAX_CHILDREN, Marginals, Ranked, temperatures
from forerun.decode.drafters.hidden import HiddenDrafter
from forerun.decode.drafters.tree_builder import TreeBuilder
from forerun.models.cpu.ranking import BlockRanking
from forerun.models.execution.runner import Span
from forerun.models.hidden_draft import BlockModel, BlockRows

MAX_CANDIDATES = 32  # most probable tokens of a position that the Markov head corrects: others keep their order
CONTEXT_CHUNK = 2048  # tokens whose K/V is made at a time


@dataclass
class _Context:
    """Of one sequence: entries up to `end` have K/V here."""

    pages: array[int]
    end: int
    last: Tensor | None = None  # [1, width] vector of entry `end - 1`, where it was written last


@dataclass
class _Tables:
    """Of all sequences of a pass: children of every token that may stand before a position."""

    tokens: np.ndarray  # [N, depths, candidates] the most probable tokens of each position
    children: np.ndarray  # [N, depths, places, MAX_CHILDREN] by the place of the token before among its candidates
    probs: np.ndarray  # the same


class BlockMarginals:
    """Of one sequence: rows of its block, and tables over the most probable tokens of each position."""

    def __init__(
        self, model: BlockModel, rows: BlockRows, number: int, depth: int, tables: _Tables, sampled: bool
    ) -> None:
        self.depth, self._model, self._logits = depth, model, rows.logits[number]
        if sampled and model.adapter is not None:  # what is drawn with a seed must not change
            self._logits = model.row_logits(rows.hidden[number], adapted=False)
        self._tokens, self._children = tables.tokens[number], tables.children[number]
        self._probs = tables.probs[number]

    def row(self, depth: int, before: int) -> Tensor:
        logits = self._logits[depth]
        if self._model.has_markov:
            logits = logits + self._model.bias(torch.tensor([before], device=logits.device))[0]
        return self._model.full_vocab(logits[None])[0]

    def top(self, depth: int, before: int) -> Ranked:
        place = int((self._tokens[depth - 1] == before).argmax()) if depth and self._model.has_markov else 0
        found = zip(self._children[depth, place].tolist(), self._probs[depth, place].tolist(), strict=True)
        return [(token, prob) for token, prob in found if prob > 0.0]


@register
class BlockDrafter(HiddenDrafter):
    name = "block"

    def __init__(self, ctx: DraftContext) -> None:
        super().__init__(ctx)
        assert isinstance(ctx.hidden, BlockModel) and ctx.hidden_kv is not None and ctx.hidden.layers is not None
        self._model, self._kv = ctx.hidden, ctx.hidden_kv.kv
        self._window = max(self.max_context if window is None else window for window in ctx.hidden.layers.windows)
        self._contexts: dict[int, _Context] = {}
        self._model.use_pages(self._kv)

    def finish(self, seq_id: int, tokens: list[int], num_prompt: int) -> None:
        super().finish(seq_id, tokens, num_prompt)
        self._contexts.pop(seq_id, None)

    @torch.inference_mode()
    def _pass(self, requests: list[DraftRequest], trees: list[TreeBuilder]) -> tuple[list[Marginals], int]:
        for request in requests:
            self._write_context(request)
        first = self._model.first_row
        depth = min(max(map(self._depth, requests)), *(r.max_nodes for r in requests))  # rows need room on every page
        count = max(1, first + depth)
        rows = self._run(requests, count)
        self._observe(requests, rows.hidden)
        tables = self._rank(rows, [request.tokens[-1] for request in requests], trees)
        drafted = count - self._model.first_row
        found: list[Marginals] = [
            BlockMarginals(self._model, rows, i, min(drafted, self._depth(request)), tables, request.sampled)
            for i, request in enumerate(requests)
        ]
        return found, len(requests) * count

    def _run(self, requests: list[DraftRequest], count: int) -> BlockRows:
        states, few = self._states(requests), self._model.block_pass
        if len(requests) == 1 and states is not None and few is not None and count <= few.max_rows:
            r = requests[0]
            return self._model.run_one(r.tokens[-1], states, r.pages, len(r.tokens) - 1, count, self._pool.page_size)
        spans = [Span([r.tokens[-1], *[0] * (count - 1)], len(r.tokens) - 1, r.pages, range(count)) for r in requests]
        return self._model.run(self._target.batch(spans), self._kv, count, states)

    def _states(self, requests: list[DraftRequest]) -> Tensor | None:
        """[N, width] of the tokens before the last ones, where blocks start from them."""
        features = self._features
        if not self._model.state_input or features is None:
            return None
        found = []
        for r in requests:
            known = self._contexts[r.seq_id].last
            found.append(features.rows(r.pages, len(r.tokens) - 2, len(r.tokens) - 1) if known is None else known)
        return found[0] if len(found) == 1 else torch.cat(found)

    def _write_context(self, request: DraftRequest) -> None:
        """K/V of what the target has run since the last pass, as far back as the window sees."""
        end, context = len(request.tokens) - 1, self._contexts.get(request.seq_id)
        if context is None or context.pages is not request.pages or context.end > end:
            context = self._contexts[request.seq_id] = _Context(request.pages, 0)
        first, context.last = max(context.end, end - self._window), None
        features = self._features
        known = end if features is None else features.known_from(request.pages, first, end)
        if known > first:
            self._write(request.pages, first, known, None)
        for lo in range(known, end, CONTEXT_CHUNK):
            hi = min(lo + CONTEXT_CHUNK, end)
            assert features is not None
            vectors = features.rows(request.pages, lo, hi)
            self._write(request.pages, lo, hi, vectors)
            context.last = vectors[-1:]
        context.end = end

    def _write(self, pages: array[int], first: int, end: int, features: Tensor | None) -> None:
        """K/V of entries; `features`: None where there are no vectors."""
        device = self._model.device
        slots = torch.from_numpy(slots_of(pages, first, end, self._pool.page_size)).to(device)
        positions = torch.arange(first, end, device=device)
        self._model.write_context(features, positions, slots, self._kv, self._pool.kv)

    def _rank(self, rows: BlockRows, lasts: list[int], trees: list[TreeBuilder]) -> _Tables:
        if BlockRanking.possible(rows.logits, MAX_CANDIDATES):
            heat = temperatures(trees, rows.logits.device)
            heats = [1.0] * len(lasts) if heat is None else heat.tolist()
            found = self._model.ranking(rows.logits, rows.hidden, lasts, heats, MAX_CANDIDATES, MAX_CHILDREN)
            return _Tables(*found)
        return self._rank_by_operators(rows, lasts, trees)

    def _rank_by_operators(self, rows: BlockRows, lasts: list[int], trees: list[TreeBuilder]) -> _Tables:
        model, logits = self._model, rows.logits
        heat = temperatures(trees, logits.device)
        logits = logits if heat is None else logits / heat[:, None, None]
        top = logits.topk(min(MAX_CANDIDATES, logits.shape[-1]), -1)  # [N, D, C]
        tokens = model.ids[top.indices]
        first = torch.tensor(lasts, device=logits.device)[:, None, None].expand(-1, 1, tokens.shape[-1])
        before = torch.cat((first, tokens[:, :-1]), 1)  # [N, D, C]
        if not model.has_markov:
            before = before[..., :1]
        shift = top.values[..., :1]
        exps = (top.values - shift).exp()  # [N, D, C]
        rest = (logits - shift).exp().sum(-1) - exps.sum(-1)  # of tokens that are no candidates
        corrected = exps[..., None, :].expand(*before.shape, -1)
        if model.has_markov:
            bias = model.bias(before, top.indices)  # [N, D, C before, C]
            corrected = corrected * (bias if heat is None else bias / heat[:, None, None, None]).exp()
        probs = corrected / (corrected.sum(-1, keepdim=True) + rest.clamp(min=0.0)[..., None, None])
        best = probs.topk(min(MAX_CHILDREN, probs.shape[-1]), -1)
        sure = model.confidence(rows.hidden, before, best.values[..., 0])
        values = _with_confidence(best.values, sure).clamp(max=1.0)
        chosen = tokens[..., None, :].expand(*before.shape, -1).gather(-1, best.indices)
        return _Tables(*(value.cpu().numpy() for value in (tokens, chosen, values)))

    @torch.inference_mode()
    def _run_blank(self, tokens: int, context: int, pages: array[int]) -> None:
        states, few = None, self._model.block_pass
        if self._model.state_input and self._features is not None:
            states = self._features.rows(pages, 0, 1)
        if states is not None and few is not None and tokens <= few.max_rows:
            self._model.run_one(0, states, pages, context, tokens, self._pool.page_size)
            return
        span = Span([0] * tokens, context, pages, range(tokens))
        self._model.run(self._target.batch([span]), self._kv, tokens, states).logits.topk(1)


def _with_confidence(values: Tensor, confidence: Tensor | None) -> Tensor:
    """Probabilities [..., MAX_CHILDREN], best first, where the first is right with this confidence [...]: the others
    share what is left as before, and none overtakes it."""
    if confidence is None:
        return values
    sure = confidence[..., None]
    others = values * (1.0 - sure) / (1.0 - values[..., :1]).clamp(min=1e-6)
    return torch.cat((sure, torch.minimum(others, sure)[..., 1:]), -1)
