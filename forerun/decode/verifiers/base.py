"""The acceptance contract: a draft and the target's distributions in, a verdict out.

A verifier knows no drafter, no engine and no model: it reads a `TargetView` and draws from an `Rng`, so that the checks
can put a tiny vocabulary and enumerated probabilities in their place. It is lossless if, whatever was drafted, the
tokens of its verdict (path, then next token) are distributed as the target's own; `forerun check lossless` verifies
this by enumeration.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Protocol

from torch import Tensor

from forerun.core import Draft, Verdict
from forerun.decode.sampling import Rng


class TargetView(Protocol):
    """The target's distributions at the root and at every node of one draft."""

    def probs(self, node: int) -> Tensor:
        """Distribution [V] of the token after `node` (or ROOT); one-hot where sampling is greedy."""
        ...

    def draw(self, node: int) -> int:
        """The token that plain decoding draws after `node`, with the random number of its position."""
        ...


class Verifier(ABC):
    name: ClassVar[str]
    lossless: ClassVar[bool] = True
    uses_proposals: ClassVar[bool] = False  # whether it accepts more of drafts that were sampled (`Draft.proposals`)

    @abstractmethod
    def verify(self, draft: Draft, target: TargetView, rng: Rng) -> Verdict: ...
