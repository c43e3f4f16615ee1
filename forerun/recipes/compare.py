"""A rollout tree beside independent sampling with the same budget: distinct trajectories per 1,000 computed tokens.

Independent sampling is counted twice: as it runs here, where all answers share the prompt's prefill, and as it would be
where every answer computes the prompt again. The first is the harder baseline, and the one to compare the tree with.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

from forerun.llm import LLM, Messages, Prompt
from forerun.sharing.branches import run_sync
from forerun.sharing.diversity import mean_pairwise_distance
from forerun.sharing.rollout import arollout
from forerun.sharing.rollout_config import RolloutConfig
from forerun.sharing.tree import RolloutTree, Trajectory

Key = Callable[[Trajectory], Hashable]
DISTANCE_TOKENS = 128  # first tokens of each answer that distances are computed over
MAX_COMPARED_ANSWERS = 24  # for distances: pairs grow with the square


@dataclass(frozen=True)
class Sampled:
    """The outcome of one way of sampling, and its cost in tokens."""

    trajectories: int  # complete ones
    distinct: int
    tokens: int  # computed; a stem that was cached before counts all the same
    distance: float  # mean pairwise edit distance

    @property
    def per_thousand(self) -> float:
        """Distinct trajectories per 1,000 computed tokens."""
        return 1000.0 * self.distinct / self.tokens if self.tokens else 0.0


@dataclass(frozen=True)
class Comparison:
    tree: Sampled
    independent: Sampled  # the prompt is computed once
    unshared: Sampled  # the same answers, each with a prefill of its own

    @property
    def gain(self) -> float:
        """How many times the distinct trajectories of independent sampling, which shares the prompt too."""
        return self.tree.per_thousand / self.independent.per_thousand if self.independent.distinct else float("inf")

    @property
    def gain_unshared(self) -> float:
        return self.tree.per_thousand / self.unshared.per_thousand if self.unshared.distinct else float("inf")


def independent(llm: LLM, prompt: Prompt | Messages, config: RolloutConfig) -> RolloutTree:
    """Answers that only share the stem, as many as the budget holds."""
    many = config.token_budget  # more than there can be: the budget is what ends it
    plain = replace(config, width=many, depth=1, score=None, prune_below=None, min_distance=0.0)
    return run_sync(arollout(llm, prompt, plain))


def compare(llm: LLM, prompt: Prompt | Messages, config: RolloutConfig, key: Key | None = None) -> Comparison:
    """Both ways with the same budget and the same sampling. `key`: two trajectories with the same key count once;
    without one, those with equal tokens do."""
    grown = run_sync(arollout(llm, prompt, config))
    plain = independent(llm, prompt, config)
    shared = sampled(plain, key)
    every = shared.tokens + sum(node.cost.shared for node in plain.nodes if node is not plain.root)
    return Comparison(sampled(grown, key), shared, replace(shared, tokens=every))


def sampled(tree: RolloutTree, key: Key | None = None) -> Sampled:
    found = tree.trajectories()
    keys: list[Hashable] = [tuple(t.token_ids) if key is None else key(t) for t in found]
    distance = mean_pairwise_distance([t.token_ids for t in found[:MAX_COMPARED_ANSWERS]], DISTANCE_TOKENS)
    return Sampled(len(found), len(set(keys)), tree.cost.computed + tree.root.cost.shared, distance)
