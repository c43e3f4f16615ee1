"""What the load run asks: short questions and long documents, greedy and sampled, some left half-way.

The same list goes to the server as HTTP and to the library as prompts. Knows neither.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from forerun import data
from forerun_research.bench.common import long_text

PATH = "/v1/chat/completions"
ANSWER_TOKENS = (16, 32, 48, 64, 96)  # tokens of answers
DOCUMENT_WORDS = (150, 300, 500)  # of a document


@dataclass(frozen=True)
class LoadRequest:
    """One request; `leave_after`: events of its stream after which the client goes away, 0: it stays."""

    content: str
    max_tokens: int
    temperature: float
    seed: int
    leave_after: int = 0

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.content}]

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def body(self, model: str) -> bytes:
        asked: dict[str, Any] = {
            "model": model,
            "messages": self.messages,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return json.dumps(asked).encode()

    def http(self, model: str, host: str) -> bytes:
        body = self.body(model)
        head = f"POST {PATH} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        return f"{head}\r\n\r\n".encode() + body


def mixed(count: int, seed: int, leaving: float = 0.0, sampled: float = 0.4) -> list[LoadRequest]:
    """Requests of all kinds; `leaving` and `sampled`: shares of those. The same seed, the same list."""
    rng = random.Random(seed)
    questions = [prompt.text for prompt in data.read_prompts() if len(prompt.text) < 600]
    words = long_text().split(" ")
    asks = []
    for number in range(count):
        content = f"({seed}-{number}) {rng.choice(questions)}"
        if rng.random() < 0.25:  # documents begin at few places: some share their beginning, as documents do
            start = rng.randrange(6) * 200
            content = f"{' '.join(words[start : start + rng.choice(DOCUMENT_WORDS)])}\n\n{content}"
        asks.append(
            LoadRequest(
                content,
                rng.choice(ANSWER_TOKENS),
                0.8 if rng.random() < sampled else 0.0,
                rng.randrange(1 << 30),
                rng.randrange(1, 12) if rng.random() < leaving else 0,
            )
        )
    return asks


def short(count: int, seed: int) -> list[LoadRequest]:
    """Short questions of two tokens each: for the time to the first."""
    asked = mixed(count, seed, sampled=0.0)
    return [LoadRequest(ask.content[-200:], 2, 0.0, 0) for ask in asked]
