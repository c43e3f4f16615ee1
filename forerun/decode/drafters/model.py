"""A draft model with the target's tokenizer: grows a tree, most probable nodes first, one forward per round.

Its K/V lies on the target's own pages (`DraftKV`), so shared prefixes are shared for both models and nothing is outside
the pool's budget. What free drafters proposed is scored in the first round's forward: a candidate that the draft model
finds probable saves it rounds of its own (a cascade). Knows no verifier and no target.
"""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field

import torch
from torch import Tensor

from forerun.core import ROOT, Draft
from forerun.decode.draft_context import DraftContext
from forerun.decode.drafters.base import MAX_CATCH_UP_TOKENS, Drafter, DraftRequest, DraftRound, register
from forerun.decode.drafters.tree_builder import TreeBuilder
from forerun.decode.sampling import distribution, shape
from forerun.errors import BadRequest
from forerun.models.execution.batch_split import MAX_DECODE_TOKENS
from forerun.models.execution.runner import Span
from forerun.models.execution.short_head import ShortHead

MAX_SCORED_CANDIDATES = 7  # tokens of free drafts that are scored in the first round: it stays as cheap as one token
MIN_SIDE_PATH_PROB = 0.25  # further nodes run in a round if their path is this probable


@dataclass
class _State:
    """What the draft model has computed for one sequence."""

    pages: array[int]
    valid: int  # entries of the sequence's own tokens that have K/V
    fresh: bool = True  # nothing has been drafted yet
    run: list[int] = field(default_factory=list)  # tokens that ran after those, in consecutive entries


