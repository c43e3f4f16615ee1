"""A draft tree while it grows, for drafters that run a model. Knows no model: tokens and probabilities are given."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from forerun.core import ROOT, Draft
from forerun.decode.drafters.base import DraftRequest
from forerun.decode.sampling import DRAFT_STREAM, Row, SeededRng

MIN_CHILD_PROB = 0.02  # of a child beside the most probable one
MAX_FORKED_LEVELS = 3  # of a sampled tree: levels where nodes have two children


@dataclass
class TreeBuilder:
    """One tree while it grows. Nodes in `entries` have run; their index there is their K/V entry after the sequence."""

    request: DraftRequest
    source: str
    draft: Draft = field(default_factory=Draft)
    path: list[float] = field(default_factory=list)  # probability that each node is reached and accepted
    depth: list[int] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)

    def add(self, token: int, parent: int, prob: float) -> int:
        self.path.append(prob if parent == ROOT else self.path[parent] * prob)
        self.depth.append(1 if parent == ROOT else self.depth[parent] + 1)
        return self.draft.add(token, parent, prob, self.source)

    def rescore(self, node: int, prob: float) -> None:
        parent = self.draft.parents[node]
        self.draft.probs[node] = prob
        self.path[node] = prob if parent == ROOT else self.path[parent] * prob

    def row(self, node: int) -> Row:
        return Row(self.request.context, [self.draft.tokens[i] for i in self.draft.path(node)])

    def straight(self) -> list[int]:
        """Tokens that ran in consecutive entries, each the child of the one before: their K/V stays if accepted."""
        tokens, last = [], ROOT
        for node in self.entries:
            if self.draft.parents[node] != last:
                break
            tokens.append(self.draft.tokens[node])
            last = node
        return tokens

    def parents(self, nodes: list[int]) -> list[int]:
        """Parents as indices among the entries, for nodes that ran or are about to."""
        place = {node: i for i, node in enumerate([*self.entries, *nodes])}
        return [place.get(self.draft.parents[n], ROOT) for n in (*self.entries, *nodes)]

    def open_nodes(self) -> list[int]:
        """Nodes that have not run and may have children."""
        ran = set(self.entries)
        return [n for n in range(len(self.draft)) if n not in ran and self.depth[n] < self.request.max_depth]

    def add_most_probable(self, node: int, tokens: list[int], probs: list[float]) -> None:
        """Add the most probable tokens after a node that just ran as its children, those that are there already not."""
        known = {self.draft.tokens[n] for n in range(len(self.draft)) if self.draft.parents[n] == node}
        for rank, (token, prob) in enumerate(zip(tokens, probs, strict=True)):
            if (rank == 0 or prob >= MIN_CHILD_PROB) and token not in known:
                self.add(token, node, prob)

    def add_sampled(self, node: int, q: Tensor) -> None:
        """Add children drawn without replacement from q [V]. Their number is fixed before the first is drawn: choosing
        it by what was drawn would change their distribution."""
        depth = 0 if node == ROOT else self.depth[node]
        count = min(2 if depth < self.forked_levels() else 1, int((q > 0).sum()))
        if len(self.draft) + count > self.request.max_nodes:
            return
        rng = self.request.rng or SeededRng(
            self.request.context.seed, len(self.request.tokens), DRAFT_STREAM + ((node + 2) << 40)
        )
        rest = q.double()
        for _ in range(count):
            token = rng.pick(rest)
            self.add(token, node, float(q[token]))
            rest = rest.clone()
            rest[token] = 0.0
        self.draft.proposals[node] = q

    def forked_levels(self) -> int:
        """Levels with two children a node, where all branches can go on to the full depth."""
        deep, nodes = self.request.max_depth, self.request.max_nodes
        fits = [k for k in range(MAX_FORKED_LEVELS + 1) if 2 ** (k + 1) - 2 + 2**k * (deep - k) <= nodes and k <= deep]
        return fits[-1] if fits else 0
