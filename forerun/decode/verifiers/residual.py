"""The residual of the target's distribution at one node while its drafted children are rejected.

All sampling rules rest on one step. Let `share` be the probability that the answer goes on through this node and `p`
the target's distribution after it. A child drawn from `q` accounts for min(share * p, q); when it is rejected,
max(share * p - q, 0) is left, for the next child or to draw from. The two add up to share * p for every token, whatever
`q` is, so one more child never changes the answer's distribution, and by induction no draft does: it may have any shape
and grow in any order, as long as whether a child is drawn does not depend on the token that is drawn. A child without a
proposal was certain: its `q` has everything on one token.

Knows no tree and no verdict.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from forerun.decode.sampling import Rng
from forerun.decode.verifiers.base import TargetView
from forerun.decode.verifiers.pair import SiblingPair

_KL_HALVINGS = 24  # of the mass that is moved: far below the rounding of float32
RARE_PROB = 1e-4  # of a proposal: tokens drafted less often than this are not sorted


class Residual:
    """State at one node. Distributions are computed when first needed: many nodes never need theirs."""

    def __init__(
        self, target: TargetView, node: int, proposal: Tensor | None, share: float = 1.0, rare: float = RARE_PROB
    ) -> None:
        self.share, self.rare = share, rare
        self._target, self._node, self._proposal = target, node, proposal
        self._left: Tensor | None = None  # [V], sums to _mass
        self._mass = self._drawable = 1.0
        self._valid_proposal = True
        self._pair: SiblingPair | None = None

    @property
    def left(self) -> Tensor:
        if self._left is None:
            self._left = self._target.probs(self._node)
            self._mass = float(self._left.sum(dtype=torch.float64))
            if self._proposal is not None:
                self._valid_proposal = self._proposal.shape == self._left.shape
                self._proposal = self._proposal.to(self._left, copy=True)
                self._weigh()
        return self._left

    def draw(self, rng: Rng) -> int:
        return rng.pick(self.left)

    def shares(self, tokens: list[int]) -> list[tuple[int, float]]:
        """The next child, or the next two, in the order to try them: (index in `tokens`, probability that it or a node
        below it is accepted)."""
        if len(tokens) == 1:
            return [(0, self._prob(tokens[0]))]
        wanted = self._wanted()
        if not self._valid_proposal:
            return [(0, 0.0), (1, 0.0)]
        assert self._proposal is not None
        self._pair = SiblingPair(wanted, self._proposal, self.rare)
        return self._pair.shares(tokens)

    def reject(self, tokens: list[int]) -> float:
        """Reject the children of the last `shares`; returns the probability of that before they were drawn."""
        wanted = self._wanted()
        if not self._valid_proposal:
            return 1.0  # children that are ignored account for nothing
        if self._proposal is None:
            wanted[tokens[0]] = 0.0
        else:
            if self._pair is not None:
                wanted = self._pair.left()
            else:
                wanted.sub_(self._proposal, alpha=1.0 / self._drawable).clamp_min_(0.0)
            self._proposal[tokens] = 0.0  # children are drawn without replacement
            self._weigh()
        self._pair = None
        return self._keep(wanted)

    def lean(self, token: int, most: float) -> float:
        """Move up to `most` of what is left towards the next child's proposal; returns how much was moved.

        This is the smallest change that makes the child so much more probable to be accepted. Nothing goes to tokens
        that the target rules out: a grammar may forbid them.
        """
        towards = self._towards(token)
        moved = 0.0 if towards is None else min(most, towards[1])
        if towards is None or moved <= 0.0:
            return 0.0
        self._left = (self.left / self._mass).add_(towards[0], alpha=moved).clamp_min_(0.0)
        self._mass = float(self._left.sum(dtype=torch.float64))
        return moved

    def lean_within(self, token: int, most: float) -> float:
        """The same as far as the KL divergence from what is left stays within `most`; returns the divergence."""
        towards = self._towards(token)
        if towards is None or most <= 0.0:
            return 0.0
        start, step, low, high = (self.left / self._mass).double(), towards[0].double(), 0.0, towards[1]

        def after(moved: float) -> Tensor:
            return start.add(step, alpha=moved).clamp_min_(0.0)

        if _divergence(after(high), start) <= most:
            low = high
        for _ in range(_KL_HALVINGS if low < high else 0):  # the divergence grows with the mass that is moved
            middle = (low + high) / 2
            low, high = (middle, high) if _divergence(after(middle), start) <= most else (low, middle)
        spent, self._left = _divergence(after(low), start), after(low).to(self.left)
        self._mass = float(self._left.sum(dtype=torch.float64))
        return spent

    def _towards(self, token: int) -> tuple[Tensor, float] | None:
        """From what is left, as a distribution, to the next child's proposal: the change per unit of mass, and the mass
        that can be moved; None where there is none."""
        left = self.left / self._mass
        if not self._valid_proposal:
            return None
        if self._proposal is None:
            drawn = torch.zeros_like(left)
            drawn[token] = 1.0
        else:
            drawn = self._proposal / self._drawable
        gain = (drawn - left).clamp_min_(0.0).masked_fill_(left <= 0.0, 0.0)
        loss = (left - drawn).clamp_min_(0.0)
        room, excess = float(gain.sum(dtype=torch.float64)), float(loss.sum(dtype=torch.float64))
        return (gain.div_(room).sub_(loss, alpha=1.0 / excess), room) if room > 0.0 and excess > 0.0 else None

    def _prob(self, token: int) -> float:
        wanted = self.share * float(self.left[token]) / self._mass
        if not self._valid_proposal:
            return 0.0
        if self._proposal is None:
            return min(1.0, wanted)
        drawn = float(self._proposal[token]) / self._drawable
        return min(1.0, wanted / drawn) if drawn > 0.0 else 0.0

    def _wanted(self) -> Tensor:
        return self.left * (self.share / self._mass)  # the property first: it sets the mass

    def _keep(self, left: Tensor) -> float:
        mass = float(left.sum(dtype=torch.float64))
        rejected = mass + 1.0 - self.share
        if rejected <= 0.0:
            return 0.0  # only rounding rejects a child that is certain to be accepted: the residual stays as it was
        self.share = mass / rejected
        if mass > 0.0:
            self._left, self._mass = left, mass
        return rejected

    def _weigh(self) -> None:
        """Children drawn from something that is no distribution are ignored."""
        assert self._proposal is not None
        self._drawable = float(self._proposal.sum(dtype=torch.float64))
        self._valid_proposal = self._valid_proposal and math.isfinite(self._drawable) and self._drawable > 0.0


def _divergence(moved: Tensor, start: Tensor) -> float:
    """KL divergence of `moved` from `start`, in nats; both [V], of the same mass."""
    inside = moved > 0.0
    return float((moved[inside] * (moved[inside] / start[inside]).log()).sum())
