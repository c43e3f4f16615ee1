"""What both ways of using tools share: limits, usage, chat requests within a budget, and examples: tasks solved before,
shown to the model as a plan with all results at once, or turn by turn. Small models need one or two.

Knows an `LLM` only as something that encodes and answers conversations.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from forerun.errors import BadRequest
from forerun.inputs import as_params
from forerun.options import check_number
from forerun.params import Grammar, SamplingParams
from forerun.recipes.planning.calls import Tool, check_tools
from forerun.recipes.planning.template import MAX_STEPS, Plan, PlanError, fill, parse

if TYPE_CHECKING:
    from forerun.llm import Completion

Messages = list[dict[str, Any]]


class ChatModel(Protocol):
    """The part of `LLM` that is used here."""

    def chat(self, messages: Messages, params: SamplingParams | None = None) -> list[Completion]: ...

    def encode(self, prompt: Messages) -> list[int]: ...


@dataclass(frozen=True)
class Limits:
    """Limits of one task; every value is checked on creation."""

    max_calls: int = 8
    tries: int = 3  # invalid plans before the task fails
    parallel: int = 8  # calls at once
    plan_tokens: int = 256  # of one plan, or of one turn of the interleaved loop
    answer_tokens: int = 256
    result_chars: int = 2000  # of a tool's result that reach the model
    timeout_s: float | None = None  # for one call
    token_budget: int | None = None  # prompts and answers of all requests of a task together

    def __post_init__(self) -> None:
        check_number("max_calls", self.max_calls, 1, MAX_STEPS, whole=True, hint="split the task")
        for name in ("tries", "parallel", "plan_tokens", "answer_tokens", "result_chars"):
            check_number(name, getattr(self, name), 1, whole=True)
        if self.token_budget is not None:
            check_number("token_budget", self.token_budget, 1, whole=True)
        if self.timeout_s is not None:
            check_number("timeout_s", self.timeout_s, 0, open_low=True, hint="leave it out for no limit")


@dataclass
class PlanUsage:
    """What a task has cost: requests, tokens, and seconds of the model, of tools, and in total."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt tokens, those read from cache
    completion_tokens: int = 0
    model_s: float = 0.0
    tools_s: float = 0.0  # wall time while calls ran, however many at once
    total_s: float = 0.0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    @property
    def computed_tokens(self) -> int:
        """Tokens that were not read from a cache."""
        return self.tokens - self.cached_tokens


@dataclass
class BudgetedChat:
    """Chat requests of one task, and what they cost together."""

    llm: ChatModel
    params: SamplingParams
    limits: Limits
    usage: PlanUsage = field(default_factory=PlanUsage)
    _start: float = field(default_factory=time.perf_counter)

    def ask(self, messages: Messages, max_tokens: int, grammar: Grammar | None = None) -> str:
        """One answer, within the rest of the budget."""
        budget = self.limits.token_budget
        if budget is not None:
            needed = self.usage.tokens + len(self.llm.encode(messages))
            if needed >= budget:
                raise PlanError(
                    f"the next request would bring the task to {needed:,} tokens before its answer, the budget is "
                    f"{budget:,}",
                    "raise token_budget, or shorten the task and its results",
                    self.close(),
                )
            max_tokens = min(max_tokens, budget - needed)
        start = time.perf_counter()
        found = self.llm.chat(messages, replace(self.params, max_tokens=max_tokens, grammar=grammar, n=1))[0]
        self.usage.model_s += time.perf_counter() - start
        self.usage.requests += 1
        self.usage.prompt_tokens += found.usage.prompt_tokens
        self.usage.cached_tokens += found.usage.cached_tokens
        self.usage.completion_tokens += found.usage.completion_tokens
        return found.text.strip()

    def close(self) -> PlanUsage:
        self.usage.total_s = time.perf_counter() - self._start
        return self.usage


def open_chat(
    llm: ChatModel, task: str, tools: Mapping[str, Tool], params: SamplingParams | None, limits: Limits | None
) -> BudgetedChat:
    """The chat of one task; what cannot be asked so is refused here."""
    if not isinstance(task, str) or not task.strip():
        raise BadRequest(f"a task is text, got {task!r:.80}", "describe what the tools are to find out")
    check_tools(tools)
    params = as_params(params)
    if params.grammar is not None or params.n != 1:
        hint = "leave grammar and n out of the parameters"
        raise BadRequest("plans bring their own grammar and take one answer", hint)
    return BudgetedChat(llm, params, limits or Limits())


def describe_tools(tools: Mapping[str, Tool]) -> str:
    """A line for each tool: its name and the first line of its documentation."""
    lines = []
    for name, tool in tools.items():
        about = (inspect.getdoc(tool) or "").partition("\n")[0]
        lines.append(f"{name}[input]: {about}" if about else f"{name}[input]")
    return "\n".join(lines)


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
            problem = f"the example {self.task!r:.60} has no result for {', '.join(missing) or 'any step'}"
            raise BadRequest(problem, "give every step of its plan a result")
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
