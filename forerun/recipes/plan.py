"""The public names of planning before tools: `from forerun import plan; plan.solve(llm, task, tools)`."""

from forerun.recipes.planning.asking import Limits, PlanUsage
from forerun.recipes.planning.calls import Call, run_plan
from forerun.recipes.planning.examples import Example
from forerun.recipes.planning.interleaved import LoopResult, interleaved
from forerun.recipes.planning.solve import PlanResult, solve
from forerun.recipes.planning.template import Plan, PlanError, Step, parse

__all__ = [
    "Call",
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
