"""Lossless verifiers for drafts that were sampled: token by token, or whole paths from the leaves to the root.

All of them rest on the residual distribution (`residual.py`) and use the distribution that a draft was drawn from.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from forerun.core import ROOT, Draft, Verdict
from forerun.decode.sampling import Rng
from forerun.decode.verifiers.base import TargetView, Verifier
from forerun.decode.verifiers.residual import RARE_PROB, Residual


class RejectionVerifier(Verifier):
    """Rejection sampling (Chen et al. 2023), token by token from the root.

    At a node its children are tried in the order they were drawn; a child x is accepted with probability
    min(1, p(x) / q(x)), else p becomes the residual and the next child is tried. The last token is drawn from the
    residual that remains.
    """

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


class TraversalVerifier(Verifier):
    """Whole paths are accepted or rejected, from the leaves to the root (Weng et al. 2025).

    Going down, a node's share is the target's probability of its path relative to how often it is drafted: a child x
    has min(1, share * p(x) / q(x)). A token drafted too often is thus made up for by one below it that is drafted too
    rarely, which token by token verification cannot do. The first leaf is accepted with its share; when it is rejected,
    its parent keeps the residual and goes on with its next child, or is tried itself. The root is always accepted.
    """

    name = "traversal"
    uses_proposals = True

    def verify(self, draft: Draft, target: TargetView, rng: Rng) -> Verdict:
        return traverse(draft, draft.children(), target, rng)


class BlockVerifier(Verifier):
    """Traversal of the first children only: block verification (Sun et al. 2024), which no lossless rule exceeds on a
    chain."""

    name = "block"
    uses_proposals = True

    def verify(self, draft: Draft, target: TargetView, rng: Rng) -> Verdict:
        first = {node: children[:1] for node, children in draft.children().items()}
        return traverse(draft, first, target, rng)


class TransportVerifier(Verifier):
    """Traversal that tries siblings two at a time, in the order that accepts most (`pair.py`): near optimal transport.

    Accepts most on trees whose siblings have equally deep trees below them. It requires more of a drafter than the
    other rules: how many children a node gets must be fixed before the first of them is drawn.
    """

    name = "transport"
    uses_proposals = True

    def __init__(self, rare: float = RARE_PROB) -> None:
        self.rare = rare

    def verify(self, draft: Draft, target: TargetView, rng: Rng) -> Verdict:
        return traverse(draft, draft.children(), target, rng, pairs=True, rare=self.rare)


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
