"""The result of a rollout: a tree of tokens whose paths are trajectories, with log-probabilities, scores and costs.

A node is a run of tokens that all trajectories through it share; the root is the stem (the prompt). A branch that
starts inside a node splits it in two. Knows no engine: `rollout` writes to the tree.

Advantages say how much better a branch scored than its siblings. The baseline of a branch is the mean over the branches
of the same point, as in group-relative policy optimisation; in a tree every branch point gives one.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from forerun.core import TokenLogprob
from forerun.engine.sequence import FinishReason
from forerun.text.tokenizer import Tokenizer

EPSILON = 1e-6  # of a standard deviation: equal scores give zero, not a division by it

BranchStatus = Literal["running", "finished", "truncated", "pruned", "alike", "failed"]


@dataclass
class Cost:
    """Tokens of one node or tree: computed, or read from the cache."""

    prefill: int = 0  # prompt tokens computed: the stem, or from the last shared page to a branch's start
    generated: int = 0
    shared: int = 0  # prompt tokens whose K/V was cached

    @property
    def computed(self) -> int:
        return self.prefill + self.generated

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.prefill + other.prefill, self.generated + other.generated, self.shared + other.shared)


@dataclass(eq=False)
class RolloutNode:
    """A run of tokens between two branch points. `status` and `score` are those of the trajectory that ends here."""

    id: int
    parent: RolloutNode | None
    token_ids: list[int]
    generation: int  # 0: the stem; a branch is one more than the trajectory it branches from
    logprobs: list[TokenLogprob] = field(default_factory=list)  # one per token; none for the stem
    children: list[RolloutNode] = field(default_factory=list)
    forced: bool = False  # whether the first token was chosen to differ from its siblings, not drawn
    cost: Cost = field(default_factory=Cost)
    status: BranchStatus = "running"  # of a leaf
    finish_reason: FinishReason | None = None
    score: float | None = None
    error: Exception | None = None  # what the caller's own functions raised about it

    @property
    def leaf(self) -> bool:
        return not self.children

    def path(self) -> list[RolloutNode]:
        """From the first node below the stem to this one."""
        nodes: list[RolloutNode] = []
        node: RolloutNode | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def leaves(self) -> Iterator[RolloutNode]:
        if self.leaf:
            yield self
        for child in self.children:
            yield from child.leaves()

    def first_tokens(self, count: int) -> list[int]:
        """The first tokens from here on, along the oldest path to a leaf."""
        tokens, node = list(self.token_ids[:count]), self
        while len(tokens) < count and node.children:
            node = node.children[0]
            tokens += node.token_ids[: count - len(tokens)]
        return tokens


@dataclass(frozen=True)
class Trajectory:
    """One path from the stem to a leaf: an answer, token by token."""

    node_ids: list[int]
    token_ids: list[int]
    logprobs: list[TokenLogprob]
    forced: list[int]  # positions in the answer whose token was chosen by branching, not drawn
    text: str
    score: float | None
    finish_reason: FinishReason | None
    complete: bool  # ended by itself or at the longest answer allowed, and was not stopped

    @property
    def logprob(self) -> float:
        """Of the whole answer under the model itself."""
        return sum(entry.logprob for entry in self.logprobs)


class RolloutTree:
    """The tree and its totals. `trajectories()`: the answers; `failures()`: nodes that the caller's functions failed
    on."""

    def __init__(self, stem: list[int], tokenizer: Tokenizer, token_budget: int) -> None:
        self.tokenizer, self.token_budget = tokenizer, token_budget
        self.root = RolloutNode(0, None, list(stem), 0)
        self.nodes = [self.root]

    def add(self, parent: RolloutNode, generation: int) -> RolloutNode:
        node = RolloutNode(len(self.nodes), parent, [], generation)
        self.nodes.append(node)
        parent.children.append(node)
        return node

    def split(self, node: RolloutNode, at: int) -> RolloutNode:
        """Split a node before its token `at` (not its first): the upper part, with the rest as its child. Leaves keep
        their ids, so trajectories can still be found."""
        assert node.parent is not None and 0 < at < len(node.token_ids)
        upper = RolloutNode(len(self.nodes), node.parent, node.token_ids[:at], node.generation, node.logprobs[:at])
        upper.forced, upper.status, upper.children = node.forced, "finished", [node]
        upper.cost = Cost(node.cost.prefill, at - node.forced, node.cost.shared)
        node.cost = Cost(0, node.cost.generated - upper.cost.generated, 0)
        node.parent.children[node.parent.children.index(node)] = upper
        node.parent, node.forced = upper, False
        node.token_ids, node.logprobs = node.token_ids[at:], node.logprobs[at:]
        self.nodes.append(upper)
        return upper

    def prefix(self, node: RolloutNode, at: int = 0) -> list[int]:
        """All tokens before token `at` of a node, from the stem on."""
        above = [token for part in node.path()[:-1] for token in part.token_ids]
        return [*self.root.token_ids, *above, *node.token_ids[:at]]

    def trajectory(self, leaf: RolloutNode) -> Trajectory:
        path = leaf.path()
        forced, length = [], 0
        for node in path:
            forced += [length] if node.forced else []
            length += len(node.token_ids)
        tokens = [token for node in path for token in node.token_ids]
        return Trajectory(
            node_ids=[node.id for node in path],
            token_ids=tokens,
            logprobs=[entry for node in path for entry in node.logprobs],
            forced=forced,
            text=self.tokenizer.decode(tokens),
            score=leaf.score,
            finish_reason=leaf.finish_reason,
            complete=leaf.status == "finished",
        )

    def trajectories(self, complete: bool = True) -> list[Trajectory]:
        """Of all leaves, oldest first; `complete=False` gives those that were stopped, too."""
        leaves = sorted((leaf for leaf in self.root.leaves() if leaf is not self.root), key=lambda leaf: leaf.id)
        found = [self.trajectory(leaf) for leaf in leaves]
        return [trajectory for trajectory in found if trajectory.complete or not complete]

    def failures(self) -> list[RolloutNode]:
        """Nodes that the caller's own functions failed on, each with its error."""
        return [node for node in self.nodes if node.error is not None]

    def value(self, node: RolloutNode) -> float | None:
        """Mean score of the complete trajectories through a node; None where none has one."""
        scores = [leaf.score for leaf in node.leaves() if leaf.score is not None and leaf.status == "finished"]
        return sum(scores) / len(scores) if scores else None

    @property
    def cost(self) -> Cost:
        return sum((node.cost for node in self.nodes), Cost())


def group_relative(scores: Sequence[float]) -> list[float]:
    """(score - mean) / standard deviation over one group; zeros where all are equal."""
    if not scores:
        return []
    mean, deviation = statistics.fmean(scores), statistics.pstdev(scores)
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