@register
class ModelDrafter(Drafter):
    name = "model"
    free = False
    can_sample = True
    _short_head: ShortHead | None = None
    side_branches = 2  # nodes beside the most probable one that may run in a round
    max_unread_tokens = MAX_SCORED_CANDIDATES + 1  # of a sequence that run along in the first round
    children = 3  # most probable tokens that become children of a node

    def __init__(self, ctx: DraftContext) -> None:
        assert ctx.draft_runner is not None
        self._runner, self._pool = ctx.draft_runner, ctx.pool
        self._vocab = ctx.runner.decoder.config.vocab_size
        assert ctx.draft_kv is not None
        self._draft_kv = ctx.draft_kv
        self._states: dict[int, _State] = ctx.draft_states  # of all drafters that write the draft model's K/V
        head = self._runner.decoder.head
        self._short_head = head if isinstance(head, ShortHead) else None
        self.stops_on_device = self._runner.can_chain
        self.max_context = min(ctx.max_context, self._runner.decoder.config.max_context)
        self.rounds: list[DraftRound] = []

    @classmethod
    def problem(cls, ctx: DraftContext) -> BadRequest | None:
        return ctx.draft_problem(f"the drafter {cls.name!r}", through_text=False)

    # -- the contract --------------------------------------------------------------------------------------------------

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        self.rounds = []
        trees = [TreeBuilder(request, self.name) for request in requests]
        ready = [tree for tree in trees if self._fits(tree.request) and self._catch_up(tree.request)]
        if ready and not self._grow_chains(ready):
            self._first_round(ready)
            while growing := [(tree, nodes) for tree in ready if (nodes := self._next_nodes(tree))]:
                self._round(growing)
        for tree in ready:
            self._states[tree.request.seq_id].run = tree.straight()
        return [tree.draft for tree in trees]

    def _fits(self, request: DraftRequest) -> bool:
        return len(request.tokens) + max(request.max_depth, request.max_nodes) < self.max_context

    def finish(self, seq_id: int, tokens: list[int], num_prompt: int) -> None:
        self._states.pop(seq_id, None)
        self._draft_kv.drop_partial(seq_id)

    def time_round(self, tokens: int, context: int) -> float:
        return self._runner.time_forward(tokens, context, repeats=2, prompt=tokens > MAX_DECODE_TOKENS)

    def same_forwards(self, other: Drafter) -> bool:
        return isinstance(other, ModelDrafter) and other._runner is self._runner

    def catch_up_tokens(self, request: DraftRequest) -> int:
        """Tokens of a sequence that the draft model has not run yet."""
        return len(request.tokens) - self._state(request).valid

    # -- catching up with the target -----------------------------------------------------------------------------------

    def _state(self, request: DraftRequest) -> _State:
        """What is computed for the tokens as they are now: accepted drafts stay, whole shared pages count."""
        state = self._states.get(request.seq_id)
        if state is None or state.pages is not request.pages:
            size = self._pool.page_size
            full = self._draft_kv.full_pages(request.pages, size)
            state = self._states[request.seq_id] = _State(request.pages, full * size)
        valid = state.valid
        for token in state.run:
            if valid >= len(request.tokens) - 1 or request.tokens[valid] != token:
                break
            valid += 1
        self._advance(state, valid)
        state.run, state.valid = [], min(valid, len(request.tokens) - 1)
        return state

    def _catch_up(self, request: DraftRequest, most: int = 0) -> bool:
        """Run all but the last few missing tokens, `most` where that is given; False where a long prompt needs another
        step."""
        state, tokens, most = self._state(request), request.tokens, most or self.max_unread_tokens
        missing = len(tokens) - state.valid
        if self._short_head is not None:
            self._short_head.add_seen(tokens if state.fresh else tokens[state.valid :])
            state.fresh = False
        if missing > most:
            count = min(missing - 1, MAX_CATCH_UP_TOKENS)
            half = self._draft_kv.partial_forward(request.seq_id, state.pages, state.valid)
            count = count if half is None else min(count, half.end - state.valid)
            # What one launch does not take is a recorded pass: a graph captured for its number of rows takes 50 ms in
            # the middle of an answer, kernels launched one by one 9 ms (docs/log.md).
            ids, rows = tokens[state.valid : state.valid + count], self._runner.decoding_rows
            many = rows is not None and count > rows
            span = Span(ids, state.valid, state.pages, (), prompt=many)
            if half is None:
                self._runner.forward([span])
            else:  # the prompt was read up to some layer when its own K/V was drafted
                lo = state.valid - half.first
                self._runner.resume(span, half.x[lo : lo + count], half.layer)
            self._advance(state, state.valid + count)
        return len(tokens) - state.valid <= most

    def _advance(self, state: _State, valid: int) -> None:
        size = self._pool.page_size
        for page in range(state.valid // size, valid // size):
            self._draft_kv.filled[state.pages[page]] = size
        state.valid = valid

    # -- growing -------------------------------------------------------------------------------------------------------

    def _grow_chains(self, ready: list[TreeBuilder]) -> bool:
        """All rounds in one launch; False, and nothing happens, where the device cannot or drafts are sampled."""
        if any(tree.request.sampled or tree.request.context.shaped for tree in ready):
            return False
        spans = [self._unread_span(tree.request) for tree in ready]
        start = time.perf_counter()
        depth = max(tree.request.max_depth for tree in ready)
        chains = self._runner.chains(spans, depth, ready[0].request.min_path_probs)
        if chains is None:
            return False
        steps = len(chains.tokens[0])
        self.rounds = [DraftRound(len(ready), len(ready), (time.perf_counter() - start) / steps)] * steps
        for tree, tokens, probs in zip(ready, chains.tokens, chains.probs, strict=True):
            node = ROOT
            for token, prob in list(zip(tokens, probs, strict=True))[: tree.request.max_depth]:
                node = tree.add(token, node, prob)
            tree.entries = list(range(len(tokens) - 1))[: tree.request.max_depth]  # the last token did not run
            self._advance(self._states[tree.request.seq_id], len(tree.request.tokens))
        return True

    def _unread_span(self, request: DraftRequest) -> Span:
        valid = self._states[request.seq_id].valid
        ids = request.tokens[valid:]
        return Span(ids, valid, request.pages, range(len(ids) - 1, len(ids)))

    def _first_round(self, ready: list[TreeBuilder]) -> None:
        """One forward of the tokens that the draft model has not run, and of free drafters' candidates after them."""
        spans = []
        for tree in ready:
            span = self._unread_span(tree.request)
            tree.entries = [] if tree.request.sampled else self._add_candidates(tree)
            span.ids = [*span.ids, *(tree.draft.tokens[n] for n in tree.entries)]
            span.logits_indices = range(span.logits_indices[0], len(span.ids))
            span.tree_first, span.parents = len(tree.request.tokens), tree.parents([])
            spans.append(span)
        logits = self._runner.forward(spans).logits
        at = 0
        for tree in ready:
            nodes = [ROOT, *tree.entries]
            self._expand(tree, nodes, logits[at : at + len(nodes)])
            self._advance(self._states[tree.request.seq_id], len(tree.request.tokens))
            at += len(nodes)

    def _add_candidates(self, tree: TreeBuilder) -> list[int]:
        """Candidates to be scored in the same forward: parents come first, so the first nodes are a tree themselves."""
        candidates = tree.request.candidates or Draft()
        places: dict[int, int] = {ROOT: ROOT}
        for node in range(min(MAX_SCORED_CANDIDATES, tree.request.max_nodes, len(candidates))):
            places[node] = tree.add(candidates.tokens[node], places[candidates.parents[node]], 1.0)
        return list(range(len(tree.draft)))

    def _next_nodes(self, tree: TreeBuilder) -> list[int]:
        """Nodes whose children are worth another forward: the most probable, and others that add little to its cost."""
        room = tree.request.max_nodes - len(tree.entries)
        nodes = sorted(tree.open_nodes(), key=lambda n: -tree.path[n])
        if room <= 0 or not nodes:
            return []
        keep_drafting = tree.request.keep_drafting
        if keep_drafting is not None and not keep_drafting(tree.path[nodes[0]], tree.depth[nodes[0]]):
            return []
        if tree.request.sampled:  # all branches go on: their length must not depend on what was sampled
            return nodes[:room]
        side = nodes[1 : min(1 + self.side_branches, room)]
        return [nodes[0], *(n for n in side if tree.path[n] > MIN_SIDE_PATH_PROB)]

    def _round(self, growing: list[tuple[TreeBuilder, list[int]]]) -> None:
        spans = []
        for tree, nodes in growing:
            tree_first = len(tree.request.tokens)
            first, ids = tree_first + len(tree.entries), [tree.draft.tokens[n] for n in nodes]
            spans.append(Span(ids, first, tree.request.pages, range(len(ids)), tree_first, tree.parents(nodes)))
        start = time.perf_counter()
        logits = self._runner.forward(spans).logits
        ran = sum(len(nodes) for _, nodes in growing)
        self.rounds.append(DraftRound(ran, len(growing), time.perf_counter() - start))
        at = 0
        for tree, nodes in growing:
            tree.entries += nodes
            self._expand(tree, nodes, logits[at : at + len(nodes)])
            at += len(nodes)

    def _expand(self, tree: TreeBuilder, nodes: list[int], logits: Tensor) -> None:
        """Add children of nodes that just ran: their most probable tokens, or sampled ones."""
        probs = self._probs(tree, nodes, logits)  # [nodes, V]
        if tree.request.sampled:
            for node, q in zip(nodes, probs, strict=True):
                tree.add_sampled(node, q)
            return
        rows = {node: row for row, node in enumerate(nodes)}
        for node in range(len(tree.draft)):  # candidates get the draft model's own probability
            if tree.draft.parents[node] in rows:
                tree.rescore(node, float(probs[rows[tree.draft.parents[node]], tree.draft.tokens[node]]))
        top = probs.topk(self.children, -1)
        for node, tokens, probs in zip(nodes, top.indices.tolist(), top.values.tolist(), strict=True):
            tree.add_most_probable(node, tokens, probs)

    def _probs(self, tree: TreeBuilder, nodes: list[int], logits: Tensor) -> Tensor:
        """The draft's distribution over the target's tokens, penalties, grammar and temperature included."""
        params, logits = tree.request.context.params, logits[:, : self._vocab]
        shaped = shape(logits, [tree.row(node) for node in nodes]) if tree.request.context.shaped else logits
        if tree.request.sampled:
            return distribution(shaped, [params] * len(nodes))
        return torch.softmax(shaped if params.greedy else shaped / params.temperature, -1)


@register
class ChainDrafter(ModelDrafter):
    """`ModelDrafter` with one path only."""

    name = "model-chain"
    side_branches = 0
    children = 1
