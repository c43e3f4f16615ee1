"""Runs of the load check that are kept: what is read is what was written, and the simulation is compared with it."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest

from forerun.errors import BadRequest
from forerun_research.bench.load_costs import Probes, solved
from forerun_research.bench.load_replica import ReplicaCosts
from forerun_research.bench.load_simulation import SimulatedSetup, simulate
from forerun_research.bench.load_targets import ReplayedAnswer
from forerun_research.bench.load_trace import TraceRequest, poisson
from forerun_research.scripts.load_check import MeasuredRun, at_costs_of, numbered, prompt_tokens, report

COSTS = ReplicaCosts(0.01, 0.001, 0.001, 0.0)
SLOW = replace(COSTS, several_s=0.02)


def answers(*requests: TraceRequest) -> list[ReplayedAnswer]:
    return simulate(requests, SimulatedSetup(1, 1.0), COSTS)


@pytest.fixture
def run() -> MeasuredRun:
    brief, long = TraceRequest(0.0, 320, 48, "a"), TraceRequest(0.0, 2368, 48, "a")
    middle = replace(long, prompt_tokens=832)
    longer, known = [answers(middle), answers(long)], [[answers(brief, own)[1:]] for own in (middle, long)]
    rested = [answers(replace(middle, max_tokens=2), replace(middle, arrival_s=9.0, max_tokens=2))[1:]]
    several = [answers(*[brief] * 2)], [answers(*[brief] * 16)], [answers(*[long] * 16)]
    beside = [answers(replace(middle, max_tokens=96), replace(middle, arrival_s=1.2, max_tokens=2))]
    probes = Probes(1, [answers(brief)], longer, *known, *several, rested, beside, [])
    trace = poisson(0.5, 20.0, 2, 300, 8, 2, 2.0)
    turns = [[7] * request.prompt_tokens for request in trace]
    real = simulate(trace, SimulatedSetup(1, 1.0, 1), {1: solved(probes)}, turns)
    return MeasuredRun("made", 1, 1.0, trace, turns, {1: probes}, [real, real], [[0], [9]])


def test_a_run_is_read_as_it_was_written(run: MeasuredRun):
    assert MeasuredRun.of_json(run.to_json()) == run


def test_what_replicas_got_before_is_read_from_the_metrics(monkeypatch: pytest.MonkeyPatch):
    samples = (("a", "pool", 5), ("b", "pool", 1), ("a", "computed", 7), ("b", "computed", 2))
    lines = [f'forerun_prompt_tokens_total{{replica="{name}",source="{source}"}} {n}' for name, source, n in samples]
    text = "\n".join(["# TYPE forerun_prompt_tokens_total counter", *lines, "forerun_replicas 2", ""])
    monkeypatch.setattr("urllib.request.urlopen", lambda url, timeout: io.BytesIO(text.encode()))
    assert prompt_tokens("http://unused") == [12, 3]


def test_a_simulation_that_is_right_is_within_and_one_that_is_not_is_told(
    run: MeasuredRun, capsys: pytest.CaptureFixture[str]
):
    assert report(run) == 14 and "more than 15% off" not in capsys.readouterr().out
    for answer in run.answers[0]:
        answer.token_times = [answer.sent + 2 * (moment - answer.sent) for moment in answer.token_times]
    assert report(run) < 14 and "more than 15% off" in capsys.readouterr().out


def test_what_is_measured_later_counts_as_much(run: MeasuredRun):
    probes = run.probes[1]
    slower = replace(run.probes[1], two=[simulate([TraceRequest(0.0, 320, 48, "a")] * 2, SimulatedSetup(1, 1.0), SLOW)])
    both = probes.with_later(slower)
    assert len(both.brief) == 2 and both.busy == 1
    assert solved(probes).several_s < solved(both).several_s < solved(slower).several_s


def test_costs_of_one_run_are_taken_for_all(run: MeasuredRun):
    wide = replace(run, replicas=4, probes={1: run.probes[1], 4: replace(run.probes[1], busy=4)})
    one, four = at_costs_of([run, wide], 4)
    assert one.probes == run.probes and four.probes == wide.probes
    assert at_costs_of([run, wide], None) == [run, wide]
    with pytest.raises(BadRequest, match="--costs-of 2: there is no such run"):
        at_costs_of([run, wide], 2)


def test_documents_of_a_run_are_its_own():
    trace = [TraceRequest(0.0, 300, 8, "a"), TraceRequest(0.0, 300, 8)]
    assert [own.document for own in numbered(trace, 1)] == ["a of run 1", None]
