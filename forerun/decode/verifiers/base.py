"""The acceptance contract: a draft and the target's distributions in, a verdict out; and `match`, the default.

A verifier knows no drafter, no engine and no model: it reads a `TargetView` and draws from an `Rng`, so that the checks
can put a tiny vocabulary and enumerated probabilities in their place. It is lossless if, whatever was drafted, the
tokens of its verdict (path, then next token) are distributed as the target's own; `forerun check lossless` verifies
this by enumeration.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Protocol

from torch import Tensor

from forerun.core import ROOT, Draft, Verdict
from forerun.decode.sampling import Rng


class TargetView(Protocol):
    """The target's distributions at the root and at every node of one draft."""

    def probs(self, node: int) -> Tensor:
        """Distribution [V] of the token after `node` (or ROOT); one-hot where sampling is greedy."""

    def draw(self, node: int) -> int:
        """The token that plain decoding draws after `node`, with the random number of its position."""


class Verifier(ABC):
    name: ClassVar[str]
    lossless: ClassVar[bool] = True
    uses_proposals: ClassVar[bool] = False  # whether it accepts more of drafts that were sampled (`Draft.proposals`)
    spent: float = 0.0  # of a lossy rule: the sum of its distances from the target, over all positions so far

    @abstractmethod
    def verify(self, draft: Draft, target: TargetView, rng: Rng) -> Verdict: ...


class MatchVerifier(Verifier):
    """Draw the target's own next token and follow the draft as long as it contains it.

    The answer is token for token what plain decoding gives: greedy by nature, and sampled too, because every position
    has its own random number. For deterministic drafts no lossless rule accepts more: a token is accepted with exactly
    the probability that the target gives it.
    """

    name = "match"

    def verify(self, draft: Draft, target: TargetView, rng: Rng) -> Verdict:
        children = draft.children()
        node, path = ROOT, list[int]()
        while True:
            token = target.draw(node)
            child = next((c for c in children.get(node, ()) if draft.tokens[c] == token), None)
            if child is None:
                return Verdict(path, token)
            node = child
            path.append(child)
