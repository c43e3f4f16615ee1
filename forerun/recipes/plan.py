"""The public names of planning before tools: `from forerun import recipes; recipes.plan.solve(llm, task, tools)`."""

import warnings
from typing import Any

from forerun.recipes.planning.calls import CallResult, run_plan
from forerun.recipes.planning.chat import Limits, PlanUsage
from forerun.recipes.planning.examples import Example
from forerun.recipes.planning.interleaved import LoopResult, interleaved
from forerun.recipes.planning.solve import PlanResult, solve
from forerun.recipes.planning.template import Plan, PlanError, Step, parse

__all__ = [
    "CallResult",
    "Example",
    "Limits",
    "LoopResult",
    "Plan",
    "PlanError",
    "PlanResult",
    "PlanUsage",
    "Step",
    "interleaved",
    "parse",
    "run_plan",
    "solve",
]


def __getattr__(name: str) -> Any:
    if name == "Call":  # its old name, for one release
        warnings.warn("forerun.recipes.plan.Call is called CallResult now", DeprecationWarning, stacklevel=2)
        return CallResult
    raise AttributeError(f"module 'forerun.recipes.plan' has no attribute {name!r}")
