"""Match: draw the target's own next token and follow the draft as long as it contains it.

The answer is token for token what plain decoding gives: greedy by nature, and sampled too, because every position has
its own random number. For deterministic drafts no lossless rule accepts more: a token is accepted with exactly the
probability that the target gives it.
"""

from __future__ import annotations

from forerun.core import ROOT, Draft, Verdict
from forerun.decode.sampling import Rng
from forerun.decode.verifiers.base import TargetView, Verifier


class MatchVerifier(Verifier):
    name = "match"

    def verify(self, draft: Draft, target: TargetView, rng: Rng) -> Verdict:
        children = draft.children()
        node = ROOT
        path: list[int] = []
        while True:
            token = target.draw(node)
            child = next((c for c in children.get(node, ()) if draft.tokens[c] == token), None)
            if child is None:
                return Verdict(path, token)
            node = child
            path.append(child)
