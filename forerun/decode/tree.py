"""Draft trees: merging the drafts of several drafters, and laying out the nodes that are verified.

For deterministic drafts only: a sampled draft must reach its verifier whole. Knows no drafter and no controller.
"""

from __future__ import annotations

from collections.abc import Sequence

from forerun.core import ROOT, Draft


def merge(drafts: Sequence[Draft], models: Sequence[bool]) -> Draft:
    """One tree that holds every path of all drafts; `models`: of drafters that have read the whole text.

    A node's probability is the mean over the drafters that have children at its parent, where one without this token
    counts as zero: the highest probability alone would be too high too often. Where models draft theirs counts, and
    what they leave of it goes by the others: of free tokens that a model does not have next to none is right
    (docs/log.md). The drafter with the highest is named as the node's source.
    """
    full = [(draft, bool(model)) for draft, model in zip(drafts, models, strict=True) if len(draft)]
    if len(full) <= 1:
        return full[0][0] if full else Draft()
    merged = Draft()
    known: dict[tuple[int, int], int] = {}  # (parent, token) -> node of `merged`
    drafters: tuple[dict[int, int], dict[int, int]] = {}, {}  # parent -> free drafters and models with children there
    sums: tuple[list[float], list[float]] = [], []  # of each node's probabilities by these
    highest: list[float] = []  # of each node, over the drafters
    for draft, model in full:
        places: list[int] = []  # node of `draft` -> node of `merged`
        counted: set[int] = set()
        here, total = drafters[model], sums[model]
        for token, parent, prob, source in zip(draft.tokens, draft.parents, draft.probs, draft.sources, strict=True):
            above = ROOT if parent == ROOT else places[parent]
            if above not in counted:
                counted.add(above)
                here[above] = here.get(above, 0) + 1
            node = known.get((above, token))
            if node is None:
                node = known[above, token] = merged.add(token, above, 0.0, source)
                highest.append(prob)
                sums[0].append(0.0)
                sums[1].append(0.0)
            elif prob > highest[node]:
                highest[node], merged.sources[node] = prob, source
            total[node] += prob
            places.append(node)
    left: dict[int, float] = {}  # parent -> what models leave
    for node, parent in enumerate(merged.parents):
        if n := drafters[1].get(parent):
            left[parent] = left.get(parent, 1.0) - sums[1][node] / n
    for node, parent in enumerate(merged.parents):
        free = sums[0][node] / drafters[0].get(parent, 1)
        by_models = sums[1][node] / drafters[1].get(parent, 1)
        merged.probs[node] = by_models + free * max(0.0, left.get(parent, 1.0))
    return merged


def subtree(draft: Draft, nodes: Sequence[int]) -> Draft:
    """The part of a draft made of these nodes (parents included), most probable branch first and each branch in one
    piece, so that the most probable path lies in the cache as it would without a tree."""
    children: dict[int, list[int]] = {}
    for node in sorted(nodes, key=lambda n: draft.probs[n]):
        children.setdefault(draft.parents[node], []).append(node)
    kept, places = Draft(), {ROOT: ROOT}
    stack = children.get(ROOT, [])
    while stack:
        node = stack.pop()
        parent = places[draft.parents[node]]
        places[node] = kept.add(draft.tokens[node], parent, draft.probs[node], draft.sources[node])
        stack += children.get(node, [])
    return kept


def below_likeliest(draft: Draft) -> Draft:
    """What follows the most probable first token, should it be right: the first nodes have its probability too."""
    first = max((n for n, parent in enumerate(draft.parents) if parent == ROOT), key=draft.probs.__getitem__, default=0)
    kept, places = Draft(), {first: ROOT}
    for node, (token, parent, prob) in enumerate(zip(draft.tokens, draft.parents, draft.probs, strict=True)):
        if parent in places and parent != ROOT:
            prob *= draft.probs[first] if parent == first else 1.0
            places[node] = kept.add(token, places[parent], prob, draft.sources[node])
    return kept


def below(draft: Draft, token: int) -> Draft:
    """What follows this first token; nothing where it is none of the draft's."""
    first = next((n for n, p in enumerate(draft.parents) if p == ROOT and draft.tokens[n] == token), None)
    kept, places = Draft(), {first: ROOT}
    for node, parent in enumerate(draft.parents):
        if parent in places and parent != ROOT:
            places[node] = kept.add(draft.tokens[node], places[parent], draft.probs[node], draft.sources[node])
    return kept


def path_probs(draft: Draft, probs: Sequence[float] | None = None) -> list[float]:
    """The probability that each node and all above it are accepted, by the draft's own probabilities or by `probs`."""
    paths: list[float] = []
    for parent, prob in zip(draft.parents, draft.probs if probs is None else probs, strict=True):
        paths.append(prob if parent == ROOT else paths[parent] * prob)
    return paths


def most_probable_nodes(draft: Draft, count: int, depth: int) -> list[int]:
    """Up to `count` nodes down to a depth, by the probability of their paths; with a node, all above it."""
    paths, depths = path_probs(draft), draft.depths()
    nodes = sorted((n for n in range(len(draft)) if depths[n] <= depth), key=lambda n: (-paths[n], n))
    return nodes[:count]


def accepted_length(draft: Draft, tokens: Sequence[int]) -> int:
    """How many of these tokens, from the first on, are a path of the draft."""
    reached = {ROOT: 0}  # node -> its depth
    for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        depth = reached.get(parent)
        if depth is not None and depth < len(tokens) and tokens[depth] == token:
            reached[node] = depth + 1
    return max(reached.values())


def side_branches(draft: Draft) -> list[bool]:
    """Of every node, whether it has a sibling that is more probable."""
    best: dict[int, int] = {}
    for node, parent in enumerate(draft.parents):
        if parent not in best or draft.probs[node] > draft.probs[best[parent]]:
            best[parent] = node
    return [best[parent] != node for node, parent in enumerate(draft.parents)]
