"""The public names of planning before tools: `from forerun import plan; plan.solve(llm, task, tools)`."""

from forerun.planning.asking import Limits, PlanUsage
from forerun.planning.calls import Call, run_plan
from forerun.planning.examples import Example
from forerun.planning.interleaved import LoopResult, interleaved
from forerun.planning.solve import PlanResult, solve
from forerun.planning.template import Plan, PlanError, Step, parse

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
