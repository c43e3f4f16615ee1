"""Traversal verification (Weng et al. 2025): whole paths are accepted or rejected, from the leaves to the root.

Going down, a node's share is the target's probability of its path relative to how often it is drafted: a child x has
min(1, share * p(x) / q(x)). A token drafted too often is thus made up for by one below it that is drafted too rarely,
which token by token verification cannot do. The first leaf is accepted with its share; when it is rejected, its parent
keeps the residual and goes on with its next child, or is tried itself. The root is always accepted. On a chain this is
block verification (Sun et al. 2024), which no lossless rule exceeds there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from forerun.core import ROOT, Draft, Verdict
from forerun.decode.sampling import Rng
from forerun.decode.verifiers.base import TargetView, Verifier
from forerun.decode.verifiers.residual import RARE_PROB, Residual


class TraversalVerifier(Verifier):
    name = "traversal"
    uses_proposals = True

    def verify(self, draft: Draft, target: TargetView, rng: Rng) -> Verdict:
        return traverse(draft, draft.children(), target, rng)


@dataclass
class _Visit:
    node: int
    residual: Residual
    todo: list[list[int]]  # children not tried yet, in groups that are tried together; the next one last
    group: list[int] = field(default_factory=list)  # children being tried
    trying: list[tuple[int, float]] = field(default_factory=list)  # of these, with their shares; the next one last


def traverse(
    draft: Draft,
    children: dict[int, list[int]],
    target: TargetView,
    rng: Rng,
    pairs: bool = False,
    rare: float = RARE_PROB,
) -> Verdict:
    """Depth first over `children`, with an explicit stack: a draft may be deeper than Python's."""

    def visit(node: int, share: float) -> _Visit:
        proposal, kids = draft.proposals.get(node), children.get(node, [])
        size = 2 if pairs and proposal is not None else 1
        groups = [kids[i : i + size] for i in range(0, len(kids), size)]
        return _Visit(node, Residual(target, node, proposal, share, rare), groups[::-1])

    def tokens(group: list[int]) -> list[int]:
        return [draft.tokens[child] for child in group]

    stack = [visit(ROOT, 1.0)]
    while True:
        here = stack[-1]
        if here.trying:
            child, share = here.trying.pop()
            if share > 0.0:
                stack.append(visit(child, share))
        elif here.group:
            here.residual.reject(tokens(here.group))
            here.group = []
        elif here.todo:
            here.group = here.todo.pop()
            here.trying = [(here.group[i], share) for i, share in here.residual.shares(tokens(here.group))][::-1]
        elif here.node == ROOT or rng.flip(here.residual.share):
            return Verdict([v.node for v in stack[1:]], here.residual.draw(rng))
        else:
            stack.pop()
