"""A draft that was made for an earlier state of its sequence: what is left of it for the state as it is now.

A tree drafted after some tokens stays of use while the answer goes down one of its paths, and one that was drafted
after tokens not yet accepted becomes of use when they are. Knows no connection.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.core import ROOT, Draft
from forerun.decode.drafters.base import DraftRequest
from forerun.decode.drafters.tree_builder import TreeBuilder
from forerun.decode.remote.protocol import Distribution, Tree


@dataclass
class HeldDraft:
    """A tree after the first `first` tokens of a sequence, the distributions that came with it by node."""

    first: int
    draft: Draft
    laws: dict[int, Distribution]
    guess: bool = False  # drafted for an outcome that was not known yet

    @classmethod
    def joined(cls, first: int, assumed: Draft, tree: Tree, source: str, guess: bool = False) -> HeldDraft:
        """`tree` was drafted after the path `assumed`, which was drafted before it."""
        offset = len(assumed)
        draft = Draft(list(assumed.tokens), list(assumed.parents), list(assumed.probs))
        draft.tokens += tree.tokens
        draft.parents += [offset - 1 if parent == ROOT else offset + parent for parent in tree.parents]
        draft.probs += tree.probs
        draft.sources = [source] * len(draft)
        laws = {offset - 1 if node == ROOT else offset + node: law for node, law in tree.distributions.items()}
        return cls(first, draft, laws, guess)

    def rest(self, tokens: list[int]) -> HeldDraft | None:
        """What is below the path that the sequence has gone since; None where it left the tree."""
        if len(tokens) < self.first:
            return None
        node, children = ROOT, self.draft.children()
        for token in tokens[self.first :]:
            found = next((c for c in children.get(node, ()) if self.draft.tokens[c] == token), None)
            if found is None:
                return None
            node = found
        return self._below(node, len(tokens))

    def _below(self, root: int, first: int) -> HeldDraft:
        if root == ROOT:
            return self
        places, kept = {root: ROOT}, Draft()
        for node, parent in enumerate(self.draft.parents):
            if parent in places:
                at = kept.add(self.draft.tokens[node], places[parent], self.draft.probs[node], self.draft.sources[node])
                places[node] = at
        laws = {places[node]: law for node, law in self.laws.items() if node in places}
        return HeldDraft(first, kept, laws)

    def greedy(self, max_nodes: int, max_depth: int) -> Draft:
        """The first nodes of it, as they came: parents are before their children."""
        draft, depths, places = Draft(), self.draft.depths(), {ROOT: ROOT}
        for node, parent in enumerate(self.draft.parents):
            if parent in places and depths[node] <= max_depth and len(draft) < max_nodes:
                places[node] = draft.add(
                    self.draft.tokens[node], places[parent], self.draft.probs[node], self.draft.sources[node]
                )
        return draft

    def sampled(self, request: DraftRequest, vocab_size: int, source: str) -> Draft:
        """Children drawn here, from the distributions that came: whatever these are, and however the tree was chosen,
        they were fixed before the draw, so that verifying against them is lossless. A drawn child that the server did
        not go on from is a leaf. A node without a distribution has its most probable child for certain."""
        builder, children = TreeBuilder(request, source), self.draft.children()
        places = {ROOT: ROOT}  # node of the built draft -> node of this one
        at = ROOT
        while at < len(builder.draft):
            node = places.get(at)
            deep = 0 if at == ROOT else builder.depth[at]
            if node is not None and deep < request.max_depth:
                before = len(builder.draft)
                own = children.get(node, [])
                if node in self.laws:
                    builder.add_sampled(at, dense(self.laws[node], vocab_size))
                elif own and before < request.max_nodes:
                    best = max(own, key=lambda n: self.draft.probs[n])
                    builder.add(self.draft.tokens[best], at, self.draft.probs[best])
                known = {self.draft.tokens[n]: n for n in own}
                for made in range(before, len(builder.draft)):
                    if builder.draft.tokens[made] in known:
                        places[made] = known[builder.draft.tokens[made]]
            at += 1
        return builder.draft

    def likeliest_path(self) -> Draft:
        """The most probable way out of the tree: the path to a leaf. An outcome that ends above a leaf leaves a part of
        this tree to go on with, or goes where no draft could follow."""
        draft, inner = self.draft, set(self.draft.parents)
        paths = list[float]()
        for parent, prob in zip(draft.parents, draft.probs, strict=True):
            paths.append(prob if parent == ROOT else paths[parent] * prob)
        leaf = max((n for n in range(len(draft)) if n not in inner), key=paths.__getitem__, default=ROOT)
        chosen = draft.path(leaf)
        tokens, probs = [draft.tokens[n] for n in chosen], [draft.probs[n] for n in chosen]
        return Draft.chain(tokens, probs, draft.sources[0] if draft.sources else "")


def dense(law: Distribution, vocab_size: int) -> Tensor:
    """A distribution over the vocabulary, [V] float32."""
    made = torch.zeros(vocab_size, dtype=torch.float64)
    made[torch.tensor(law.tokens)] = torch.tensor(law.weights, dtype=torch.float64)
    return (made / made.sum()).float()
