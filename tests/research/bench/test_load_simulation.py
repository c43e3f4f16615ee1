"""The simulation of replicas on cases that can be computed by hand."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

import pytest

from forerun_research.bench.load import DRAWS, figures, simulated_figures, together
from forerun_research.bench.load_replica import MAX_PIECE_TOKENS, NEAR_TOKENS, ReplicaCosts
from forerun_research.bench.load_simulation import SharedCosts, SimulatedSetup, _Simulation, simulate
from forerun_research.bench.load_targets import ReplayedAnswer
from forerun_research.bench.load_trace import SHIPPED, TraceRequest, TraceTexts, poisson, turn_tokens

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


def test_answers_about_one_text_read_it_once_and_what_lies_far_costs_more():
    costs = ReplicaCosts(0.01, 0.001, 0.0, 0.0, near_attention_s=1e-6, far_attention_s=3e-6)
    known, long = NEAR_TOKENS + 400, one(prompt_tokens=NEAR_TOKENS + 424, max_tokens=20)

    def attention(names: str) -> float:
        """Of the last step of answers about these documents."""
        trace = [replace(long, document=name) for name in names]
        return simulate(trace, SimulatedSetup(1, 1), costs)[0].gaps_s[-1] - 0.01 - 0.001 * len(names)

    once = 1e-6 * NEAR_TOKENS + 3e-6 * (known - NEAR_TOKENS)
    assert once < attention("a") < 1.2 * once
    assert attention("aa") < 1.3 * once and attention("ab") == pytest.approx(2 * attention("a"), rel=0.02)


def test_a_step_of_more_than_one_token_has_a_cost_of_its_own():
    costs = ReplicaCosts(0.01, 0.001, 0.0, 0.0, several_s=0.005)
    assert simulate([one()], SimulatedSetup(1, 1), costs)[0].gaps_s == pytest.approx([0.011] * 4)
    for answer in simulate([one(max_tokens=20)] * 2, SimulatedSetup(1, 1), costs):
        assert answer.gaps_s[10] == pytest.approx(0.017)


def test_taking_a_request_in_and_steps_slow_each_other():
    costs = ReplicaCosts(step_s=0.01, row_s=0.0, prompt_token_s=0.001, attention_s=0.0, request_s=0.04)
    trace = [one(prompt_tokens=1, max_tokens=40), one(arrival_s=0.2, prompt_tokens=8, max_tokens=1)]
    steps, (stream, question) = range(10, 30), simulate(trace, SimulatedSetup(1, 1), costs)
    slower, late = simulate(trace, SimulatedSetup(1, 1), replace(costs, intake_factor=2.0))
    assert late.first_s - question.first_s == pytest.approx(0.04, abs=0.011)
    assert max(stream.gaps_s[i] for i in steps) == pytest.approx(0.018)
    assert max(slower.gaps_s[i] for i in steps) == pytest.approx(0.02)
    assert sum(slower.gaps_s) - sum(stream.gaps_s) == pytest.approx(0.04, abs=0.011)


def test_steps_differ_as_much_as_measured_ones_did():
    (answer,) = simulate([one(max_tokens=200)], SimulatedSetup(1, 1), replace(COSTS, spread=(-0.004, 0.004)))
    assert {round(gap, 6) for gap in answer.gaps_s} == {0.007, 0.015}
    assert sum(answer.gaps_s) / 199 == pytest.approx(0.011, rel=0.15)


def test_a_second_replica_takes_half_and_cores_are_shared():
    trace = [one(prompt_tokens=5000, document=name) for name in "ab"]
    alone = simulate(trace, SimulatedSetup(1, 1), COSTS)
    two = simulate(trace, SimulatedSetup(2, 2), COSTS)
    squeezed = simulate(trace, SimulatedSetup(2, 1), COSTS)
    assert max(a.first_s for a in two) < 0.6 * max(a.first_s for a in alone)
    assert max(a.first_s for a in squeezed) == pytest.approx(2 * max(a.first_s for a in two))


def test_costs_between_measured_numbers_of_busy_replicas_and_beyond_them():
    costs = SharedCosts({1: ReplicaCosts(0.01, 0.001, 0.0, 0.0), 4: ReplicaCosts(0.04, 0.001, 0.0, 0.0)})
    assert [costs.of(busy).step_s for busy in (0, 1, 2, 4, 8)] == pytest.approx([0.01, 0.01, 0.02, 0.04, 0.08])
    assert [costs.of(busy).row_s for busy in (2, 8)] == pytest.approx([0.001, 0.002])
    with pytest.raises(ValueError, match="costs of one replica are missing"):
        SharedCosts({2: COSTS})
    assert together([1, 2, 4], 2.0, 1) == [1, 2, 4] and together([64], 4.0, 2) == [1, 2, 4]
    assert together([3, 8], 2.0, 2) == [1, 2] and together([1], 8.0, 1) == [1]


def test_replicas_slow_each_other_down_while_they_compute_at_the_same_time():
    slower = ReplicaCosts(0.02, 0.001, 0.0001, 0.0)
    long, short = (one(document=name, max_tokens=count) for name, count in (("a", 21), ("b", 11)))
    first, second = simulate([long, short], SimulatedSetup(2, 2), {1: COSTS, 2: slower})
    assert second.gaps_s == pytest.approx([0.021] * 10)
    assert first.gaps_s[:10] == pytest.approx([0.021] * 10) and first.gaps_s[11:] == pytest.approx([0.011] * 9)
    assert simulate([long], SimulatedSetup(2, 2), {1: COSTS, 2: slower})[0].gaps_s == pytest.approx([0.011] * 20)


def test_one_that_decodes_and_one_that_computes_a_prompt_slow_each_other_by_shares():
    slower = ReplicaCosts(0.04, 0.001, 0.0004, 0.0, prompts_beside_answers=0.0, answers_beside_prompts=1.0)
    long = [one(document=name, prompt_tokens=5000, arrival_s=0.1) for name in "bcd"]
    trace = [one(document="a", max_tokens=30), *long]

    def found(**shares: float) -> list[ReplayedAnswer]:
        return simulate(trace, SimulatedSetup(4, 2, 1), {1: COSTS, 2: COSTS, 4: replace(slower, **shares)})

    answer, *prompts = found()
    assert answer.gaps_s == pytest.approx([0.011] * 29)
    assert all(prompt.first_s > 1.5 * (10 * 0.01 + 5000 * 0.0001) for prompt in prompts)
    half, *_ = found(prompts_beside_answers=0.5)  # as two and a half that decode: a quarter of the way from 2 to 4
    assert half.gaps_s[20:] == pytest.approx([0.011 + 0.0075] * 9)
    _, *quick = found(answers_beside_prompts=0.0)
    assert all(a.first_s < b.first_s - 0.01 for a, b in zip(quick, prompts, strict=True))
    alike = simulate(
        [one(document=name, max_tokens=30) for name in "abcd"], SimulatedSetup(4, 2, 1), {1: COSTS, 4: slower}
    )
    assert alike[0].gaps_s[5] == pytest.approx(0.041)


def test_a_prompt_waits_while_another_computes_its_document():
    trace = [one(prompt_tokens=2000, document="a"), one(prompt_tokens=2000, document="a", arrival_s=0.05)]
    first, second = simulate(trace, SimulatedSetup(1, 1), COSTS)
    assert second.cached_tokens == 1968 and second.first_s < first.first_s


def encode(messages: list[dict[str, Any]]) -> list[int]:
    """A token for each word, and two around each message."""
    return [zlib.crc32(part.encode()) % 50_000 for m in messages for part in (m["role"], *m["content"].split(), "end")]


def test_turns_have_the_tokens_of_their_texts():
    trace = [one(prompt_tokens=500, document="a", session="s"), one(session="s", arrival_s=3.0), one()]
    first, later, alone = turn_tokens(trace, TraceTexts(), encode)
    texts = [TraceTexts().user_message(number, request) for number, request in enumerate(trace)]
    assert first == encode([texts[0]]) and alone == encode([texts[2]])
    assert later == encode([{"role": "assistant", "content": "A"}, texts[1]])[1:]  # the answer, what ends it, the turn


def test_what_texts_have_in_common_is_cached_and_prompts_are_as_long_as_they():
    trace = [one(prompt_tokens=500, document="a", session=f"s{i}", arrival_s=9.0 * i) for i in range(3)]
    trace += [one(session="s2", arrival_s=30.0), one(prompt_tokens=500, document="b", arrival_s=40.0)]
    turns = turn_tokens(trace, TraceTexts(), encode)
    answers = simulate(trace, SimulatedSetup(1, 1), COSTS, turns)
    lengths = [len(turn) for turn in turns]
    assert [a.prompt_tokens for a in answers] == [*lengths[:3], lengths[2] + 5 + lengths[3], lengths[4]]
    shared = next(i for i, (a, b) in enumerate(zip(turns[0], turns[1], strict=False)) if a != b)
    assert [a.cached_tokens for a in answers[:3]] == [0, shared // 16 * 16, shared // 16 * 16]
    assert answers[3].cached_tokens == (lengths[2] + 4) // 16 * 16 and answers[4].cached_tokens == 0


def test_a_prompt_reads_what_was_computed_before_it_and_one_beside_an_answer_about_it_reads_that_once():
    costs = ReplicaCosts(0.01, 0.0, 0.0, 0.0, near_attention_s=1e-5)
    known, question = one(prompt_tokens=544, document="a", max_tokens=1), one(prompt_tokens=544, document="a")
    alone = simulate([known, replace(question, arrival_s=1.0)], SimulatedSetup(1, 1), costs)[1]
    assert alone.cached_tokens == 512 and alone.first_s == pytest.approx(0.01 + 512e-5)
    stream = replace(question, arrival_s=1.0, max_tokens=100)
    *_, stream_found, beside = simulate(
        [known, stream, replace(question, arrival_s=1.2, max_tokens=1)], SimulatedSetup(1, 1), costs
    )
    assert max(stream_found.gaps_s) == pytest.approx(0.01 + 640e-5, abs=64e-5) and beside.cached_tokens == 512


def test_what_the_step_before_did_not_read_costs_more():
    costs = ReplicaCosts(0.01, 0.0, 0.0, 0.0, cold_attention_s=1e-4)
    known, question = one(prompt_tokens=544, document="a", max_tokens=1), one(prompt_tokens=544, document="a")
    later = [replace(question, arrival_s=arrival) for arrival in (9.0, 9.3, 9.36)]
    _, rested, half, beside = simulate([known, *later], SimulatedSetup(1, 1), costs)
    assert rested.first_s == pytest.approx(0.01 + 512e-4)  # all of its document
    idle = 0.3 - rested.first_s - 4 * 0.01  # since that answer's last step
    assert half.first_s == pytest.approx(0.01 + idle * 512e-4, abs=0.001)
    assert beside.first_s < 0.021 and max(rested.gaps_s) == pytest.approx(0.01, abs=0.0017)  # a new page at most


def test_a_document_is_read_where_it_is_held_and_the_least_used_one_goes():
    trace = [one(arrival_s=float(i), document="ab"[i % 2], prompt_tokens=1000, session=f"s{i}") for i in range(6)]
    wide = simulate(trace, SimulatedSetup(1, 1), COSTS)
    assert [a.cached_tokens > 0 for a in wide] == [False, False, True, True, True, True]
    narrow = simulate(trace, SimulatedSetup(1, 1, cache_tokens=1100), COSTS)
    assert all(a.cached_tokens < 100 for a in narrow)  # a few pages are left of the one before
    apart = simulate(trace, SimulatedSetup(2, 2, cache_tokens=2200), COSTS)
    assert [a.cached_tokens > 0 for a in apart] == [False, False, True, True, True, True]


def test_of_idle_replicas_the_one_that_got_the_least_before_computes_new_documents():
    trace = [one(arrival_s=float(i), document=name, prompt_tokens=1000) for i, name in enumerate("abc")]
    beside = [one(arrival_s=0.001 + i, document="abc"[i], prompt_tokens=1000, max_tokens=30) for i in range(3)]

    def firsts(sent: tuple[int, ...]) -> list[int]:
        simulation = _Simulation([*trace, *beside], SimulatedSetup(2, 2, sent=sent), COSTS, None)
        simulation.run()
        return [sum(name in replica.routed for name in "abc") for replica in simulation.replicas]

    assert firsts(()) == firsts((0, 0)) == [2, 1] and firsts((0, 100_000)) == [3, 0] and firsts((100_000, 0)) == [0, 3]


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


def test_figures_are_the_mean_of_several_simulations():
    trace = [one(arrival_s=i / 10) for i in range(20)]
    costs = replace(COSTS, spread=(-0.004, 0.0, 0.004))
    each = [figures(trace, simulate(trace, SimulatedSetup(1, 1, draw=draw), costs), 1.0) for draw in range(DRAWS)]
    slowest = [own["kinds"]["chat"]["gap_s"]["p95"] for own in each]
    assert len({own["seconds"] for own in each}) > 1  # other steps were slow
    found = simulated_figures(trace, SimulatedSetup(1, 1), costs, 1.0)
    assert found["kinds"]["chat"]["gap_s"]["p95"] == pytest.approx(sum(slowest) / DRAWS)
    assert found["kinds"]["chat"]["requests"] == 20 and found.keys() == each[0].keys()
