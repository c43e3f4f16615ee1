"""What is drafted (`Draft`) and what a verifier makes of it (`Verdict`)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

ROOT = -1  # the parent of a draft's first tokens: the last token of the sequence itself


@dataclass
class Draft:
    """Proposed tokens that may follow a sequence, as a tree of tokens: parents come before their children.

    `probabilities[i]` is the drafter's own estimate that node i is accepted once its parent is. Deterministic drafters
    leave `proposals` empty. A drafter that drew the children of a node at random, one after the other without
    replacement, in the order they have here, gives the distribution it drew them from: `proposals[node]`; such a draft
    is lossless only whole, so it is never pruned or merged.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    probs: list[float] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)  # names of the drafters
    proposals: dict[int, torch.Tensor] = field(default_factory=dict)  # node or ROOT -> [V] float32

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, token: int, parent: int, prob: float, source: str) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.probs.append(prob)
        self.sources.append(source)
        return len(self.tokens) - 1

    @classmethod
    def chain(cls, tokens: list[int], probs: list[float], source: str) -> Draft:
        return cls(list(tokens), list(range(ROOT, len(tokens) - 1)), list(probs), [source] * len(tokens))

    def path(self, node: int) -> list[int]:
        """Nodes from the first to `node`; empty for ROOT."""
        path = []
        while node != ROOT:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def children(self) -> dict[int, list[int]]:
        """The children of every node that has some, in their order."""
        found: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            found.setdefault(parent, []).append(node)
        return found

    def depths(self) -> list[int]:
        """1 for the first tokens."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return depths

    def problem(self, vocab: int) -> str | None:
        """What is wrong with it, if anything: drafters may come from outside."""
        if not len(self.tokens) == len(self.parents) == len(self.probs) == len(self.sources):
            return "tokens, parents, probabilities and sources differ in length"
        for i, (token, parent, prob) in enumerate(zip(self.tokens, self.parents, self.probs, strict=True)):
            if not isinstance(token, int) or not 0 <= token < vocab:
                return f"node {i} has token {token!r}, the vocabulary has {vocab}"
            if not isinstance(parent, int) or not ROOT <= parent < i:
                return f"node {i} has parent {parent!r}, which does not come before it"
            if not 0.0 <= prob <= 1.0:
                return f"node {i} has probability {prob!r}"
        siblings = list(zip(self.parents, self.tokens, strict=True))
        return "two children of one node have the same token" if len(set(siblings)) < len(siblings) else None


@dataclass(frozen=True)
class Verdict:
    """What a verifier made of a draft: the accepted path, and the token that follows it."""

    path: list[int]  # nodes, each the child of the one before
    next_token: int
