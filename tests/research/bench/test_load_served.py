"""Servers that a bench starts: what begins the same goes to one of several, and one that does not start says why."""

from __future__ import annotations

import pytest

from forerun.errors import ForerunError
from forerun_research.bench.load_served import SpreadTarget, served
from forerun_research.bench.load_targets import Messages, ReplayedAnswer


class Named:
    def __init__(self, name: str) -> None:
        self.name = name

    async def ask(self, answer: ReplayedAnswer, messages: Messages, max_tokens: int, key: str | None) -> None:
        answer.text = self.name


async def test_prompts_that_begin_the_same_go_to_the_same_target():
    target, found = SpreadTarget([Named("a"), Named("b")]), []
    for text in ("one" * 50, "two" * 50, "one" * 90, "three" * 50, "two" * 60):
        answer = ReplayedAnswer(0)
        await target.ask(answer, [{"role": "user", "content": text}], 1, None)
        found.append(answer.text)
    assert found == ["a", "b", "a", "a", "b"]


def test_a_server_that_does_not_start_says_why():
    with pytest.raises(ForerunError, match="the server did not start: .*no-such-model"), served("no-such-model", None):
        pass
