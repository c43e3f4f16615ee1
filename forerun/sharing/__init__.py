"""What stands on `LLM` and shares its cache: sessions, rollouts, workers, scoring. Sessions, rollouts and workers are
methods of `LLM`; these names are beside it: `from forerun import sharing; sharing.token_advantages(tree)`.
"""

import warnings
from importlib import import_module
from typing import Any

from forerun.sharing.rollout import arollout
from forerun.sharing.rollout_config import RolloutConfig
from forerun.sharing.scoring import ContinuationScores, score_continuations
from forerun.sharing.tree import (
    RolloutNode,
    RolloutTree,
    Trajectory,
    group_relative,
    node_advantages,
    token_advantages,
)

__all__ = [
    "ContinuationScores",
    "RolloutConfig",
    "RolloutNode",
    "RolloutTree",
    "Trajectory",
    "arollout",
    "group_relative",
    "node_advantages",
    "score_continuations",
    "token_advantages",
]

# Names that moved; their old place works for one release
_MOVED = (
    *("Best", "Candidate", "Vote", "best_of_n", "sample", "self_consistency"),
    *("Comparison", "compare", "Ranking", "Wording", "equilibrium_ranking"),
)


def __getattr__(name: str) -> Any:
    if name == "Scored":
        warnings.warn("forerun.sharing.Scored is called ContinuationScores now", DeprecationWarning, stacklevel=2)
        return ContinuationScores
    if name not in _MOVED:
        raise AttributeError(f"module 'forerun.sharing' has no attribute {name!r}")
    warnings.warn(f"forerun.sharing.{name} is forerun.recipes.{name} now", DeprecationWarning, stacklevel=2)
    return getattr(import_module("forerun.recipes"), name)
