"""The simulation of replicas on cases that can be computed by hand."""

from __future__ import annotations

import pytest

from forerun_research.bench.load import figures
from forerun_research.bench.load_simulation import MAX_PIECE_TOKENS, ReplicaCosts, SimulatedSetup, simulate
from forerun_research.bench.load_trace import SHIPPED, TraceRequest, poisson

COSTS = ReplicaCosts(step_s=0.01, row_s=0.001, prompt_token_s=0.0001, attention_s=0.0)


def one(**more: object) -> TraceRequest:
    return TraceRequest(**({"arrival_s": 0.0, "prompt_tokens": 100, "max_tokens": 5} | more))  # type: ignore[arg-type]


def test_one_request_takes_its_prompt_and_its_tokens():
    (answer,) = simulate([one()], SimulatedSetup(1, 1), COSTS)
    assert answer.first_s == pytest.approx(0.01 + 100 * 0.0001)
    assert answer.gaps_s == pytest.approx([0.011] * 4)
    long = simulate([one(prompt_tokens=2 * MAX_PIECE_TOKENS)], SimulatedSetup(1, 1), COSTS)[0]
    assert long.first_s == pytest.approx(2 * 0.01 + 2 * MAX_PIECE_TOKENS * 0.0001)
    costs = ReplicaCosts(0.0, 0.0, 0.0001, 0.00001)
    (attending,) = simulate([one(max_tokens=1)], SimulatedSetup(1, 1), costs)
    assert attending.first_s == pytest.approx(100 * 0.0001 + 0.00001 * 100 * 100 / 2)


def test_answers_share_steps_and_a_prompt_beside_them_keeps_steps_within_three_plain_ones():
    trace = [one(max_tokens=50), one(arrival_s=0.1, prompt_tokens=2000, max_tokens=2)]
    first, second = simulate(trace, SimulatedSetup(1, 1), COSTS)
    assert max(first.gaps_s) <= 3 * 0.011 + 1e-9 and max(first.gaps_s) > 2 * 0.011
    assert second.first_s > 2000 * 0.0001


def test_a_second_replica_takes_half_and_cores_are_shared():
    trace = [one(prompt_tokens=5000, document=name) for name in "ab"]
    alone = simulate(trace, SimulatedSetup(1, 1), COSTS)
    two = simulate(trace, SimulatedSetup(2, 2), COSTS)
    squeezed = simulate(trace, SimulatedSetup(2, 1), COSTS)
    assert max(a.first_s for a in two) < 0.6 * max(a.first_s for a in alone)
    assert max(a.first_s for a in squeezed) == pytest.approx(2 * max(a.first_s for a in two))


def test_a_document_is_read_where_it_is_held_and_the_least_used_one_goes():
    trace = [one(arrival_s=float(i), document="ab"[i % 2], prompt_tokens=1000, session=f"s{i}") for i in range(6)]
    wide = simulate(trace, SimulatedSetup(1, 1), COSTS)
    assert [a.cached_tokens > 0 for a in wide] == [False, False, True, True, True, True]
    narrow = simulate(trace, SimulatedSetup(1, 1, cache_tokens=1100), COSTS)
    assert not any(a.cached_tokens for a in narrow)
    apart = simulate(trace, SimulatedSetup(2, 2, cache_tokens=2200), COSTS)
    assert [a.cached_tokens > 0 for a in apart] == [False, False, True, True, True, True]


def test_turns_of_a_session_follow_each_other_and_read_what_came_before():
    trace = [one(session="a"), one(session="a", arrival_s=0.0), one(session="a", arrival_s=9.0)]
    first, second, third = simulate(trace, SimulatedSetup(3, 3), COSTS)
    assert second.sent == first.token_times[-1] and third.sent == 9.0
    assert (second.prompt_tokens, third.prompt_tokens) == (205, 310)
    assert (second.cached_tokens, third.cached_tokens) == (96, 208)  # whole pages of 105 and 210


def test_a_busy_replica_gives_requests_to_another():
    trace = [one(document="hot", prompt_tokens=1000, arrival_s=0.2 + i / 1000, max_tokens=200) for i in range(40)]
    answers = simulate(trace, SimulatedSetup(2, 2), COSTS)
    assert sum(answer.cached_tokens == 0 for answer in answers) == 2  # each replica computes it once


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_traces_are_answered_whole_and_more_replicas_are_not_slower(name: str):
    trace = SHIPPED[name]()
    found = [figures(trace, simulate(trace, SimulatedSetup(n, n), COSTS), 1.0 * n) for n in (1, 4)]
    for figure in found:
        assert all(kind["answered"] == kind["requests"] for kind in figure["kinds"].values()) and not figure["errors"]
    first = [max(kind["first_s"]["p95"] for kind in figure["kinds"].values()) for figure in found]
    assert first[1] <= first[0] * 1.05
    if name == "users":
        sessions = {request.session for request in trace}
        assert len(sessions) == 50 and found[0]["hit_rate"] > 0.7
        assert found[0]["cost_per_session"] == pytest.approx(found[0]["seconds"] / 3600 / 50)


def test_many_replicas():
    trace = poisson(20.0, 10.0, documents=64, turns=1)
    answers = simulate(trace, SimulatedSetup(64, 64), COSTS)
    assert all(len(answer.token_times) == 64 for answer in answers)
