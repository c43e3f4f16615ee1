"""The public names of planning before tools: `from forerun import recipes; recipes.plan.solve(llm, task, tools)`."""

from forerun.recipes.planning.calls import CallResult, run_plan
from forerun.recipes.planning.chat import Example, Limits, PlanUsage
from forerun.recipes.planning.solve import LoopResult, PlanResult, interleaved, solve
from forerun.recipes.planning.template import Plan, PlanError, Step, parse
from forerun.renamed import moved_names

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

__getattr__ = moved_names(__name__, {"Call": (__name__, "CallResult")})
