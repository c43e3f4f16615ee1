"""Costs measured from outside: those of a simulated replica are found again."""

from __future__ import annotations

import pytest

from forerun.errors import ForerunError
from forerun_research.bench.load_costs import DOCUMENT_TOKENS, LONG, ROWS, SHORT, TRIES, measured_costs
from forerun_research.bench.load_simulation import ReplicaCosts, SimulatedSetup, simulate
from forerun_research.bench.load_targets import Messages, ReplayedAnswer
from forerun_research.bench.load_trace import TraceRequest, TraceTexts

KNOWN = ReplicaCosts(
    step_s=0.005,
    row_s=0.001,
    prompt_token_s=0.001,
    attention_s=1e-6,
    answer_attention_s=2e-7,
    encode_s=1e-5,
    request_s=0.02,
)


class SimulatedTarget:
    """Answers as a replica with known costs would; probes of a kind are sent together."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def ask(self, answer: ReplayedAnswer, messages: Messages, max_tokens: int, key: str | None) -> None:
        text = messages[-1]["content"]
        document = next((name for name in DOCUMENT_TOKENS if text.startswith(name)), None)
        before = [TraceRequest(0.0, self.size(document), 2, document)] if document and document in self.asked else []
        together = ROWS if answer.number or self.beside(document) else 1
        trace = [*before, *(TraceRequest(100.0, self.size(document), max_tokens, document) for _ in range(together))]
        found = simulate(trace, SimulatedSetup(1, 1), KNOWN)[-1]
        answer.sent, answer.token_times = found.sent, found.token_times
        answer.prompt_tokens, answer.cached_tokens = found.prompt_tokens, found.cached_tokens
        self.asked.append(document or "")

    @staticmethod
    def size(document: str | None) -> int:
        return 24 + DOCUMENT_TOKENS.get(document or "", 0)

    def beside(self, document: str | None) -> bool:
        """Whether this is one of the last two kinds, which are sent many at once."""
        return self.asked.count("") > TRIES if document is None else self.asked.count(LONG) > TRIES


async def test_the_costs_of_a_simulated_replica_are_found_again():
    target = SimulatedTarget()
    found = await measured_costs(target, TraceTexts())
    assert target.asked.count("") == 1 + TRIES + ROWS and target.asked.count(SHORT) == 1
    assert found.step_s == pytest.approx(KNOWN.step_s, rel=0.1) and found.row_s == pytest.approx(KNOWN.row_s, rel=0.1)
    assert found.prompt_token_s == pytest.approx(KNOWN.prompt_token_s, rel=0.05)
    assert found.attention_s == pytest.approx(KNOWN.attention_s, rel=0.1)
    assert found.answer_attention_s == pytest.approx(KNOWN.answer_attention_s, rel=0.25)
    assert found.request_s == pytest.approx(KNOWN.request_s, rel=0.25)


async def test_a_probe_that_fails_is_an_error():
    class Refusing:
        async def ask(self, answer: ReplayedAnswer, *_: object) -> None:
            answer.error = "HTTP 401"

    with pytest.raises(ForerunError, match="a probe failed: HTTP 401"):
        await measured_costs(Refusing(), TraceTexts())
