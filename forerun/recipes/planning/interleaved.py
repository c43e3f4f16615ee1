"""The interleaved loop (ReAct): one tool call per request, whose prompt has all earlier results.

The baseline of `solve`: every call costs another request with a longer prompt, and calls never run side by side.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from forerun.params import SamplingParams
from forerun.recipes.planning.calls import CallResult, Tool, check_tools, run_step
from forerun.recipes.planning.chat import (
    BudgetedChat,
    ChatModel,
    Limits,
    Messages,
    PlanUsage,
    check_task,
    checked_params,
    describe_tools,
)
from forerun.recipes.planning.examples import Example, as_turns
from forerun.recipes.planning.template import PlanError, Step, turn_grammar

_SYSTEM = """You solve a task with tools, one call at a time. Each time, write one line: a call, or the answer.
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
    check_task(task)
    check_tools(tools)
    limits = limits or Limits()
    chat = BudgetedChat(llm, checked_params(params), limits)
    messages: Messages = [
        {"role": "system", "content": _SYSTEM.format(tools=describe_tools(tools))},
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
