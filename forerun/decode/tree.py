"""Draft trees: joining what several drafters guessed, and laying out what is kept.

Deterministic drafts only: a draft drawn at random must reach its verifier whole. Knows no drafter and no controller.
"""

from __future__ import annotations

from collections.abc import Sequence

from forerun.core import ROOT, Draft


def merge(drafts: Sequence[Draft], weights: Sequence[float]) -> Draft:
    """One tree that holds every path of all drafts.

    A node's probability is the weighted mean over the drafters that have guesses at its parent, where one that did not
    guess this token says zero: the surest alone would be believed too often (docs/log.md). The surest is named as its
    source.
    """
    full = [(draft, weight) for draft, weight in zip(drafts, weights, strict=True) if len(draft)]
    if len(full) <= 1:
        return full[0][0] if full else Draft()
    merged = Draft()
    known: dict[tuple[int, int], int] = {}  # (parent, token) -> node of `merged`
    voices: dict[int, float] = {}  # parent -> weight of all who guess there
    surest: list[float] = []
    for draft, weight in full:
        places: list[int] = []
        heard: set[int] = set()
        for token, parent, prob, source in zip(draft.tokens, draft.parents, draft.probs, draft.sources, strict=True):
            above = ROOT if parent == ROOT else places[parent]
            if above not in heard:
                heard.add(above)
                voices[above] = voices.get(above, 0.0) + weight
            node = known.get((above, token))
            if node is None:
                node = known[above, token] = merged.add(token, above, 0.0, source)
                surest.append(prob)
            elif prob > surest[node]:
                surest[node], merged.sources[node] = prob, source
            merged.probs[node] += weight * prob
            places.append(node)
    merged.probs = [sum_ / voices[parent] for sum_, parent in zip(merged.probs, merged.parents, strict=True)]
    return merged


def keep(draft: Draft, nodes: Sequence[int]) -> Draft:
    """The part of a draft made of these nodes (parents included), surest branch first and each branch in one piece, so
    that the likeliest path lies in the cache as it would without a tree."""
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


def path_probs(draft: Draft) -> list[float]:
    """Chance that each node is reached and accepted."""
    paths: list[float] = []
    for parent, prob in zip(draft.parents, draft.probs, strict=True):
        paths.append(prob if parent == ROOT else paths[parent] * prob)
    return paths


def likeliest(draft: Draft, count: int, depth: int) -> list[int]:
    """Up to `count` nodes down to a depth whose paths are the likeliest; with a node, all above it."""
    paths, depths = path_probs(draft), draft.depths()
    nodes = sorted((n for n in range(len(draft)) if depths[n] <= depth), key=lambda n: (-paths[n], n))
    return nodes[:count]


def came_true(draft: Draft, tokens: Sequence[int]) -> int:
    """How many of these tokens the draft's best path foresaw."""
    reached = {ROOT: 0}  # node -> its depth
    for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        depth = reached.get(parent)
        if depth is not None and depth < len(tokens) and tokens[depth] == token:
            reached[node] = depth + 1
    return max(reached.values())


def side_branches(draft: Draft) -> list[bool]:
    """Of every node, whether it has a sibling that is surer."""
    best: dict[int, int] = {}
    for node, parent in enumerate(draft.parents):
        if parent not in best or draft.probs[node] > draft.probs[best[parent]]:
            best[parent] = node
    return [best[parent] != node for node, parent in enumerate(draft.parents)]
