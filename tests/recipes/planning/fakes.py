"""An `LLM` that says what a test wrote for it, and keeps what it was asked."""

from __future__ import annotations

from typing import Any

from forerun.core import SamplingParams, Usage
from forerun.llm import Choice, Completion


class Scripted:
    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[list[dict[str, Any]], SamplingParams]] = []

    def encode(self, prompt: list[dict[str, Any]]) -> list[int]:
        return list(range(sum(len(message["content"].split()) for message in prompt)))

    def chat(self, messages: list[dict[str, Any]], params: SamplingParams | None = None) -> list[Completion]:
        assert params is not None
        self.asked.append(([*messages], params))
        text = self.answers.pop(0)
        ids = self.encode(messages)
        usage = Usage(prompt_tokens=len(ids), cached_tokens=len(ids) // 2, completion_tokens=len(text.split()))
        return [Completion(ids, [Choice(text, [], "stop")], usage)]
