"""A draft model that drafts several tokens in one forward: mask tokens after the sequence stand for those to come.

A forward of the sequence's last tokens and k - 1 masks gives k distributions, each of one position whatever the tokens
between are (PARD). Trees grow out of these marginals, the most probable path first, within a budget of nodes (DDTree).
Masks leave nothing: the entries they wrote are overwritten by the next tokens that come. The model's weights were
trained for it (`forerun train drafter`), and still draft chains. Knows no verifier and no target.
"""

from __future__ import annotations

import heapq
import time

import torch
from torch import Tensor

from forerun.core import ROOT, Draft
from forerun.decode.draft_context import DraftContext
from forerun.decode.drafters.base import DraftRequest, DraftRound, register
from forerun.decode.drafters.model import ModelDrafter
from forerun.decode.drafters.tree_builder import TreeBuilder
from forerun.decode.sampling import distribution, shape
from forerun.errors import BadRequest

MAX_TREE_NODES = 48  # of a tree before those that pay are selected: a few times as many as a forward verifies at best
MIN_NODE_PATH_PROB = 0.004  # of a node beside the first one: less cannot pay on any machine


@register
class ParallelDrafter(ModelDrafter):
    name = "parallel"
    max_unread_tokens = 16  # a whole accepted draft runs along with the masks: one forward a step
    children = 4

    def __init__(self, ctx: DraftContext) -> None:
        super().__init__(ctx)
        assert ctx.draft is not None and ctx.draft.parallel is not None
        self._mask, self.tokens_per_round = ctx.draft.parallel.mask_token, ctx.draft.parallel.tokens
        self.stops_on_device = False

    @classmethod
    def problem(cls, ctx: DraftContext) -> BadRequest | None:
        problem = super().problem(ctx)
        if problem is None and ctx.draft is not None and ctx.draft.parallel is None:
            return BadRequest(
                f"{ctx.draft.source} was not trained to draft several tokens in one forward",
                "train it: forerun train drafter --kind parallel; or use the drafter `model`",
            )
        return problem

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        self.rounds = []
        trees = [TreeBuilder(request, self.name) for request in requests]
        ready = [tree for tree in trees if self._fits(tree.request) and self._catch_up(tree.request)]
        if ready:
            self._draft_block(ready)
        return [tree.draft for tree in trees]

    def _depth(self, request: DraftRequest) -> int:
        return min(request.max_depth, request.max_nodes, self.tokens_per_round)

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
        logits = self._runner.forward(spans).logits[:, : self._vocab]
        top = self._most_probable(ready, logits)  # reading it waits for the device
        rows = sum(len(span.ids) for span in spans)
        self.rounds.append(DraftRound(rows, len(ready), time.perf_counter() - start))
        at = 0
        for tree in ready:
            depth = self._depth(tree.request)
            own = logits[at : at + depth]
            if tree.request.sampled:
                self._grow_sampled(tree, own)
            else:
                self._grow(tree, own, top[at : at + depth])
            self._advance(self._states[tree.request.seq_id], len(tree.request.tokens))
            at += depth

    def _most_probable(self, ready: list[TreeBuilder], logits: Tensor) -> list[list[tuple[int, float]]]:
        """Tokens and probabilities of every row, without what depends on the tokens before."""
        temperatures = [
            1.0 if tree.request.context.params.greedy else tree.request.context.params.temperature
            for tree in ready
            for _ in range(self._depth(tree.request))
        ]
        if any(temperature != 1.0 for temperature in temperatures):
            logits = logits / torch.tensor(temperatures, device=logits.device)[:, None]
        top = logits.softmax(-1).topk(min(self.children, logits.shape[-1]), -1)
        found = torch.cat((top.indices.double(), top.values.double().clamp(max=1.0)), -1).tolist()  # one copy
        count = top.indices.shape[-1]
        return [[(int(row[i]), row[count + i]) for i in range(count)] for row in found]

    def _grow(self, tree: TreeBuilder, logits: Tensor, top: list[list[tuple[int, float]]]) -> None:
        """Best first: the node whose path is the most probable of all that could come next."""
        shaped, limit = tree.request.context.shaped, min(tree.request.max_nodes, MAX_TREE_NODES)
        ranked = {ROOT: self._children(tree, ROOT, logits[0]) if shaped else top[0]}
        # (-path, tie, parent, rank): ties keep the order in which they came
        heap = [(-ranked[ROOT][0][1], 0, ROOT, 0)] if ranked[ROOT] else []
        pushed = 1
        while heap and len(tree.draft) < limit:
            path, _, parent, rank = heapq.heappop(heap)
            if len(tree.draft) and -path < MIN_NODE_PATH_PROB:
                break
            token, prob = ranked[parent][rank]
            node = tree.add(token, parent, prob)
            if rank + 1 < len(ranked[parent]):
                above = tree.path[parent] if parent != ROOT else 1.0
                heapq.heappush(heap, (-above * ranked[parent][rank + 1][1], pushed, parent, rank + 1))
            depth = tree.depth[node]
            if depth < len(top):
                ranked[node] = self._children(tree, node, logits[depth]) if shaped else top[depth]
                if ranked[node]:
                    heapq.heappush(heap, (-tree.path[node] * ranked[node][0][1], pushed + 1, node, 0))
            pushed += 2

    def _children(self, tree: TreeBuilder, node: int, logits: Tensor) -> list[tuple[int, float]]:
        """The most probable tokens after a node where penalties or a grammar count the tokens before it."""
        probs = self._probs(tree, [node], logits[None])[0]
        top = probs.topk(min(self.children, len(probs)))
        found = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        return [(token, min(1.0, prob)) for token, prob in found if prob > 0.0]  # none: a grammar's dead end

    def _grow_sampled(self, tree: TreeBuilder, logits: Tensor) -> None:
        """Children drawn at random, level by level: how many there are does not depend on what was drawn."""
        level = [ROOT]
        for row in logits:
            first = len(tree.draft)
            shaped = shape(row.expand(len(level), -1), [tree.row(node) for node in level])
            for node, q in zip(level, distribution(shaped, [tree.request.context.params] * len(level)), strict=True):
                tree.add_sampled(node, q)
            level = list(range(first, len(tree.draft)))
            if not level:
                return
