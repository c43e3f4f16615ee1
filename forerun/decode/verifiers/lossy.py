"""Lossy verifiers: they accept more than the target's distribution allows, within a bound. Never used unless named.

Neither ever accepts a token that the target rules out: top-k, top-p, min-p and grammars hold, and greedy sampling stays
greedy.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from forerun.core import ROOT, Draft, Verdict
from forerun.decode.sampling import Rng
from forerun.decode.verifiers.base import TargetView, Verifier
from forerun.decode.verifiers.lossless import RejectionVerifier
from forerun.decode.verifiers.residual import Residual
from forerun.options import check_number


class _LossyVerifier(Verifier):
    lossless = False
    max_bound = 1.0

    def __init__(self, bound: float) -> None:
        check_number(f"the bound of {self.name!r}", bound, 0, self.max_bound)
        self.bound = bound


class TypicalVerifier(_LossyVerifier):
    """Typical acceptance (Medusa, Cai et al. 2024): a token is good enough if p(x) >= min(eps, sqrt(eps) * exp(-H(p))).

    The lower the target's entropy, the more probable a token must be. `bound` is 1 - eps: near 0 only tokens pass that
    are at least as probable as the target's typical one, near 1 all do; Medusa uses 0.91. The longest path of such
    tokens is accepted. No statement about the distribution of answers follows from the bound; `bounded` makes one.
    """

    name = "typical"

    def verify(self, draft: Draft, target: TargetView, rng: Rng) -> Verdict:
        depths = {ROOT: 0}  # of nodes whose whole path passes
        deepest = ROOT
        for node, children in draft.children().items():  # parents come before their children
            if node not in depths:
                continue
            probs = target.probs(node)
            threshold = self._threshold(probs)
            for child in children:
                prob = float(probs[draft.tokens[child]])
                if prob > 0.0 and prob >= threshold:
                    depths[child] = depths[node] + 1
                    deepest = child if depths[child] > depths[deepest] else deepest
        return Verdict(draft.path(deepest), target.draw(deepest))

    def _threshold(self, probs: Tensor) -> float:
        entropy = -float(torch.special.xlogy(probs, probs).sum(dtype=torch.float64))
        eps = 1.0 - self.bound
        return min(eps, math.sqrt(eps) * math.exp(-entropy))


class BoundedVerifier(_LossyVerifier, RejectionVerifier):
    """Rejection sampling against a target that leans towards the draft, in the manner of Cactus (Hao and Mou 2026).

    At every position the answer's next token has a distribution whose total variation distance from the target's is at
    most `bound`: no event's probability changes by more than `bound`. Within that, as much as possible is accepted of
    each child in order: `bound` of the target's mass moves from tokens that are drafted too
    rarely to those drafted too often. With a bound of zero this is `rejection`, number for number.
    """

    name = "bounded"

    def _choose(self, draft: Draft, children: list[int], residual: Residual, rng: Rng) -> int | None:
        budget, reached = self.bound, 1.0  # reached: the probability that a child is tried
        for child in children:
            token = draft.tokens[child]
            if budget > 0.0 and reached > 0.0:
                moved = residual.lean(token, budget / reached)
                budget, self.spent = budget - reached * moved, self.spent + moved
            ((_, prob),) = residual.shares([token])
            if rng.flip(prob):
                return child
            reached *= residual.reject([token])
        return None


class DivergenceVerifier(_LossyVerifier, RejectionVerifier):
    """`bounded` in terms of the KL divergence (Cactus): at every position that of the answer's distribution from the
    target's is at most `bound`, in nats. Probable tokens may gain much and improbable ones little, where `bounded`
    gives both the same. All of it goes to the first child; the others are tried as `rejection` tries them.
    """

    name = "bounded_kl"
    max_bound = 100.0

    def _choose(self, draft: Draft, children: list[int], residual: Residual, rng: Rng) -> int | None:
        if children and self.bound > 0.0:
            self.spent += residual.lean_within(draft.tokens[children[0]], self.bound)
        return super()._choose(draft, children, residual, rng)
