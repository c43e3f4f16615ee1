"""Costs measured from outside: those of simulated replicas are found again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forerun.errors import ForerunError
from forerun_research.bench import load_costs
from forerun_research.bench.load_costs import (
    BRIEF,
    GROWN,
    MIDDLE,
    QUESTIONS,
    ROWS,
    SPREAD,
    TRIES,
    WHOLE,
    Probes,
    measured_costs,
    probed,
    solved_together,
)
from forerun_research.bench.load_replica import ReplicaCosts
from forerun_research.bench.load_simulation import SimulatedSetup, simulate
from forerun_research.bench.load_targets import EndpointTarget, ReplayedAnswer
from forerun_research.bench.load_trace import TraceRequest, TraceTexts

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
PAUSE_S = 0.001  # between two rounds of probes


class SimulatedProbes:
    """`replay` for replicas with known costs."""

    def __init__(self, busy: int, costs: dict[int, ReplicaCosts]) -> None:
        self.setup, self.costs = SimulatedSetup(busy, busy), costs
        self.trace: list[TraceRequest] = []
        self.now = 0.0

    async def replay(self, target: object, trace: list[TraceRequest], *_: object) -> list[ReplayedAnswer]:
        self.trace += [replace(own, arrival_s=own.arrival_s + self.now) for own in trace]
        found = simulate(self.trace, self.setup, self.costs)
        self.now = max(answer.token_times[-1] for answer in found) + PAUSE_S
        return found[-len(trace) :]

    async def costs_found(self, monkeypatch: pytest.MonkeyPatch) -> ReplicaCosts:
        monkeypatch.setattr(load_costs, "replay", self.replay)
        return await measured_costs(EndpointTarget("http://unused/v1", "", {}), TraceTexts(), self.setup.replicas)

    async def probes(self, monkeypatch: pytest.MonkeyPatch, busy: int) -> Probes:
        monkeypatch.setattr(load_costs, "replay", self.replay)
        return await probed(EndpointTarget("http://unused/v1", "", {}), TraceTexts(), busy)


@pytest.mark.parametrize("busy", [1, 2])
async def test_the_costs_of_simulated_replicas_are_found_again(busy: int, monkeypatch: pytest.MonkeyPatch):
    slower = KNOWN.scaled(1.8)
    probes = SimulatedProbes(busy, {1: KNOWN, 2: slower})
    found = await probes.costs_found(monkeypatch)
    known = KNOWN if busy == 1 else slower
    mixed = busy if busy > 1 else 0
    assert len(probes.trace) == busy * (1 + 8 * TRIES + 2 + 2 * ROWS + TRIES * (1 + QUESTIONS) + mixed)
    assert {request.prompt_tokens for request in probes.trace} == {BRIEF, MIDDLE, WHOLE} | ({GROWN} if mixed else set())
    for name, within in TIMES:
        assert getattr(found, name) == pytest.approx(getattr(known, name), rel=within), name
    assert 0.7 * KNOWN.request_s < found.request_s < 1.3 * known.request_s  # sent while no replica computes


@pytest.mark.parametrize(("busy", "shares"), [(2, (0.2, 0.7)), (4, (0.8, 0.3))])
async def test_how_answers_and_prompts_of_other_replicas_slow_each_other_is_found_again(
    busy: int, shares: tuple[float, float], monkeypatch: pytest.MonkeyPatch
):
    names = ("prompts_beside_answers", "answers_beside_prompts")
    known = {1: KNOWN, busy: replace(KNOWN.scaled(0.9 * busy), **dict(zip(names, shares, strict=True)))}
    replicas = SimulatedProbes(busy, known)
    alone, together = [await replicas.probes(monkeypatch, count) for count in (1, busy)]
    found = solved_together({1: alone, busy: together})[busy]
    assert [getattr(found, name) for name in names] == pytest.approx(shares, abs=0.15)
    assert solved_together({1: alone})[1].prompts_beside_answers == 1.0  # nothing is measured of one alone


@pytest.mark.parametrize("factor", [1.0, 1.8, 2.6])
async def test_how_intake_slows_steps_is_found_again(factor: float, monkeypatch: pytest.MonkeyPatch):
    found = await SimulatedProbes(1, {1: replace(KNOWN, intake_factor=factor)}).costs_found(monkeypatch)
    assert found.intake_factor == pytest.approx(factor, abs=0.21)


@pytest.mark.parametrize("cold", [0.0, 2e-5])
async def test_what_reading_after_a_rest_takes_is_found_again(cold: float, monkeypatch: pytest.MonkeyPatch):
    found = await SimulatedProbes(1, {1: replace(KNOWN, cold_attention_s=cold)}).costs_found(monkeypatch)
    assert found.cold_attention_s == pytest.approx(cold, abs=1e-6)
    assert found.request_s == pytest.approx(KNOWN.request_s, rel=0.3)  # rounds after each other have no rest


async def test_costs_that_are_nothing_are_found_as_nothing(monkeypatch: pytest.MonkeyPatch):
    nothing = ("attention_s", "encode_s", "answer_attention_s", "several_s", "near_attention_s", "far_attention_s")
    known = replace(KNOWN, **dict.fromkeys(nothing, 0.0))
    found = await SimulatedProbes(1, {1: known}).costs_found(monkeypatch)
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
