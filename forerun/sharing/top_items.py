"""The k best items of a trie after a prompt, with exact scores: best-first branch and bound, or a beam.

An item's score is the log-probability of its tokens after the prompt, so the score of a beginning bounds all items
below it. The likeliest beginnings run first, many in one forward over one tree, those with few items below them
together with all of these; what cannot be among the k best any more never runs. A beam goes level by level with the
likeliest beginnings and drops the others: quicker, and its items are the best only where what it dropped says so.
Knows tokens only.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from forerun.core import ROOT, SamplingParams
from forerun.decode.trie import TokenTrie
from forerun.decode.trie_answer import check_vocabulary
from forerun.errors import BadRequest
from forerun.llm import LLM
from forerun.runtime.answer_tree import AnswerTree

Trie = TokenTrie | str | Path  # one that is open, or its file
FORWARD_NODES = 48  # of one forward: twice the seconds of one node on two cores, and 20 to 100 times the tokens
MAX_BEAM = 1 << 16  # beginnings; their K/V of all levels lies in the pool, which mostly ends sooner
WHOLE_SUBTREE_NODES = 6  # below a beginning: so many run with it, before it is known whether they are good


@dataclass(frozen=True)
class RankedItem:
    item: int  # its number in the trie
    name: str
    token_ids: list[int]
    score: float  # log-probability of its tokens after the prompt


@dataclass(frozen=True)
class TopItems:
    """The best items, best first, and what finding them took."""

    items: list[RankedItem]
    forwards: int  # beside the prompt's
    scored_tokens: int
    seconds: float
    proven: bool = True  # whether no other item scores higher; False: a beam dropped beginnings that might lead to one


def top_items(
    llm: LLM,
    prompt_ids: Sequence[int],
    trie: Trie,
    k: int,
    end: bool = False,
    beam: int | None = None,
) -> TopItems:
    """`end`: scores include the token that ends the answer after the item. `beam`: beginnings of one length that go on;
    None: as many as it takes."""
    trie = llm.engine.intake.open_trie(trie)
    if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= trie.num_items:
        raise BadRequest(f"k is {k!r:.40}, the trie has {trie.num_items} items", "choose k from 1 to that number")
    if beam is not None and not (type(beam) is int and k <= beam <= MAX_BEAM):
        raise BadRequest(f"beam is {beam!r:.40}, allowed is from k ({k}) to {MAX_BEAM}", "use k, or some times k")
    check_vocabulary(trie, llm.config.vocab_size)
    llm.engine.intake.check(list(prompt_ids), SamplingParams())
    start = time.perf_counter()
    with llm.driver.lease() as lease:
        tree, ends = AnswerTree(lease, list(prompt_ids)), llm.engine.intake.end_ids if end else []
        search = _Search(tree, trie, k, ends) if beam is None else _Beam(tree, trie, k, ends, beam)
        search.run()
    items = [RankedItem(int(trie.items[n]), trie.name(int(trie.items[n])), trie.path(n), s) for s, n in search.best()]
    return TopItems(items, search.forwards, len(tree), time.perf_counter() - start, search.proven)


def _children(trie: TokenTrie, nodes: Sequence[int], logits: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The children of nodes whose logits [N, V] are given, their nodes' indices, and their log-probabilities."""
    every, rows = trie.children_of(nodes)
    at, tokens = (torch.from_numpy(a.astype(np.int64)).to(logits.device) for a in (rows, trie.tokens[every]))
    logprobs = logits[at, tokens].float() - torch.logsumexp(logits.float(), -1)[at]
    return every, rows, logprobs.double().cpu().numpy()


def _end_logprob(logits: Tensor, ends: list[int]) -> float:
    """Of a row [V]: that the answer ends."""
    return float(torch.logsumexp(logits[ends].float(), -1) - torch.logsumexp(logits.float(), -1))


class _Beam:
    """Level by level, `width` beginnings."""

    def __init__(self, tree: AnswerTree, trie: TokenTrie, k: int, ends: list[int], width: int) -> None:
        self.tree, self.trie, self.k, self._ends, self._width = tree, trie, k, ends, width
        self.forwards = 0
        self._found: list[tuple[float, int]] = []
        self._dropped = -np.inf  # best score of a beginning that did not go on

    def best(self) -> list[tuple[float, int]]:
        return sorted(self._found, key=lambda found: (-found[0], found[1]))[: self.k]

    @property
    def proven(self) -> bool:
        return self.best()[-1][0] >= self._dropped

    def run(self) -> None:
        goes_on = (self.trie.starts[1:] > self.trie.starts[:-1]) | (len(self._ends) > 0)  # [N]
        logits, nodes, scores, places = self.tree.root_logits, np.array([0]), np.zeros(1), np.array([ROOT])
        while True:
            for row in np.flatnonzero(self.trie.items[nodes] >= 0).tolist() if self._ends else ():
                self._found.append((float(scores[row]) + _end_logprob(logits[row], self._ends), int(nodes[row])))
            children, rows, logprobs = _children(self.trie, nodes.tolist(), logits)
            below = scores[rows] + logprobs
            for place in np.flatnonzero(self.trie.items[children] >= 0).tolist() if not self._ends else ():
                self._found.append((float(below[place]), int(children[place])))
            inner = np.flatnonzero(goes_on[children])
            ranked = inner[np.argsort(-below[inner], kind="stable")]
            kept, left = ranked[: self._width], ranked[self._width :]
            self._dropped = max(self._dropped, float(below[left[0]])) if len(left) else self._dropped
            if not len(kept):
                return
            first, nodes, scores = len(self.tree), children[kept], below[kept]
            logits = self.tree.run(places[rows[kept]].tolist(), self.trie.tokens[nodes].tolist())
            places = first + np.arange(len(kept))
            self.forwards += 1


