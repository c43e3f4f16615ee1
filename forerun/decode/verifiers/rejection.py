"""Rejection sampling with the residual distribution (Chen et al. 2023), token by token from the root.

At a node its children are tried in the order they were drawn; a child x is accepted with probability
min(1, p(x) / q(x)), else p becomes the residual and the next child is tried. The last token is drawn from the residual
that remains.
"""

from __future__ import annotations

from forerun.core import ROOT, Draft, Verdict
from forerun.decode.sampling import Rng
from forerun.decode.verifiers.base import TargetView, Verifier
from forerun.decode.verifiers.residual import Residual


class RejectionVerifier(Verifier):
    name = "rejection"
    uses_proposals = True

    def verify(self, draft: Draft, target: TargetView, rng: Rng) -> Verdict:
        children = draft.children()
        node, path = ROOT, list[int]()
        while True:
            residual = Residual(target, node, draft.proposals.get(node))
            child = self._choose(draft, children.get(node, []), residual, rng)
            if child is None:
                return Verdict(path, residual.draw(rng))
            node = child
            path.append(child)

    def _choose(self, draft: Draft, children: list[int], residual: Residual, rng: Rng) -> int | None:
        for child in children:
            token = draft.tokens[child]
            ((_, prob),) = residual.shares([token])
            if rng.flip(prob):
                return child
            residual.reject([token])
        return None
