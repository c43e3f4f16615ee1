"""Block verification (Sun et al. 2024): the best lossless rule for chains. Of a tree it uses first children only."""

from __future__ import annotations

from forerun.core import Draft, Verdict
from forerun.decode.sampling import Rng
from forerun.decode.verifiers.base import TargetView, Verifier
from forerun.decode.verifiers.traversal import traverse


class BlockVerifier(Verifier):
    name = "block"
    uses_proposals = True

    def verify(self, draft: Draft, target: TargetView, rng: Rng) -> Verdict:
        first = {node: children[:1] for node, children in draft.children().items()}
        return traverse(draft, first, target, rng)
