"""Tasks solved before, shown to the model so that it sees how plans are written; small models need one or two.

The same example serves both ways of using tools: as a plan with all results at once, and turn by turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forerun.errors import BadRequest
from forerun.recipes.planning.template import Plan, fill, parse

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Example:
    """A task, its plan as text, what its calls gave, and its answer."""

    task: str
    plan: str
    results: Mapping[str, str] = field(default_factory=dict)  # by step: {"#E1": "..."}
    answer: str = ""

    def parsed(self) -> Plan:
        plan = parse(self.plan)
        missing = [step.name for step in plan.steps if step.name not in self.results]
        if not plan.steps or missing:
            raise BadRequest(
                f"the example {self.task!r:.60} has no result for {', '.join(missing) or 'any step'}",
                "give every step of its plan a result",
            )
        return plan


def results_text(results: Mapping[str, str]) -> str:
    """All results of a plan as the model reads them."""
    lines = "\n".join(f"{name} = {result}" for name, result in results.items())
    return f"The results:\n{lines}\nNow answer the task in one short sentence."


def as_plans(examples: Sequence[Example]) -> Messages:
    messages: Messages = []
    for example in examples:
        plan = example.parsed()
        messages += [_message("user", example.task), _message("assistant", plan.text)]
        if example.answer:
            messages += [_message("user", results_text(example.results)), _message("assistant", example.answer)]
    return messages


def as_turns(examples: Sequence[Example]) -> Messages:
    """The same tasks, one call and one result at a time."""
    messages: Messages = []
    for example in examples:
        messages.append(_message("user", example.task))
        for step in example.parsed().steps:
            messages.append(_message("assistant", f"Call: {step.tool}[{fill(step.argument, example.results)}]"))
            messages.append(_message("user", f"Result: {example.results[step.name]}"))
        messages.append(_message("assistant", f"Answer: {example.answer}"))
    return messages


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}
