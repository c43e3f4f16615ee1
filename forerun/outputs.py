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


class Collector:
    """A request's answers as its events come. No event is kept: a hundred thousand of them make Python search all
    that a process holds for garbage, a tenth of a second each time. Last events of answers go into `ended`, too."""

    def __init__(self, request: Request, ended: list[Event] | None = None) -> None:
        self._ended = [] if ended is None else ended
        self._request, self._choices = request, [Choice() for _ in range(request.params.n)]
        self._parts: dict[int, Usage] = {}

    def add(self, event: Event) -> None:
        if event.finish_reason is not None or event.error is not None:
            self._ended.append(event)
        if event.provisional:  # what is confirmed of it comes again
            return
        self._choices[event.index].add(event)
        if event.usage is not None:
            self._parts[event.index] = event.usage

    def completion(self) -> Completion:
        prompt_ids, parts = self._request.prompt_ids, self._parts
        return Completion(prompt_ids, self._choices, parts[0] if [*parts] == [0] else _merge(parts, len(prompt_ids)))


def collect(request: Request, events: Iterable[Event]) -> Completion:
    collector = Collector(request)
    for event in events:
        collector.add(event)
    return collector.completion()


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
    ended: list[Event] = []
    collectors = [Collector(request, ended) for request in requests]
    for request, collector in zip(requests, collectors, strict=True):
        request.sink = collector.add
    with counter(_answers(requests), "answers", quiet=not progress) as count:
        driver.drive(requests, ended, on_finish=count)
    return [collector.completion() for collector in collectors]


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
    collector = Collector(request)
    async for event in driver.astream(request):
        collector.add(event)
        if event.finish_reason is not None:
            on_finish()
    return collector.completion()


def _answers(requests: list[Request]) -> int:
    return sum(request.params.n for request in requests)
