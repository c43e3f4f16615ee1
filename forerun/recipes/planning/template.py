"""Plans as text: lines such as `#E2 = Search[population of #E1]`, where `#E1` stands for a result yet to come.

Parses and checks plans, orders their steps, fills results in, and makes the grammar that a model's plan must follow.
Knows no model and calls no tool.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from forerun.errors import ForerunError
from forerun.params import Grammar

MAX_STEPS = 64  # of a plan; a grammar for more would be slow
MAX_ARGUMENT_CHARS = 160  # that a grammar allows

TOOL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_STEP = re.compile(r"^\s*(#E\d+)\s*=\s*([A-Za-z_]\w*)\s*\[(.*)\]\s*$")
_REFERENCE = re.compile(r"#E\d+")
_ANSWER = re.compile(r"^\s*Answer:\s*(.*)$")


class PlanError(ForerunError):
    """No usable plan, or no answer within the limits; `usage`: the cost until then, where it is known."""

    def __init__(self, message: str, hint: str = "", usage: object = None) -> None:
        super().__init__(message, hint)
        self.usage = usage


@dataclass(frozen=True)
class Step:
    """One tool call whose argument may name results of others."""

    name: str  # "#E1"
    tool: str
    argument: str

    @property
    def needs(self) -> tuple[str, ...]:
        return references(self.argument)


@dataclass(frozen=True)
class Plan:
    """The calls of one answer, and the answer's own template where the plan has one."""

    steps: tuple[Step, ...]
    answer: str = ""  # may name results, too; empty: the model writes it once it has seen them

    @property
    def text(self) -> str:
        lines = [f"{step.name} = {step.tool}[{step.argument}]" for step in self.steps]
        return "\n".join([*lines, f"Answer: {self.answer}"] if self.answer else lines)

    def check(self, tools: Collection[str], max_steps: int) -> None:
        """Raise where this plan cannot be carried out with these tools."""
        if not self.steps:
            raise PlanError("the plan has no step", "write lines such as #E1 = Tool[argument]")
        if len(self.steps) > max_steps:
            raise PlanError(f"the plan has {len(self.steps)} steps, allowed are {max_steps}", "raise max_calls")
        names = [step.name for step in self.steps]
        for step in self.steps:
            if names.count(step.name) > 1:
                raise PlanError(f"two steps are called {step.name}", "number the steps #E1, #E2, ...")
            if step.tool not in tools:
                raise PlanError(
                    f"step {step.name} calls {step.tool!r}, which is no tool", f"the tools are {', '.join(tools)}"
                )
            _check_references(step.needs, names, f"step {step.name}")
        _check_references(references(self.answer), names, "the answer")
        self.stages()

    def stages(self) -> list[list[Step]]:
        """Steps by the earliest round in which they can run: each needs only results of rounds before its own."""
        done: set[str] = set()
        left, found = list(self.steps), []
        while left:
            ready = [step for step in left if done.issuperset(step.needs)]
            if not ready:
                circle = ", ".join(step.name for step in left)
                raise PlanError(
                    f"the steps {circle} need each other's results", "a step may only use results of others"
                )
            found.append(ready)
            done.update(step.name for step in ready)
            left = [step for step in left if step.name not in done]
        return found


def references(text: str) -> tuple[str, ...]:
    """The results a text names, each once, in order."""
    return tuple(dict.fromkeys(_REFERENCE.findall(text)))


def fill(text: str, results: Mapping[str, str]) -> str:
    """The text with results in place of their names; names without a result stay."""
    return _REFERENCE.sub(lambda found: results.get(found[0], found[0]), text)


def parse(text: str) -> Plan:
    """The plan in a text; lines that are neither a step nor the answer are remarks."""
    steps, answer = [], ""
    for line in text.splitlines():
        if found := _STEP.match(line):
            steps.append(Step(found[1], found[2], found[3].strip()))
        elif line.lstrip().startswith("#E"):
            raise PlanError(f"not a step: {line.strip()!r:.100}", "a step is #E1 = Tool[argument] on a line of its own")
        elif found := _ANSWER.match(line):
            answer = found[1].strip()
    return Plan(tuple(steps), answer)


def plan_grammar(tools: Collection[str], max_steps: int, answer: bool) -> Grammar:
    """The form of a plan: steps numbered from 1, known tools, references to earlier steps only; so that whatever a
    model writes in it is a plan that can be carried out."""
    pattern = ""
    for number in range(max_steps, 0, -1):
        follows = [pattern] if pattern else []
        if answer:
            rest = f"\\n({'|'.join([*follows, f'Answer: {_argument(number, within=False)}'])})"
        else:
            rest = f"(\\n{pattern})?" if follows else ""
        pattern = f"#E{number} = ({'|'.join(tools)})\\[{_argument(number - 1)}\\]{rest}"
    return Grammar("regex", pattern)


def turn_grammar(tools: Collection[str], may_call: bool) -> Grammar:
    """One turn of the interleaved loop: a call, or the answer."""
    answer = f"Answer: {_argument(0, within=False)}"
    call = f"Call: ({'|'.join(tools)})\\[{_argument(0)}\\]"
    return Grammar("regex", f"({call}|{answer})" if may_call else answer)


def _argument(earlier: int, within: bool = True) -> str:
    """Text within brackets or to the end of its line, with the names of the first `earlier` results in it; it neither
    begins nor ends with a blank."""
    plain = r"\[\]\n\r#" if within else r"\n\r#"
    names = [f"|#E{number}" for number in range(earlier, 0, -1)]
    first = f"([^\\s{plain}]{''.join(names)})"
    return f"{first}([^{plain}]{''.join(names)}){{0,{MAX_ARGUMENT_CHARS - 1}}}"


def _check_references(names: tuple[str, ...], steps: list[str], where: str) -> None:
    for name in names:
        if name not in steps:
            raise PlanError(f"{where} uses {name}, which no step gives", f"the steps are {', '.join(steps)}")
