"""Rollout trees: many answers to one prompt that share their common prefixes.

A few answers start from the stem; then, round after round, every promising node gets one more branch, at a step or
where entropy is high. Rounds are planned and run in `rounds`.
"""

from __future__ import annotations

from forerun.core import SamplingParams
from forerun.llm import LLM, Messages, Prompt
from forerun.sharing.branches import run_sync
from forerun.sharing.branching import BranchOn
from forerun.sharing.rollout_config import SAMPLING, RolloutConfig, Score
from forerun.sharing.rounds import Rollout
from forerun.sharing.tree import RolloutTree

__all__ = ["RolloutConfig", "RolloutTree", "arollout", "rollout"]


def rollout(
    llm: LLM,
    prompt: Prompt | Messages,
    width: int,
    depth: int,
    token_budget: int,
    branch_on: BranchOn = "step",
    score: Score | None = None,
    params: SamplingParams | None = None,
    *,
    separator: str = "\n",
    keep: float = 0.5,
    prune_below: float | None = None,
    min_distance: float = 0.0,
    min_prob: float = 0.02,
    seed: int | None = None,
) -> RolloutTree:
    """Grow a tree of answers to one prompt; see `RolloutConfig` for what the values mean."""
    config = RolloutConfig(
        width,
        depth,
        token_budget,
        branch_on,
        score,
        SAMPLING if params is None else params,
        separator,
        keep,
        prune_below,
        min_distance,
        min_prob,
        seed,
    )
    return run_sync(arollout(llm, prompt, config))


async def arollout(llm: LLM, prompt: Prompt | Messages, config: RolloutConfig) -> RolloutTree:
    """`rollout` for asyncio."""
    return await Rollout(llm, llm.encode(prompt), config).run()