@dataclass(frozen=True)
class _Siblings:
    """Children of one node that ran, best first."""

    nodes: np.ndarray
    scores: np.ndarray


class _Search:
    """Best first, until nothing that is left can be among the k best."""

    proven = True

    def __init__(self, tree: AnswerTree, trie: TokenTrie, k: int, ends: list[int]) -> None:
        """`ends`: tokens one of which counts as part of each item; empty: none does, and leaves need not run."""
        self.tree, self.trie, self.k, self._ends = tree, trie, k, ends
        self.forwards = 0
        self._places = {0: ROOT}  # trie node -> tree node
        self._inner = trie.inner_counts() if not ends else trie.node_counts()
        self._best: list[tuple[float, int]] = []  # heap of the k best (score, node) so far
        self._open: list[tuple[float, int, _Siblings, int]] = []  # heap: -score, ticket, siblings, index
        self._ticket = itertools.count()
        self._record([0], [0.0], tree.root_logits)

    def best(self) -> list[tuple[float, int]]:
        return sorted(self._best, key=lambda found: (-found[0], found[1]))

    @property
    def _threshold(self) -> float:
        return self._best[0][0] if len(self._best) == self.k else -np.inf

    def run(self) -> None:
        while batch := self._next_batch():
            roots = [node for node, _ in batch]
            scores = dict(batch)
            order = [node for root in roots for node in self._with_subtree(root)]
            parents = [self._places[self.trie.parent(node)] for node in self._place(order)]
            logits = self.tree.run(parents, self.trie.tokens[order].tolist())
            self.forwards += 1
            self._record(order, [scores.get(node, np.nan) for node in order], logits)

    def _next_batch(self) -> list[tuple[int, float]]:
        batch: list[tuple[int, float]] = []
        rows = 0
        while self._open and rows < FORWARD_NODES and -self._open[0][0] > self._threshold:
            _, _, siblings, index = heapq.heappop(self._open)
            self._push(siblings, index + 1)
            node = int(siblings.nodes[index])
            batch.append((node, float(siblings.scores[index])))
            rows += len(self._with_subtree(node))
        return batch

    def _with_subtree(self, root: int) -> list[int]:
        """A node, and all below it that have children, where these are few."""
        if self._inner[root] > WHOLE_SUBTREE_NODES:
            return [root]
        found = [root]
        for node in found:
            children = self.trie.children(node)
            found += [n for n in range(children.start, children.stop) if self._inner[n] > 0]
        return found

    def _place(self, order: list[int]) -> list[int]:
        for node in order:
            self._places[node] = len(self._places) - 1
        return order

    def _record(self, order: list[int], scores: list[float], logits: Tensor) -> None:
        """Scores of the children of nodes that ran, parents first; those that ran as well are not open any more."""
        known = dict(zip(order, scores, strict=True))
        every, rows, logprobs = _children(self.trie, order, logits)
        bounds = np.searchsorted(rows, np.arange(len(order) + 1))
        for row, node in enumerate(order):
            own = slice(bounds[row], bounds[row + 1])
            nodes, below = every[own], logprobs[own] + known[node]
            if self._ends and self.trie.items[node] >= 0:
                self._add(known[node] + _end_logprob(logits[row], self._ends), node)
            found = () if self._ends else (self.trie.items[nodes] >= 0) & (below > self._threshold)
            for place in np.flatnonzero(found).tolist():
                self._add(float(below[place]), int(nodes[place]))
            inner = self._inner[nodes] > 0
            if any(n in self._places for n in nodes[inner][:1].tolist()):
                known |= dict(zip(nodes.tolist(), below.tolist(), strict=True))  # they ran with this node
                continue
            ranked = np.flatnonzero(inner)[np.argsort(-below[inner], kind="stable")]
            self._push(_Siblings(nodes[ranked], below[ranked]), 0)

    def _add(self, score: float, node: int) -> None:
        heapq.heappush(self._best, (score, node))
        if len(self._best) > self.k:
            heapq.heappop(self._best)

    def _push(self, siblings: _Siblings, index: int) -> None:
        if index < len(siblings.nodes):
            score = float(siblings.scores[index])
            heapq.heappush(self._open, (-score, next(self._ticket), siblings, index))
