"""From scores to advantages: how much better a branch scored than its siblings.

The baseline of a branch is the mean over the branches of the same point, as in group-relative policy optimisation; in a
tree every branch point gives one. Knows trees and numbers only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from forerun.sharing.tree import RolloutTree

EPSILON = 1e-6  # of a standard deviation: equal scores give zero, not a division by it


def group_relative(scores: Sequence[float]) -> list[float]:
    """(score - mean) / standard deviation over one group; zeros where all are equal."""
    if not scores:
        return []
    mean = sum(scores) / len(scores)
    deviation = math.sqrt(sum((score - mean) ** 2 for score in scores) / len(scores))
    return [(score - mean) / (deviation + EPSILON) for score in scores]


def node_advantages(tree: RolloutTree) -> dict[int, float]:
    """For every node with a scored trajectory its advantage over its siblings, by node id. A node's value is the mean
    score of the trajectories through it; one without scored siblings has nothing to be compared with: 0."""
    found: dict[int, float] = {}
    for parent in tree.nodes:
        valued = [(child.id, value) for child in parent.children if (value := tree.value(child)) is not None]
        for (node_id, _), advantage in zip(valued, group_relative([value for _, value in valued]), strict=True):
            found[node_id] = advantage
    return found


def token_advantages(tree: RolloutTree) -> list[list[float]]:
    """For every complete trajectory, in their order, an advantage per token: that of the node the token belongs to."""
    by_node = node_advantages(tree)
    lengths = {node.id: len(node.token_ids) for node in tree.nodes}
    return [
        [by_node.get(node_id, 0.0) for node_id in trajectory.node_ids for _ in range(lengths[node_id])]
        for trajectory in tree.trajectories()
    ]
