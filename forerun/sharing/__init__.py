"""What stands on `LLM` and shares its cache. Sessions, rollouts and workers are methods of `LLM`; these are beside it:
`from forerun import sharing; sharing.best_of_n(llm, prompt, 8, score)`.
"""

from forerun.recipes.candidates import Best, Candidate, Vote, best_of_n, sample, self_consistency
from forerun.recipes.compare import Comparison, compare
from forerun.recipes.consensus import Ranking, Wording, equilibrium_ranking
from forerun.sharing.advantages import group_relative, node_advantages, token_advantages
from forerun.sharing.rollout import arollout
from forerun.sharing.rollout_config import RolloutConfig
from forerun.sharing.scoring import ContinuationScores, score_continuations
from forerun.sharing.tree import RolloutNode, RolloutTree, Trajectory

__all__ = [
    "Best",
    "Candidate",
    "Comparison",
    "ContinuationScores",
    "Ranking",
    "RolloutConfig",
    "RolloutNode",
    "RolloutTree",
    "Trajectory",
    "Vote",
    "Wording",
    "arollout",
    "best_of_n",
    "compare",
    "equilibrium_ranking",
    "group_relative",
    "node_advantages",
    "sample",
    "score_continuations",
    "self_consistency",
    "token_advantages",
]
