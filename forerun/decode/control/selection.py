"""Which drafted tokens to verify: those that make the tokens per second of the whole batch largest.

Probabilities and the cost of a forward are given. Knows no drafter and no history.
"""

from __future__ import annotations

from dataclasses import dataclass

from forerun.core import Draft
from forerun.decode.control.cost import CostCurve
from forerun.decode.tree import path_probs, side_branches


@dataclass(slots=True)
class Selection:
    """The nodes of each draft that are verified, and the expected outcome."""

    nodes: list[list[int]]
    paths: list[list[float]]  # of every node, chosen or not: the probability that it and all above it are accepted
    gains: list[float]  # expected tokens of each sequence
    seconds: float  # of the step: the target's, the host's, and what drafting took

    @property
    def size(self) -> int:
        """Tokens of the forward that verifies them."""
        return len(self.nodes) + sum(map(len, self.nodes))

    def reach(self, draft: Draft, i: int) -> list[float]:
        """The probability that the chosen nodes of each depth, together, hold the right token of sequence `i`."""
        if not self.nodes[i]:
            return []
        depths = draft.depths()
        reach = [0.0] * max(depths)
        for node in self.nodes[i]:
            reach[depths[node] - 1] += self.paths[i][node]
        return reach


@dataclass(slots=True, frozen=True)
class StepCosts:
    """What a step takes beside its forward."""

    plain_s: float  # the host's, without a draft
    draft_s: float  # the same with one
    spent_s: float = 0.0  # what drafting has taken in this step


def select(
    target: CostCurve,
    drafts: list[Draft],
    probs: list[list[float]],
    limits: list[int],
    context: int,
    costs: StepCosts,
    lagging: list[int],
) -> Selection:
    """`probs` are calibrated, `limits` the most nodes of each draft; `lagging` are sequences that this step must not
    slow down."""
    sequences = len(drafts)
    paths = [path_probs(draft, prob) for draft, prob in zip(drafts, probs, strict=True)]
    found = Selection([[] for _ in drafts], paths, [1.0] * sequences, 0.0)
    flat: list[float] = []  # paths of all nodes that can be left out
    owners: list[int] = []
    sides: list[bool] = []  # whether a node begins a side branch, which attention runs apart
    firsts = [0] * sequences  # where a sequence's nodes begin in `flat`
    for i, draft in enumerate(drafts):
        firsts[i] = len(flat)
        if draft.proposals:  # dropping sampled tokens because of what was sampled would bias the answer
            found.nodes[i] = list(range(len(draft)))
            found.gains[i] += sum(paths[i])
        else:
            flat += paths[i]
            owners += [i] * len(paths[i])
            sides += side_branches(draft)
    size = found.size
    host_s = costs.spent_s + (costs.draft_s if size > sequences else costs.plain_s)
    if not flat:
        found.seconds = target.seconds(size, sequences, context) + host_s
        return found
    seconds = [
        s + costs.spent_s + costs.draft_s for s in target.seconds_range(size, size + len(flat), sequences, context)
    ]
    seconds[0] += host_s - costs.spent_s - costs.draft_s
    plain_s = target.seconds(sequences, sequences, context) + costs.plain_s + costs.spent_s
    branch_s = target.per_branch if any(sides) else 0.0
    extra = [branch_s if side else 0.0 for side in sides]
    taken, found.seconds = _best_nodes(flat, owners, extra, found.gains, limits, seconds, plain_s, lagging)
    for place in taken:
        i = owners[place]
        found.gains[i] += flat[place]
        found.nodes[i].append(place - firsts[i])
    for picked in found.nodes:
        picked.sort()
    return found


def _best_nodes(
    flat: list[float],
    owners: list[int],
    extra: list[float],
    gains: list[float],
    limits: list[int],
    seconds: list[float],
    plain_s: float,
    lagging: list[int],
) -> tuple[list[int], float]:
    """Indices in `flat` of the nodes to verify, and the step's seconds with them: `seconds[n]` plus their `extra`."""
    tokens, best, best_s = sum(gains), 0, seconds[0]
    best_rate = tokens / best_s
    most = tokens + sum(flat)
    lagging_tokens = {i: gains[i] for i in lagging}
    taken: list[int] = []
    room, extra_s = list(limits), 0.0
    # Parents come first: their paths are no less likely, and equals keep their order.
    for place in sorted(range(len(flat)), key=flat.__getitem__, reverse=True):
        i = owners[place]
        if room[i] <= 0:
            continue
        room[i] -= 1
        taken.append(place)
        path = flat[place]
        tokens += path
        extra_s += extra[place]
        step_s = seconds[len(taken)] + extra_s
        if i in lagging_tokens:
            lagging_tokens[i] += path
        if tokens > best_rate * step_s and (not lagging_tokens or step_s <= plain_s * min(lagging_tokens.values())):
            best_rate, best, best_s = tokens / step_s, len(taken), step_s
        elif most <= best_rate * step_s:
            break  # not even all the others could make up for what they cost
    return taken[:best], best_s
