"""What comes back: a `Completion` of n `Choice`s, collected from the engine's events as a driver runs requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from forerun.core import TokenLogprob, Usage
from forerun.core.progress import counter
from forerun.engine.sequence import Event, FinishReason, Request
from forerun.runtime.driver import Driver


@dataclass
class Choice:
    """One of a completion's n answers."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def add(self, event: Event) -> None:
        self.text += event.text
        self.token_ids += event.token_ids
        self.logprobs += event.logprobs
        self.finish_reason = event.finish_reason or self.finish_reason


@dataclass
class Completion:
    """All answers to one prompt; `text`, `token_ids` and `finish_reason` are those of the first."""

    prompt_ids: list[int]
    choices: list[Choice]
    usage: Usage

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.choices[0].finish_reason


def collect(request: Request, events: Iterable[Event]) -> Completion:
    prompt_ids, choices = request.prompt_ids, [Choice() for _ in range(request.params.n)]
    parts: dict[int, Usage] = {}
    for event in events:
        if event.provisional:  # what is confirmed of it comes again
            continue
        choices[event.index].add(event)
        if event.usage is not None:
            parts[event.index] = event.usage
    return Completion(prompt_ids, choices, parts[0] if [*parts] == [0] else _merge(parts, len(prompt_ids)))


def _merge(parts: dict[int, Usage], prompt_tokens: int) -> Usage:
    """Usage of n answers: prompt and first token of the first, tokens of all, the end of the slowest."""
    total = Usage(prompt_tokens=prompt_tokens)
    for part in parts.values():
        total.add(part)
        total.total_s = max(total.total_s, part.total_s)
    first = parts.get(0, total)
    total.cached_tokens, total.queued_s, total.ttft_s = first.cached_tokens, first.queued_s, first.ttft_s
    total.served, total.prefill, total.provisional_s = dict(first.served), first.prefill, first.provisional_s
    return total


def complete(driver: Driver, requests: list[Request], progress: bool) -> list[Completion]:
    """Run all requests; one `Completion` each, in order."""
    with counter(_answers(requests), "answers", quiet=not progress) as count:
        runs = driver.run(requests, on_finish=count)
    return [collect(request, events) for request, events in zip(requests, runs, strict=True)]


async def acomplete(driver: Driver, requests: list[Request], progress: bool) -> list[Completion]:
    """The same for asyncio; an error in one of them cancels the others."""
    with counter(_answers(requests), "answers", quiet=not progress) as count:
        tasks = [asyncio.ensure_future(_completion(driver, request, count)) for request in requests]
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            raise


async def _completion(driver: Driver, request: Request, on_finish: Callable[[], None]) -> Completion:
    events = []
    async for event in driver.astream(request):
        events.append(event)
        if event.finish_reason is not None:
            on_finish()
    return collect(request, events)


def _answers(requests: list[Request]) -> int:
    return sum(request.params.n for request in requests)
