"""What comes back: a `Completion` of n `Choice`s, collected from the engine's events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from forerun.core import TokenLogprob, Usage
from forerun.engine.sequence import Event, FinishReason


@dataclass
class Choice:
    """One of a completion's n answers."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)


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


def collect(prompt_ids: list[int], n: int, events: Iterable[Event]) -> Completion:
    choices = [Choice() for _ in range(n)]
    total = Usage(prompt_tokens=len(prompt_ids))
    for event in events:
        if event.provisional:  # what stands of it comes again
            continue
        choice = choices[event.index]
        choice.text += event.text
        choice.token_ids += event.token_ids
        choice.logprobs += event.logprobs
        choice.finish_reason = event.finish_reason or choice.finish_reason
        if event.usage is not None:
            _merge(total, event.usage, first=event.index == 0)
    return Completion(prompt_ids, choices, total)


def _merge(total: Usage, part: Usage, first: bool) -> None:
    """Usage of n answers: the first one's prompt and first token, everybody's answer tokens, the slowest one's end."""
    total.add(part)
    total.total_s = max(total.total_s, part.total_s)
    if first:
        total.cached_tokens, total.queued_s, total.ttft_s = part.cached_tokens, part.queued_s, part.ttft_s
        total.served, total.prefill, total.provisional_s = dict(part.served), part.prefill, part.provisional_s
