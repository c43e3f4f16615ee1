"""Costs measured from outside: those of simulated replicas are found again."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from forerun.errors import ForerunError
from forerun_research.bench.load_costs import BRIEF, MIDDLE, ROWS, SPREAD, TRIES, WHOLE, measured_costs
from forerun_research.bench.load_replica import ReplicaCosts
from forerun_research.bench.load_simulation import SimulatedSetup, simulate
from forerun_research.bench.load_targets import Messages, ReplayedAnswer
from forerun_research.bench.load_trace import CHARS_PER_TOKEN, TraceRequest, TraceTexts

KNOWN = ReplicaCosts(
    step_s=0.005,
    row_s=0.001,
    prompt_token_s=0.001,
    attention_s=1e-6,
    answer_attention_s=2e-7,
    encode_s=1e-5,
    request_s=0.02,
    several_s=0.002,
    near_attention_s=1e-6,
    far_attention_s=3e-6,
)
TIMES = (
    ("step_s", 0.1), ("row_s", 0.1), ("prompt_token_s", 0.1), ("attention_s", 0.2), ("answer_attention_s", 0.3),
    ("several_s", 0.1), ("near_attention_s", 0.3), ("far_attention_s", 0.1),
)  # fmt: skip
ROUND_S = 1000.0  # between two rounds of probes


class SimulatedTarget:
    """Answers as replicas with known costs would, together what is sent together."""

    def __init__(self, busy: int, costs: dict[int, ReplicaCosts]) -> None:
        self.setup, self.costs = SimulatedSetup(busy, busy), costs
        self.trace: list[TraceRequest] = []
        self.open: list[tuple[ReplayedAnswer, asyncio.Event]] = []
        self.rounds = 0

    async def ask(self, answer: ReplayedAnswer, messages: Messages, max_tokens: int, key: str | None) -> None:
        text = messages[-1]["content"]
        if not self.open:
            self.rounds += 1
            asyncio.get_running_loop().call_later(0.5, self.compute)  # all of a round have come
        tokens = round(len(text) / CHARS_PER_TOKEN)
        arrival = self.rounds * ROUND_S + 0.001 * len(self.open)
        self.trace.append(TraceRequest(arrival, tokens, max_tokens, text.partition(".")[0]))
        done = asyncio.Event()
        self.open.append((answer, done))
        await done.wait()

    def compute(self) -> None:
        found = simulate(self.trace, self.setup, self.costs)
        for own, (answer, done) in zip(found[-len(self.open) :], self.open, strict=True):
            answer.sent, answer.token_times = own.sent, own.token_times
            answer.prompt_tokens, answer.cached_tokens = own.prompt_tokens, own.cached_tokens
            done.set()
        self.open.clear()


@pytest.mark.parametrize("busy", [1, 2])
async def test_the_costs_of_simulated_replicas_are_found_again(busy: int):
    slower = KNOWN.scaled(1.8)
    target = SimulatedTarget(busy, {1: KNOWN, 2: slower})
    found = await measured_costs(target, TraceTexts(), busy)
    known = KNOWN if busy == 1 else slower
    assert len(target.trace) == busy * (1 + 6 * TRIES + 2 + 2 * ROWS)
    assert {request.prompt_tokens for request in target.trace} == {BRIEF, MIDDLE, WHOLE}
    for name, within in TIMES:
        assert getattr(found, name) == pytest.approx(getattr(known, name), rel=within), name
    assert 0.7 * KNOWN.request_s < found.request_s < 1.3 * known.request_s  # sent while no replica computes


async def test_costs_that_are_nothing_are_found_as_nothing():
    nothing = ("attention_s", "encode_s", "answer_attention_s", "several_s", "near_attention_s", "far_attention_s")
    known = replace(KNOWN, **dict.fromkeys(nothing, 0.0))
    found = await measured_costs(SimulatedTarget(1, {1: known}), TraceTexts())
    assert found.attention_s < 1e-7 and found.encode_s < 1e-6
    assert found.spread == pytest.approx([0.0] * SPREAD, abs=1e-4)
    assert all(-1e-12 < getattr(found, name) < 1e-7 for name in nothing[2:])
    assert found.prompt_token_s == pytest.approx(known.prompt_token_s, rel=0.1)


async def test_a_probe_that_fails_is_an_error():
    class Refusing:
        async def ask(self, answer: ReplayedAnswer, *_: object) -> None:
            answer.error = "HTTP 401"

    with pytest.raises(ForerunError, match="a probe failed: HTTP 401"):
        await measured_costs(Refusing(), TraceTexts())
