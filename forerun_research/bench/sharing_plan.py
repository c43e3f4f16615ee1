"""Planning before tools beside the interleaved loop, on the same tasks, tools and examples: tokens, seconds, answers.

The tools look numbers up in a small table and reckon; each lookup takes as long as a request to another machine might.
"""

from __future__ import annotations

import ast
import operator
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from forerun.params import Grammar, SamplingParams
from forerun.recipes import plan
from forerun.recipes.planning.template import fill, turn_grammar

if TYPE_CHECKING:
    from forerun.llm import LLM, Completion, Messages

PLAN, INTERLEAVED = "plan", "interleaved"

INHABITANTS = {"oakford": 1204, "millbay": 866, "ashdon": 340, "burwell": 300, "thornby": 2150, "sandwick": 512}
_SIGNS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
EXAMPLES = [
    plan.Example(
        "How many more inhabitants has Ashdon than Burwell?",
        "#E1 = Inhabitants[Ashdon]\n#E2 = Inhabitants[Burwell]\n#E3 = Reckon[#E1 - #E2]",
        {"#E1": "340", "#E2": "300", "#E3": "40"},
        "Ashdon has 40 inhabitants more than Burwell.",
    ),
    plan.Example("How much is 8 times 7?", "#E1 = Reckon[8 * 7]", {"#E1": "56"}, "It is 56."),
]


@dataclass(frozen=True)
class ToolTask:
    text: str
    plan: str  # the calls it needs
    right: str  # what a right answer has in it


TASKS = [
    ToolTask(
        "How many more inhabitants has Oakford than Millbay?",
        "#E1 = Inhabitants[Oakford]\n#E2 = Inhabitants[Millbay]\n#E3 = Reckon[#E1 - #E2]",
        "338",
    ),
    ToolTask(
        "How many inhabitants have Millbay, Sandwick and Thornby together?",
        "#E1 = Inhabitants[Millbay]\n#E2 = Inhabitants[Sandwick]\n#E3 = Inhabitants[Thornby]\n"
        "#E4 = Reckon[#E1 + #E2 + #E3]",
        "3528",
    ),
    ToolTask("How much is 17 times 23?", "#E1 = Reckon[17 * 23]", "391"),
    ToolTask(
        "How many inhabitants have Oakford and Sandwick together?",
        "#E1 = Inhabitants[Oakford]\n#E2 = Inhabitants[Sandwick]\n#E3 = Reckon[#E1 + #E2]",
        "1716",
    ),
    ToolTask(
        "How many more inhabitants has Thornby than Oakford?",
        "#E1 = Inhabitants[Thornby]\n#E2 = Inhabitants[Oakford]\n#E3 = Reckon[#E1 - #E2]",
        "946",
    ),
    ToolTask("How many inhabitants has Millbay?", "#E1 = Inhabitants[Millbay]", "866"),
]
LIMITS = plan.Limits(max_calls=5, plan_tokens=128, answer_tokens=32)
SUMS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "model_s", "tools_s", "total_s")


def tools(wait_s: float) -> dict[str, Callable[[str], Any]]:
    def inhabitants(town: str) -> int:
        """how many people live in a town, by its name"""
        time.sleep(wait_s)
        return INHABITANTS[town.strip().lower()]

    def reckon(expression: str) -> Any:
        """the value of an arithmetic expression such as 3 * 4"""
        return _value(ast.parse(expression.strip(), mode="eval").body)

    return {"Inhabitants": inhabitants, "Reckon": reckon}


class ScriptedLLM:
    """An LLM whose first requests give these texts: it generates them token by token as usual, but has no choice. So
    both ways make the same calls, whatever the model would have chosen, and only what the ways cost differs."""

    def __init__(self, llm: LLM, texts: list[str], last: Grammar | None) -> None:
        self.llm, self.texts, self.last = llm, list(texts), last
        self.encode = llm.encode

    def chat(self, messages: Messages, params: SamplingParams | None = None) -> list[Completion]:
        assert params is not None
        grammar = Grammar("regex", re.escape(self.texts.pop(0))) if self.texts else self.last
        return self.llm.chat(messages, replace(params, grammar=grammar))


def run(llm: LLM, count: int, wait_s: float = 0.2) -> dict[str, Any]:
    """The first `count` tasks both ways, once with the calls they need and once with those the model chooses. Each way
    starts with a cold cache and keeps it from task to task."""
    own = tools(wait_s)
    found: dict[str, Any] = {"tasks": min(count, len(TASKS)), "tool_wait_s": wait_s}
    for name, led in (("same_calls", True), ("own_calls", False)):
        both = {}
        for way in (PLAN, INTERLEAVED):
            llm.clear_cache()
            both[way] = _tasks(way, llm, TASKS[:count], own, led)
        found[name] = both | _ratios(both)
    return found


def _ratios(both: dict[str, Any]) -> dict[str, Any]:
    """How many times more the interleaved loop takes."""
    names = {"tokens_ratio": "tokens", "computed_ratio": "computed_tokens", "latency_ratio": "total_s"}
    return {name: round(both[INTERLEAVED][key] / max(both[PLAN][key], 1e-9), 3) for name, key in names.items()}


def _tasks(way: str, llm: LLM, tasks: list[ToolTask], own: dict[str, Any], led: bool) -> dict[str, Any]:
    sums: dict[str, Any] = dict.fromkeys(SUMS, 0) | {"calls": 0, "right": 0, "failed": 0}
    for task in tasks:
        guide: Any = _led(way, llm, task, own) if led else llm
        go: Callable[..., Any] = plan.solve if way == PLAN else plan.interleaved
        try:
            done = go(guide, task.text, own, examples=EXAMPLES, limits=LIMITS)
        except plan.PlanError as error:  # what it cost counts all the same
            sums["failed"] += 1
            spent = error.usage
        else:
            spent = done.usage
            sums["calls"] += len(done.calls)
            sums["right"] += task.right in done.answer.replace(",", "")
        if isinstance(spent, plan.PlanUsage):
            for name, value in asdict(spent).items():
                sums[name] += value
    sums["tokens"] = sums["prompt_tokens"] + sums["completion_tokens"]
    sums["computed_tokens"] = sums["tokens"] - sums["cached_tokens"]
    return {name: round(value, 3) for name, value in sums.items()}


def _led(way: str, llm: LLM, task: ToolTask, own: dict[str, Any]) -> ScriptedLLM:
    """The texts that lead to the calls a task needs; the answer is the model's own."""
    if way == PLAN:
        return ScriptedLLM(llm, [task.plan], None)
    waitless, results, turns = tools(0.0), dict[str, str](), list[str]()
    for step in plan.parse(task.plan).steps:
        argument = fill(step.argument, results)
        results[step.name] = str(waitless[step.tool](argument))
        turns.append(f"Call: {step.tool}[{argument}]")
    return ScriptedLLM(llm, turns, turn_grammar(own, may_call=False))


def _value(node: ast.AST) -> Any:
    if isinstance(node, ast.BinOp) and type(node.op) in _SIGNS:
        return _SIGNS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return node.value
    raise ValueError("only numbers and + - * / can be reckoned with")
