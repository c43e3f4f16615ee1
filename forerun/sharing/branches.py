"""Answers that run side by side: each is a request of its own, all share the engine's steps and the prefix tree.

The engine steps in its own thread, so that functions of the caller (scores) run meanwhile. Knows requests and events;
not why a branch was started.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from forerun.core import SamplingParams, Usage
from forerun.engine.sequence import Event
from forerun.errors import BadRequest
from forerun.llm import LLM
from forerun.outputs import Choice
from forerun.runtime.threads import run_in_thread

T = TypeVar("T")


@dataclass(eq=False)
class Branch:
    """One request and what it has generated so far."""

    prompt_ids: list[int]
    params: SamplingParams
    answer: Choice = field(default_factory=Choice)
    usage: Usage = field(default_factory=Usage)
    request_id: int | None = None
    stopped: bool = False

    def stop(self, llm: LLM) -> None:
        """Cancel it at the next step; its last event is still emitted, with its usage."""
        self.stopped = True
        if self.request_id is not None:
            llm.engine.cancel(self.request_id)

    def add_event(self, event: Event) -> None:
        self.request_id = event.request_id
        self.answer.add(event)
        self.usage = event.usage or self.usage


async def run_branch(
    llm: LLM, branch: Branch, on_tokens: Callable[[Branch], Coroutine[Any, Any, None]] | None = None
) -> Branch:
    """Run a branch to its end; `on_tokens` is awaited after each of its events, and meanwhile the engine goes on."""
    async with aclosing(llm.astream(branch.prompt_ids, branch.params)) as events:  # type: ignore[type-var]
        async for event in events:
            branch.add_event(event)
            if branch.stopped:
                branch.stop(llm)  # it may have been stopped before its request had an id
            elif on_tokens is not None and event.finish_reason is None:
                await on_tokens(branch)
    return branch


async def gather_or_cancel(tasks: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all at once; where one fails, the others are cancelled."""
    running = [asyncio.ensure_future(task) for task in tasks]
    try:
        return await asyncio.gather(*running)
    except BaseException:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        raise


def run_sync(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine for a blocking caller, inside a running event loop too (as in a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    return run_in_thread(lambda: asyncio.run(work))


def checked_score(score: Callable[[T], float], subject: T, what: str) -> float:
    """The score that a caller's function gives; all that can be wrong with it is a `BadRequest`."""
    try:
        value = score(subject)
    except Exception as error:
        hint = "that one has no score, the others are not affected; make the function return a number for any text"
        raise BadRequest(f"the score function raised {type(error).__name__} on {what}: {error}", hint) from error
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise BadRequest(f"the score function gave {value!r} for {what}", "return a finite number")
    return float(value)
