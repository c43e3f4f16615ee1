"""Plan first, then tools: the plan is written once with placeholders for results, calls run side by side, and the
prompt grows once, by all results together (ReWOO; with `answer="template"` Chain-of-Abstraction).

The second request begins with the first one's prompt and plan, so it reads both from the prefix tree. `interleaved` is
the baseline (ReAct): one tool call per request, whose prompt has all earlier results.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from forerun.errors import BadRequest
from forerun.params import SamplingParams
from forerun.recipes.planning.calls import CallResult, Tool, run_plan, run_step
from forerun.recipes.planning.chat import (
    BudgetedChat,
    ChatModel,
    Example,
    Limits,
    Messages,
    PlanUsage,
    as_plans,
    as_turns,
    describe_tools,
    open_chat,
    results_text,
)
from forerun.recipes.planning.template import Plan, PlanError, Step, fill, parse, plan_grammar, turn_grammar

_SYSTEM = """You plan before you act. Write which tools to call, one call a line, before any result is known:
#E1 = <tool>[<input>]
#E2 = <tool>[<input, where #E1 stands for the result of the first call>]
Use as few calls as the task needs. The tools:
{tools}"""
_TEMPLATE = "\nThe last line is the answer, with #E1, #E2, ... where results belong:\nAnswer: <text with #E1>"
_LOOP_SYSTEM = """You solve a task with tools, one call at a time. Each time, write one line: a call, or the answer.
Call: <tool>[<input>]
Answer: <one short sentence>
After a call you are told its result. Use as few calls as the task needs.
The tools:
{tools}"""
_CALL = re.compile(r"^\s*Call:\s*([A-Za-z_]\w*)\s*\[(.*)\]\s*$", re.MULTILINE)
_ANSWER = re.compile(r"^\s*Answer:\s*(.+)", re.MULTILINE | re.DOTALL)


@dataclass
class LoopResult:
    """A task's answer and the calls on the way to it."""

    calls: list[CallResult]
    answer: str
    usage: PlanUsage

    @property
    def latency_s(self) -> float:
        return self.usage.total_s


@dataclass
class PlanResult(LoopResult):
    """The same, with the plan that was carried out."""

    plan: Plan
    tries: int = 1  # plans that were asked for; 0: it was given

    @property
    def results(self) -> dict[str, str]:
        return {call.name: call.result for call in self.calls}


def solve(
    llm: ChatModel,
    task: str,
    tools: Mapping[str, Tool],
    *,
    plan: Plan | str | None = None,
    examples: Sequence[Example] = (),
    answer: Literal["generate", "template"] = "generate",
    constrain: bool = True,
    params: SamplingParams | None = None,
    limits: Limits | None = None,
) -> PlanResult:
    """Answer a task with tools: functions from text to text (coroutine functions, too).

    `plan`: one of your own, instead of the model's. `examples`: tasks solved before, for the model to see.
    `answer`: "generate" has the model write it from the results; "template" fills results into the plan's own last line
    and asks nothing more. `constrain`: a grammar lets the model write nothing but plans that can be carried out;
    without it, a plan that cannot be is sent back with the reason, up to `limits.tries` times.
    """
    if answer not in ("generate", "template"):
        raise BadRequest(f"answer is {answer!r}", "use generate or template")
    chat = open_chat(llm, task, tools, params, limits)
    limits, fills = chat.limits, answer == "template"
    messages: Messages = [
        {"role": "system", "content": _SYSTEM.format(tools=describe_tools(tools)) + (_TEMPLATE if fills else "")},
        *as_plans(examples),
        {"role": "user", "content": task},
    ]
    if plan is None:
        made, tries = _planned(chat, messages, tools, fills, constrain)
    else:
        made, tries = _given(plan, tools, fills, limits), 0
        messages.append({"role": "assistant", "content": made.text})
    start = time.perf_counter()
    calls = run_plan(
        made, tools, parallel=limits.parallel, timeout_s=limits.timeout_s, result_chars=limits.result_chars
    )
    chat.usage.tools_s = time.perf_counter() - start
    if fills:
        text = fill(made.answer, {call.name: call.result for call in calls})
    else:
        results = results_text({call.name: call.result for call in calls})
        asked = [*messages, {"role": "user", "content": results}]
        text = chat.ask(asked, limits.answer_tokens)
    return PlanResult(calls, text, chat.close(), made, tries)


