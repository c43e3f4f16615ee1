"""Answers that are items of a trie: which tokens may follow (`TrieAnswer`), and how probable it is that an item is
completed after each of them (`ConditionalAnswer`).

The second is what makes sampling exact: a mask alone draws each token as if all continuations were equally good.
With Z(u) the probability that the model, having written u, goes on to the end of some item, the next token x has the
probability p(x | u) Z(ux) / Z(u). Z comes from the model's log-probabilities at every node, from the leaves up. Knows
no engine and no grammar.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from forerun.decode.sampling import Futures
from forerun.decode.trie import TokenTrie
from forerun.errors import BadRequest, ForerunError

MIN_DRAFTED_SHARE = 0.02  # of a node's items: children with fewer are not drafted, so a level has 50 at most
_ENDED, _OUTSIDE = -1, -2  # nodes of paths that have ended, and of paths that the trie does not have


class TrieAnswer:
    """A trie and how far one answer has got in it; a `Constraint`. Where an item ends, one of `end_ids` may follow. A
    model without such tokens ends at the leaves."""

    def __init__(self, trie: TokenTrie, vocab_size: int, end_ids: Sequence[int]) -> None:
        self.trie, self.vocab_size, self.end_ids = trie, vocab_size, [i for i in end_ids if 0 <= i < vocab_size]
        check_vocabulary(trie, vocab_size)
        self.tokens: list[int] = []
        self._node = 0
        if not self.end_ids and len(inner := np.flatnonzero((trie.items >= 0) & (np.diff(trie.starts) > 0))):
            raise BadRequest(
                f"item {trie.name(int(trie.items[inner[0]]))!r:.60} begins another one, and the model has no token "
                "that ends an answer",
                "let all items end differently, for instance with a token of their own",
            )

    def node(self, path: Sequence[int]) -> int:
        """Where the answer so far and then `path` lead."""
        node = self._node
        for token in path:
            if node == _ENDED or (node >= 0 and self.trie.items[node] >= 0 and token in self.end_ids):
                node = _ENDED if token in self.end_ids else _OUTSIDE
            elif node >= 0:
                child = self.trie.child(node, token)
                node = _OUTSIDE if child is None else child
            if node == _OUTSIDE:
                break
        return node

    def following(self, node: int) -> tuple[np.ndarray, bool]:
        """The tokens that may follow a node, and whether an end may."""
        if node < 0:
            return self.trie.tokens[:0], True
        return self.trie.tokens[self.trie.children(node)], bool(self.trie.items[node] >= 0)

    def allowed(self, path: Sequence[int]) -> Tensor:
        """[V] bool; after an end, and after a path that the trie does not have, only ends."""
        tokens, may_end = self.following(self.node(path))
        mask = torch.zeros(self.vocab_size, dtype=torch.bool)
        mask[torch.from_numpy(tokens.astype(np.int64))] = True
        if may_end:
            mask[self.end_ids] = True
        return mask

    def advance(self, tokens: Sequence[int]) -> None:
        node = self.node(tokens)
        if node == _OUTSIDE:
            raise ForerunError(
                f"tokens {list(tokens)[:8]} at position {len(self.tokens)} of an answer are not in {self.trie.source}",
                "report this as a bug: a forbidden token was chosen",
            )
        self.tokens += tokens
        self._node = node

    def accepts(self, path: Sequence[int], tokens: Sequence[int]) -> int:
        """How many of the tokens, in their order, may follow `path`."""
        fits = (n for n in range(len(tokens), 0, -1) if self.node([*path, *tokens[:n]]) != _OUTSIDE)
        return next(fits, 0)

    def likely_children(self, node: int) -> list[tuple[int, float, int]]:
        """What may follow a node, as (token, probability, node): those that are worth drafting."""
        if node < 0:
            return []
        children, shares = self.trie.children(node), self._shares(node)
        found = [
            (int(self.trie.tokens[children.start + i]), float(shares[i]), children.start + i)
            for i in np.flatnonzero(shares >= MIN_DRAFTED_SHARE).tolist()
        ]
        rest = 1.0 - float(shares.sum())
        if self.end_ids and self.trie.items[node] >= 0 and rest >= MIN_DRAFTED_SHARE:
            found.append((self.end_ids[0], rest, _ENDED))
        return found

    def _shares(self, node: int) -> np.ndarray:
        """How probable the children of a node are, as far as that is known without the model: by their items."""
        counts = self.trie.item_counts()
        return np.asarray(counts[self.trie.children(node)] / counts[node])

    def ends_at(self, answer: Sequence[int]) -> bool:
        """Whether a whole answer is over without a token that ends it: at a leaf, where the model has no such token."""
        if self.end_ids:
            return False
        node = self.node(answer[len(self.tokens) :])
        return node >= 0 and not len(self.following(node)[0])


class NodeScores(NamedTuple):
    """Of every node of a trie: log Z, and the probability of its token after its parent, given that an item follows."""

    futures: np.ndarray  # [N] float64
    probs: np.ndarray  # [N] float64

    @classmethod
    def certain(cls, trie: TokenTrie) -> NodeScores:
        """Of a trie with one item."""
        return cls(np.zeros(len(trie)), np.ones(len(trie)))


class ConditionalAnswer(TrieAnswer, Futures):
    """`scores`: of every node of the trie, as `score_nodes` returns them."""

    def __init__(self, trie: TokenTrie, vocab_size: int, end_ids: Sequence[int], scores: NodeScores) -> None:
        super().__init__(trie, vocab_size, end_ids)
        self._scores = scores

    def _shares(self, node: int) -> np.ndarray:
        return self._scores.probs[self.trie.children(node)]

    def futures(self, path: Sequence[int]) -> Tensor:
        node = self.node(path)
        tokens, may_end = self.following(node)
        found = torch.full((self.vocab_size,), -math.inf, dtype=torch.float64)
        if node >= 0:
            values = self._scores.futures[self.trie.children(node)]
            found[torch.from_numpy(tokens.astype(np.int64))] = torch.from_numpy(values)
        if may_end:
            found[self.end_ids] = 0.0
        return found


def check_vocabulary(trie: TokenTrie, vocab_size: int) -> None:
    highest = int(trie.tokens.max())
    if highest >= vocab_size:
        hint = "build it with this model's tokenizer"
        raise BadRequest(f"the trie {trie.source} has token id {highest}, the vocabulary has {vocab_size}", hint)


def rows_to_score(trie: TokenTrie, end_ids: Sequence[int]) -> list[int]:
    """Nodes after which the model's distribution is needed, parents first: all, but leaves where nothing ends them."""
    return [n for n in range(len(trie)) if end_ids or trie.starts[n] < trie.starts[n + 1]]


