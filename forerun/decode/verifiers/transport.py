"""Traversal that tries siblings two at a time, in the order that accepts most (`pair.py`): close to optimal transport.

Accepts most on trees whose siblings have equally deep trees below them. It requires more of a drafter than the other
rules: how many children a node gets must be fixed before the first of them is drawn.
"""

from __future__ import annotations

from forerun.core import Draft, Verdict
from forerun.decode.sampling import Rng
from forerun.decode.verifiers.base import TargetView, Verifier
from forerun.decode.verifiers.residual import RARE_PROB
from forerun.decode.verifiers.traversal import traverse


class TransportVerifier(Verifier):
    name = "transport"
    uses_proposals = True

    def __init__(self, rare: float = RARE_PROB) -> None:
        self.rare = rare

    def verify(self, draft: Draft, target: TargetView, rng: Rng) -> Verdict:
        return traverse(draft, draft.children(), target, rng, pairs=True, rare=self.rare)
