"""The target model's word on one draft: its distribution at the root and at every node, computed when asked for.

`Target` and `Rng` are all that a verifier sees, so that checks can put a tiny vocabulary and enumerated probabilities
in their place. Knows no engine and no drafter.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from forerun.core import Draft
from forerun.decode.sampling import Context, Row, choose, distribution, draw, shape, uniform

DICE = 1  # stream of numbers that accept and reject
DRAFTING = 2  # stream of numbers that drafters draw with


class Rng(Protocol):
    """Chance, in the two forms that verifiers need."""

    def flip(self, prob: float) -> bool:
        """True with this probability."""
        ...

    def pick(self, weights: Tensor) -> int:
        """An index, with probability proportional to its weight."""
        ...


class SeededRng:
    """Numbers of one step of one sequence: no other step, and nothing else in this one, sees the same."""

    def __init__(self, seed: int, position: int, stream: int = DICE) -> None:
        self._seed, self._position, self._stream, self._count = seed, position, stream, 0

    def flip(self, prob: float) -> bool:
        return self._next() < prob

    def pick(self, weights: Tensor) -> int:
        return draw(weights[None], [self._next()])[0]

    def _next(self) -> float:
        self._count += 1
        return uniform(self._seed, self._position, (self._count << 8) + self._stream)


class TargetView(Protocol):
    """What a verifier may ask about the target."""

    def probs(self, node: int) -> Tensor:
        """Distribution [V] of the token after `node` (or ROOT); all on the likeliest token where sampling is greedy."""
        ...

    def draw(self, node: int) -> int:
        """The token that plain decoding draws after `node`, with the number of its position."""
        ...


class Target:
    """One sequence's rows of a forward: row 0 belongs to the root, row 1 + i to node i."""

    def __init__(self, logits: Tensor, context: Context, draft: Draft, greedy: list[int] | None = None) -> None:
        self.logits, self.context, self.draft = logits, context, draft  # logits: [1 + nodes, V]
        self._greedy = greedy  # likeliest token of each row, where the forward found them on its way
        self._probs: dict[int, Tensor] = {}

    def row(self, node: int) -> Row:
        return Row(self.context, [self.draft.tokens[i] for i in self.draft.path(node)])

    def probs(self, node: int) -> Tensor:
        if node not in self._probs:
            shaped = shape(self.logits[node + 1][None], [self.row(node)])
            self._probs[node] = self._distribution(shaped)
        return self._probs[node]

    def _distribution(self, shaped: Tensor) -> Tensor:
        if self.context.params.greedy:
            one = shaped.new_zeros(shaped.shape[-1])
            one[shaped[0].argmax()] = 1.0
            return one
        return distribution(shaped, [self.context.params])[0]

    def draw(self, node: int) -> int:
        return draw_all([self], [node])[0]

    def known(self, node: int) -> int | None:
        """The next token where it is the likeliest and the forward found it already."""
        return self._greedy[node + 1] if self._greedy is not None and self.context.plain else None


def draw_all(targets: list[Target], nodes: list[int]) -> list[int]:
    """What plain decoding draws after each of these nodes, one per target, in one go."""
    tokens = [target.known(node) for target, node in zip(targets, nodes, strict=True)]
    rest = [i for i, token in enumerate(tokens) if token is None]
    if rest:
        logits = torch.stack([targets[i].logits[nodes[i] + 1] for i in rest])
        chosen = choose(logits, [targets[i].row(nodes[i]) for i in rest])
        for i, token in zip(rest, chosen, strict=True):
            tokens[i] = token
    return [token for token in tokens if token is not None]
