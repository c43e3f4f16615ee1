"""Runs a plan: calls run side by side as soon as the results they need exist.

A tool that raises or takes too long has its error as its result, and calls that need this result are not run; all
others are. Knows tools as functions from text to anything; no model.
"""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from forerun.errors import BadRequest
from forerun.recipes.planning.template import MAX_STEPS, TOOL_NAME, Plan, Step, fill

Tool = Callable[[str], Any]  # may be a coroutine function


@dataclass(frozen=True)
class CallResult:
    """One finished call."""

    name: str  # the step: "#E1"
    tool: str
    argument: str  # with results filled in
    result: str
    failed: bool = False
    started_s: float = 0.0  # since the first call
    seconds: float = 0.0


def check_tools(tools: Mapping[str, Tool]) -> None:
    if not isinstance(tools, Mapping) or not tools:
        raise BadRequest(f"tools must map names to functions, got {tools!r:.80}", "pass {'Search': search}")
    for name, tool in tools.items():
        if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
            raise BadRequest(f"a tool cannot be called {name!r:.80}", "use letters, digits and _")
        if not callable(tool):
            raise BadRequest(f"the tool {name} is a {type(tool).__name__}, not a function", "pass a function of text")


def run_plan(
    plan: Plan,
    tools: Mapping[str, Tool],
    *,
    parallel: int = 8,
    timeout_s: float | None = None,
    result_chars: int = 2000,
) -> list[CallResult]:
    """Every call of a plan, in the plan's order."""
    check_tools(tools)
    plan.check(tools, MAX_STEPS)
    start, done = time.perf_counter(), dict[str, CallResult]()
    waiting, running = list(plan.steps), dict[str, tuple[Step, float]]()
    ended: queue.SimpleQueue[CallResult] = queue.SimpleQueue()
    while waiting or running:
        for step in [step for step in waiting if all(name in done for name in step.needs)]:
            if broken := [name for name in step.needs if done[name].failed]:
                done[step.name] = CallResult(step.name, step.tool, step.argument, f"not run: {broken[0]} failed", True)
            elif len(running) < parallel:
                began = time.perf_counter()
                running[step.name] = (step, began)
                argument = fill(step.argument, {name: done[name].result for name in step.needs})
                _start(step, argument, tools[step.tool], began - start, result_chars, ended)
            else:
                continue
            waiting.remove(step)
        if running:
            _collect(running, done, ended, timeout_s, start)
    return [done[step.name] for step in plan.steps]


def run_step(step: Step, tool: Tool, timeout_s: float | None, result_chars: int) -> CallResult:
    """One call, in a thread of its own, so that a timeout can abandon it and coroutines have a loop to run in."""
    ended: queue.SimpleQueue[CallResult] = queue.SimpleQueue()
    _start(step, step.argument, tool, 0.0, result_chars, ended)
    try:
        return ended.get(timeout=timeout_s)
    except queue.Empty:
        assert timeout_s is not None
        return _timed_out(step, timeout_s, 0.0, timeout_s)


def _call(step: Step, tool: Tool, argument: str, result_chars: int, since: float) -> CallResult:
    start = time.perf_counter()
    try:
        found = tool(argument)
        if inspect.isawaitable(found):
            found = asyncio.run(_awaited(found))
        result, failed = _clipped(str(found), result_chars), False
    except Exception as error:  # a tool is foreign code: its errors are results
        result, failed = _clipped(f"error: {type(error).__name__}: {error}", result_chars), True
    return CallResult(step.name, step.tool, argument, result, failed, since, time.perf_counter() - start)


def _start(
    step: Step, argument: str, tool: Tool, since: float, result_chars: int, ended: queue.SimpleQueue[CallResult]
) -> None:
    def run() -> None:
        ended.put(_call(step, tool, argument, result_chars, since))

    # a daemon: a tool that never returns must not keep the process alive
    threading.Thread(target=run, name=f"forerun-tool-{step.name}", daemon=True).start()


def _collect(
    running: dict[str, tuple[Step, float]],
    done: dict[str, CallResult],
    ended: queue.SimpleQueue[CallResult],
    timeout_s: float | None,
    start: float,
) -> None:
    """Wait for one call to end, or for the oldest to run out of time."""
    oldest = min(began for _, began in running.values())
    left = None if timeout_s is None else max(0.0, oldest + timeout_s - time.perf_counter())
    try:
        made = ended.get(timeout=left)
        if running.pop(made.name, None) is not None:  # else it had run out of time before
            done[made.name] = made
    except queue.Empty:
        now = time.perf_counter()
        for name, (step, began) in list(running.items()):
            if timeout_s is not None and now - began >= timeout_s:
                del running[name]
                done[name] = _timed_out(step, timeout_s, began - start, now - began)


def _timed_out(step: Step, timeout_s: float, since: float, seconds: float) -> CallResult:
    result = f"error: no result within {timeout_s:g} s"
    return CallResult(step.name, step.tool, step.argument, result, True, since, seconds)


async def _awaited(found: Any) -> Any:
    return await found


def _clipped(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else f"{text[:max_chars]} ... ({len(text) - max_chars:,} more characters)"
