"""Where prompt tokens came from, and what a finished answer costs: per session and in total.

Fed with the `Usage` of every answer as it ends. Knows no engine, no cache and no text.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from forerun.core import Usage

SERVED = ("pool", "host", "disk", "store", "approximate", "computed")
CACHES = ("pool", "host", "disk", "store")


@dataclass
class Account:
    """Sums over answers. Each of a request's n answers has the whole prompt, and reads most of it from the pool."""

    answers: int = 0  # finished ones: cancelled and failed requests cost, but answer nothing
    requests: int = 0  # the others, too
    prompt_tokens: int = 0
    served: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SERVED, 0))
    written: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0  # from submission to end, answer by answer: answers of one batch count side by side

    def add(self, usage: Usage, finished: bool) -> None:
        self.requests += 1
        self.answers += int(finished)
        self.prompt_tokens += sum(usage.served.values())  # of a request that was cancelled, what it came to
        for name, tokens in usage.served.items():
            self.served[name] += tokens
        self.written += usage.written
        self.completion_tokens += usage.completion_tokens
        self.seconds += usage.total_s

    @property
    def computed(self) -> int:
        """Prompt tokens that the model had to run."""
        return self.served["computed"]

    @property
    def cached_share(self) -> float:
        """Part of all prompt tokens that was read from a cache, whichever."""
        cached = sum(self.served[name] for name in CACHES)
        return cached / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def computed_per_answer(self) -> float:
        """Tokens that the model ran for one finished answer: prompt tokens no cache had, and the answer's own."""
        return (self.computed + self.completion_tokens) / self.answers if self.answers else 0.0

    @property
    def seconds_per_answer(self) -> float:
        return self.seconds / self.answers if self.answers else 0.0

    def record(self) -> dict[str, Any]:
        """Every figure, the derived ones too, ready for JSON."""
        names = ("answers", "requests", "prompt_tokens", "written", "completion_tokens", "seconds")
        derived = ("computed", "cached_share", "computed_per_answer", "seconds_per_answer")
        return {name: getattr(self, name) for name in (*names, *derived)} | {"served": dict(self.served)}


@dataclass
class Stats(Account):
    """All answers of one LLM so far; `sessions` has the part of each session by its name."""

    sessions: dict[str, Account] = field(default_factory=dict)
    tiers: dict[str, Any] = field(default_factory=dict)  # what host memory and disk hold, where there are such

    def book(self, session: str | None, usage: Usage, finished: bool) -> None:
        self.add(usage, finished)
        if session is not None:
            self.sessions.setdefault(session, Account()).add(usage, finished)

    def snapshot(self, tiers: dict[str, Any] | None = None) -> Stats:
        """As it is now; what happens later does not change it."""
        taken = deepcopy(self)
        taken.tiers = tiers or {}
        return taken

    def record(self) -> dict[str, Any]:
        sessions = {name: account.record() for name, account in self.sessions.items()}
        return super().record() | {"sessions": sessions, "tiers": self.tiers}
