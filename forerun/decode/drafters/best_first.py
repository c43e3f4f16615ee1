"""Trees out of what one pass says of several positions: the most probable path first, within a budget of nodes.

A pass gives a distribution of each position to come; some drafters correct it by the token before. The node that is
added next is the one whose path is the most probable of all that could be (DDTree). Knows no model.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from forerun.core import ROOT
from forerun.decode.drafters.tree_builder import TreeBuilder
from forerun.decode.sampling import distribution, shape
from forerun.models.cpu import ranking

MAX_TREE_NODES = 48  # of a tree before those that pay are selected: a few times as many as a forward verifies at best
MIN_NODE_PATH_PROB = 0.004  # of a node beside the first one: less cannot pay on any machine
MIXED_TOKENS = 4  # before a node, that a mixer reads
MAX_CHILDREN = 4  # most probable tokens that may become children of a node

Ranked = Sequence[tuple[int, float]]  # tokens with their probabilities, the most probable first


class Marginals(Protocol):
    """What a pass says of the positions to come; depth 0 is the first of them."""

    depth: int

    def row(self, depth: int, before: int) -> Tensor:
        """Logits [V] after the token `before`."""
        ...

    def top(self, depth: int, before: int) -> Ranked:
        """The most probable tokens there, without what penalties or a grammar make of them."""
        ...


class PlainMarginals:
    """Positions that do not depend on the token before: logits [depth, V], and the most probable of each."""

    def __init__(self, logits: Tensor, ranked: Sequence[Ranked]) -> None:
        self.depth, self._logits, self._ranked = len(ranked), logits, ranked

    def row(self, depth: int, before: int) -> Tensor:
        return self._logits[depth]

    def top(self, depth: int, before: int) -> Ranked:
        return self._ranked[depth]


def temperatures(trees: Sequence[TreeBuilder], device: torch.device) -> Tensor | None:
    """Of each tree, by which its logits are divided before probabilities are read off; None where all are 1."""
    params = [tree.request.context.params for tree in trees]
    if all(each.greedy or each.temperature == 1.0 for each in params):
        return None
    return torch.tensor([1.0 if each.greedy else each.temperature for each in params], device=device)


def likeliest(logits: Tensor, count: int) -> Tensor:
    """[N, 2 * count] on the host: of every row [N, V] the most probable tokens, best first, then their
    probabilities."""
    if logits.is_cuda:
        from forerun.models.cuda import most_probable as kernels

        return kernels.most_probable(logits, count).cpu()
    tokens, probs = ranking.likeliest(logits, count) or logits.softmax(-1).topk(count, -1)[::-1]
    return torch.cat((tokens.double(), probs.double().clamp(max=1.0)), -1)


def most_probable(logits: Tensor) -> list[Ranked]:
    """Tokens and probabilities of every row [N, V], read in one copy."""
    count = min(MAX_CHILDREN, logits.shape[-1])
    found = likeliest(logits, count).tolist()
    return [[(int(row[i]), row[count + i]) for i in range(count) if row[count + i] > 0.0] for row in found]


class Mixer(Protocol):
    """What else is known of the tokens to come."""

    def mix(self, tail: Sequence[int], ranked: Ranked) -> Ranked:
        """The most probable tokens after the last tokens `tail`, where a pass alone says `ranked`."""
        ...


def grow(tree: TreeBuilder, marginals: Marginals, mixer: Mixer | None = None) -> None:
    """The tree of a request, drawn at random where it asks for that."""
    if tree.request.sampled:
        _grow_sampled(tree, marginals)
        return
    shaped = tree.request.context.shaped

    def children(node: int, depth: int) -> Ranked:
        before = _before(tree, node)
        if shaped:
            return _shaped_top(tree, node, marginals.row(depth, before))
        ranked = marginals.top(depth, before)
        return ranked if mixer is None else mixer.mix(_tail(tree, node), ranked)[:MAX_CHILDREN]

    _grow_most_probable(tree, marginals.depth, children)


def _before(tree: TreeBuilder, node: int) -> int:
    return tree.request.tokens[-1] if node == ROOT else tree.draft.tokens[node]


def _tail(tree: TreeBuilder, node: int) -> list[int]:
    """The last tokens before a child of this node."""
    path = [] if node == ROOT else [tree.draft.tokens[i] for i in tree.draft.path(node)]
    return [*tree.request.tokens[-MIXED_TOKENS:], *path][-MIXED_TOKENS:]


def _grow_most_probable(tree: TreeBuilder, depth: int, children: Callable[[int, int], Ranked]) -> None:
    limit = min(tree.request.max_nodes, MAX_TREE_NODES)
    ranked = {ROOT: children(ROOT, 0)}
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
        if tree.depth[node] < depth:
            ranked[node] = children(node, tree.depth[node])
            if ranked[node]:
                heapq.heappush(heap, (-tree.path[node] * ranked[node][0][1], pushed + 1, node, 0))
        pushed += 2


def _shaped_top(tree: TreeBuilder, node: int, logits: Tensor) -> Ranked:
    """The most probable tokens after a node where penalties or a grammar count the tokens before it."""
    params = tree.request.context.params
    shaped = shape(logits[None], [tree.row(node)])[0]
    probs = torch.softmax(shaped if params.greedy else shaped / params.temperature, -1)
    top = probs.topk(min(MAX_CHILDREN, len(probs)))
    found = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return [(token, min(1.0, prob)) for token, prob in found if prob > 0.0]  # none: a grammar's dead end


def _grow_sampled(tree: TreeBuilder, marginals: Marginals) -> None:
    """Children drawn at random, level by level: how many there are does not depend on what was drawn."""
    level, params = [ROOT], tree.request.context.params
    for depth in range(marginals.depth):
        first = len(tree.draft)
        rows = torch.stack([marginals.row(depth, _before(tree, node)) for node in level])
        shaped = shape(rows, [tree.row(node) for node in level])
        for node, q in zip(level, distribution(shaped, [params] * len(level)), strict=True):
            tree.add_sampled(node, q)
        level = list(range(first, len(tree.draft)))
        if not level:
            return
