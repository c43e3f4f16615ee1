"""What stands on `LLM` and shares its cache: sessions, rollouts, workers, scoring. Sessions, rollouts and workers are
methods of `LLM`; these names are beside it: `from forerun import sharing; sharing.token_advantages(tree)`.
"""

from forerun.renamed import moved_names
from forerun.sharing.guidance import Guided, guided
from forerun.sharing.rollout import arollout
from forerun.sharing.rollout_config import RolloutConfig
from forerun.sharing.scoring import ContinuationScores, score_continuations
from forerun.sharing.top_items import RankedItem, TopItems
from forerun.sharing.tree import RolloutNode, RolloutTree, Trajectory, group_relative, node_advantages, token_advantages

__all__ = [
    "ContinuationScores",
    "Guided",
    "RankedItem",
    "RolloutConfig",
    "RolloutNode",
    "RolloutTree",
    "TopItems",
    "Trajectory",
    "arollout",
    "group_relative",
    "guided",
    "node_advantages",
    "score_continuations",
    "token_advantages",
]

_RECIPES = (
    *("Best", "Candidate", "Vote", "best_of_n", "sample", "self_consistency"),
    *("Comparison", "compare", "Ranking", "Wording", "equilibrium_ranking"),
)
__getattr__ = moved_names(
    __name__, {"Scored": (__name__, "ContinuationScores")} | {name: ("forerun.recipes", name) for name in _RECIPES}
)