def _planned(
    chat: BudgetedChat, messages: Messages, tools: Mapping[str, Tool], fills: bool, constrain: bool
) -> tuple[Plan, int]:
    """A plan that can be carried out; the conversation ends with it afterwards."""
    limits = chat.limits
    grammar = plan_grammar(tools, limits.max_calls, answer=fills) if constrain else None
    asked, problem = messages, PlanError("no plan")
    for number in range(1, limits.tries + 1):
        text = chat.ask(asked, limits.plan_tokens, grammar)
        try:
            plan = parse(text)
            _check(plan, tools, fills, limits)
        except PlanError as error:
            problem = error
            complaint = f"This plan cannot be carried out: {error}. {error.hint}. Write the whole plan again."
            asked = [*asked, {"role": "assistant", "content": text}, {"role": "user", "content": complaint}]
            continue
        messages[:] = [*asked, {"role": "assistant", "content": text}]
        return plan, number
    raise PlanError(f"no valid plan in {limits.tries} tries; the last one: {problem}", problem.hint, chat.close())


def _given(plan: Plan | str, tools: Mapping[str, Tool], fills: bool, limits: Limits) -> Plan:
    if not isinstance(plan, (Plan, str)):
        raise BadRequest(f"a plan is text or a Plan, got {plan!r:.80}", "write lines such as #E1 = Tool[argument]")
    made = parse(plan) if isinstance(plan, str) else plan
    _check(made, tools, fills, limits)
    return made


def _check(plan: Plan, tools: Mapping[str, Tool], fills: bool, limits: Limits) -> None:
    plan.check(tools, limits.max_calls)
    if fills and not plan.answer:
        raise PlanError("the plan has no answer line", "end it with a line such as Answer: text with #E1")


def interleaved(
    llm: ChatModel,
    task: str,
    tools: Mapping[str, Tool],
    *,
    examples: Sequence[Example] = (),
    constrain: bool = True,
    params: SamplingParams | None = None,
    limits: Limits | None = None,
) -> LoopResult:
    """Answer a task with tools, one call after the other; parameters as for `solve`."""
    chat = open_chat(llm, task, tools, params, limits)
    limits = chat.limits
    messages: Messages = [
        {"role": "system", "content": _LOOP_SYSTEM.format(tools=describe_tools(tools))},
        *as_turns(examples),
        {"role": "user", "content": task},
    ]
    calls: list[CallResult] = []
    wrong = 0
    while True:
        may_call = len(calls) < limits.max_calls
        grammar = turn_grammar(tools, may_call) if constrain else None
        text = chat.ask(messages, limits.plan_tokens if may_call else limits.answer_tokens, grammar)
        messages.append({"role": "assistant", "content": text})
        made, problem = _CALL.search(text), ""
        if made is None and (answer := _ANSWER.search(text)):
            return LoopResult(calls, answer[1].strip(), chat.close())
        if made is None:
            problem = f"{text!r:.80} is neither a call nor an answer"
        elif made[1] not in tools:
            problem = f"{made[1]!r} is no tool; the tools are {', '.join(tools)}"
        elif not may_call:
            problem = f"all {limits.max_calls} calls are used: answer now"
        if problem or made is None:
            wrong += 1
            if wrong >= limits.tries:
                raise PlanError(f"no usable turn in {wrong} tries: {problem}", "raise max_calls", chat.close())
            messages.append({"role": "user", "content": f"That is not possible: {problem}."})
            continue
        step = Step(f"#E{len(calls) + 1}", made[1], made[2].strip())
        found = run_step(step, tools[step.tool], limits.timeout_s, limits.result_chars)
        calls.append(replace(found, started_s=chat.usage.tools_s))
        chat.usage.tools_s += found.seconds
        messages.append({"role": "user", "content": f"Result: {found.result}"})