def score_nodes(
    trie: TokenTrie, end_ids: Sequence[int], rows: Iterable[tuple[int, Tensor]], best: bool = False
) -> NodeScores:
    """`rows`: the log-probabilities [V] after each node of `rows_to_score`. `best`: Z of the likeliest item instead of
    the sum over items, for greedy answers: those are the likeliest item."""
    own = np.zeros(len(trie))  # log-probability of each node's token after its parent
    ends = np.where(trie.items >= 0, 0.0 if not end_ids else -math.inf, -math.inf)
    joined = np.max if best else np.logaddexp.reduce
    for node, row in rows:
        children = trie.children(node)
        tokens = torch.from_numpy(trie.tokens[children].astype(np.int64))
        own[children] = row[tokens.to(row.device)].double().cpu().numpy()
        if trie.items[node] >= 0 and end_ids:
            ends[node] = joined(row[list(end_ids)].double().cpu().numpy())
    found = ends.copy()
    for node in range(len(trie) - 1, -1, -1):
        children = trie.children(node)
        if children.start < children.stop:
            found[node] = joined([*(own[children] + found[children]), ends[node]])
    with np.errstate(invalid="ignore"):  # below what has no probability nothing has
        probs = np.nan_to_num(np.exp(own + found - found[np.maximum(trie.parents(), 0)]))
    return NodeScores(found, (probs >= 1.0).astype(np.float64) if best else probs)
