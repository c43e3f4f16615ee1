"""Long prompts beside streams, in the engine: what streams feel, what short prompts wait for, and that answers stay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from forerun.core import SamplingParams
from forerun.decode.control.cost import CostCurve
from forerun.engine.engine import Engine
from forerun.engine.pace import StepPacer, StepWork
from forerun.engine.preemption import MIN_TURN_TOKENS
from forerun.engine.sequence import Phase
from tests.engine.common import Answer, finish, leaked, make_engine, run
from tests.engine.test_speculative_prefill import prompt

CHAT = SamplingParams(max_tokens=60, ignore_eos=True, speculation="off")
SHORT = SamplingParams(max_tokens=4, ignore_eos=True, speculation="off")
PLAIN_S, TOKEN_S = 0.010, 0.002


class SimulatedPacer(StepPacer):
    """Steps take what the model says: 10 ms, and 2 ms for each prompt token."""

    def __init__(self) -> None:
        super().__init__(lambda: CostCurve({1: PLAIN_S, 16: PLAIN_S, 64: PLAIN_S + 63 * TOKEN_S}))
        self.now, self.gaps = 0.0, list[float]()

    def observe(self, work: StepWork, nodes: int, seconds: float) -> None:
        seconds = PLAIN_S + TOKEN_S * (work.tokens + nodes)
        self.now += seconds
        if work.streams:
            self.gaps.append(seconds)
        super().observe(work, nodes, seconds)


@pytest.fixture
def make(tiny_folder: Callable[[str], Path]) -> Callable[..., Engine]:
    def engine(**config: int) -> Engine:
        made = make_engine(tiny_folder("qwen2"), **{"kv_cache_tokens": 4096} | config)
        made.scheduler.pacer = SimulatedPacer()
        return made

    return engine


def ask(engine: Engine, ids: list[int], params: SamplingParams, streamed: bool = True) -> Answer:
    answer = Answer(engine, ids, params)
    answer.request.streamed = streamed
    return answer


def pacer(engine: Engine) -> SimulatedPacer:
    assert isinstance(engine.scheduler.pacer, SimulatedPacer)
    return engine.scheduler.pacer


def stream(engine: Engine, count: int) -> list[Answer]:
    chats = [ask(engine, prompt(i, 12), CHAT) for i in range(count)]
    while sum(seq.streams for seq in engine.scheduler.running) < count:
        engine.step()
    pacer(engine).gaps.clear()
    return chats


def test_streams_go_on_beside_a_long_prompt(make: Callable[..., Engine]):
    engine = make()
    chats = stream(engine, 4)
    long = ask(engine, prompt(9, 450), SHORT)
    finish(engine)
    assert max(pacer(engine).gaps) <= 4 * PLAIN_S
    assert pacer(engine).gaps.count(PLAIN_S) < len(pacer(engine).gaps)  # the prompt ran beside them
    texts = [*(prompt(i, 12) for i in range(4)), prompt(9, 450)]
    alone = [run(make(), [ids], params)[0] for ids, params in zip(texts, [CHAT] * 4 + [SHORT], strict=True)]
    assert [answer.tokens() for answer in (*chats, long)] == alone
    assert leaked(engine) == 0


def test_without_streams_prompts_run_in_full_chunks(make: Callable[..., Engine]):
    engine = make()
    ask(engine, prompt(1, 450), SHORT)
    engine.step()
    assert engine.scheduler.work.tokens == engine.config.max_num_batched_tokens
    for answer in stream(make(), 0) + [ask(engine, prompt(2, 12), CHAT, streamed=False)]:
        assert answer.request.streamed is False
    finish(engine)


def test_answers_that_are_not_streamed_hold_nothing_up(make: Callable[..., Engine]):
    engine = make()
    batch = [ask(engine, prompt(i, 12), CHAT, streamed=False) for i in range(4)]
    while sum(seq.phase is Phase.DECODING for seq in engine.scheduler.running) < 4:
        engine.step()
    ask(engine, prompt(9, 450), SHORT, streamed=False)
    engine.step()
    assert engine.scheduler.work.tokens == engine.config.max_num_batched_tokens - len(batch)
    finish(engine)


def test_a_short_prompt_does_not_wait_for_a_long_one(make: Callable[..., Engine]):
    engine = make()
    long = ask(engine, prompt(1, 500), SHORT)
    engine.step()
    short = ask(engine, prompt(2, 16), SHORT)
    steps = 0
    while not short.events:
        engine.step()
        steps += 1
    assert steps == 1 and not long.events
    finish(engine)
    assert long.tokens() == run(make(), [prompt(1, 500)], SHORT)[0]


def test_what_begins_as_a_running_prompt_does_starts_when_that_has_passed_it(make: Callable[..., Engine]):
    """A common system prompt of a few pages: the short request must not wait for the end of the long one."""
    engine, shared = make(), prompt(5, 80)
    long = ask(engine, shared + prompt(6, 420), SHORT)
    engine.step()
    short = ask(engine, shared + prompt(7, 8), SHORT)
    while not short.events:
        engine.step()
    assert not long.events and short.request.id != long.request.id
    finish(engine)
    assert short.last.usage is not None and short.last.usage.cached_tokens == 80
    assert short.tokens() == run(make(), [shared + prompt(7, 8)], SHORT)[0]
    assert leaked(engine) == 0


def test_a_long_prompt_ends_however_many_short_ones_come(make: Callable[..., Engine]):
    engine = make()
    long, tokens = ask(engine, prompt(1, 480), SHORT), 0
    number = 0
    while not long.events:
        number += 1
        ask(engine, prompt(100 + number, 24), SHORT)
        engine.step()
        tokens += engine.scheduler.work.tokens
    assert 2 * 480 < tokens <= 4.5 * 480  # it has a quarter of all prompt tokens
    finish(engine)


def test_no_more_than_three_times_its_tokens_pass_a_sequence_without_room(make: Callable[..., Engine]):
    engine = make(kv_cache_tokens=512, max_num_seqs=8)
    first = ask(engine, prompt(1, 100), SamplingParams(max_tokens=200, ignore_eos=True, speculation="off"))
    engine.step()
    large = ask(engine, prompt(2, 400), SHORT)
    passed, number = 0, 0
    while not large.events:
        number += 1
        ask(engine, prompt(200 + number, 40), SHORT)
        engine.step()
        if large.request in [seq.request for seq in engine.scheduler.waiting]:
            passed = next(seq.overtaken for seq in engine.scheduler.waiting if seq.request is large.request)
    assert 0 < passed <= 3 * 400 + 8 * 40
    finish(engine)
    assert first.last.finish_reason == "length" and leaked(engine) == 0


@pytest.mark.parametrize("streamed", [True, False])
def test_an_answer_that_fills_the_pool_makes_way_for_a_stream(make: Callable[..., Engine], streamed: bool):
    """One client, a limit of its own: streams wait for a turn of it, not for its end. Others wait: nothing is gained
    by starting again what runs."""
    engine = make(kv_cache_tokens=512)
    endless = SamplingParams(max_tokens=420, ignore_eos=True, speculation="off")
    large = ask(engine, prompt(1, 60), endless)
    while len(large.tokens()) < 350:
        engine.step()
    steps, answers = [], []
    for number in range(3):
        answers.append(ask(engine, prompt(2 + number, 120), SHORT, streamed))
        before = len(large.tokens())
        while not answers[-1].events:
            engine.step()
        steps.append(len(large.tokens()) - before)
        while answers[-1].last.finish_reason is None:
            engine.step()
    assert all(tokens <= MIN_TURN_TOKENS for tokens in steps) == streamed
    finish(engine)
    assert large.last.usage is not None and (large.last.usage.preemptions > 0) == streamed
    assert large.tokens() == run(make(), [prompt(1, 60)], endless)[0]
    assert [a.tokens() for a in answers] == run(make(), [prompt(2 + number, 120) for number in range(3)], SHORT)
    assert leaked(engine) == 0


def test_admission_leaves_room_for_prompts_that_were_admitted_before(make: Callable[..., Engine]):
    """Two prompts of two thirds of the pool: the second waits, and neither is preempted."""
    engine = make(kv_cache_tokens=600)
    answers = [ask(engine, prompt(i, 400), SHORT) for i in range(2)]
    finish(engine)
    assert [answer.last.usage.preemptions for answer in answers] == [0, 0]  # type: ignore[union-attr]


def test_a_short_prompt_is_not_charged_for_the_context_of_a_long_one(make: Callable[..., Engine]):
    """What a step may run is counted in seconds: tokens that begin a prompt are cheap, later ones are not."""
    engine, costs = make(), [0.0, TOKEN_S, 20 * TOKEN_S]  # the last: of 1,000 entries of context
    ask(engine, prompt(1, 12), SamplingParams(max_tokens=400, ignore_eos=True, speculation="off"))
    for _ in range(2):  # the prompt, and a step by which the stream is timed
        engine.step()
    long = ask(engine, prompt(9, 400), SHORT)
    while not any(seq.request is long.request and seq.computed > 200 for seq in engine.scheduler.running):
        pacer(engine)._token.costs = list(costs)
        engine.step()
    deep = engine.scheduler.work.tokens
    short = ask(engine, prompt(10, 60), SHORT)
    engine.step()
    seq = next(seq for seq in engine.scheduler.running if seq.request is short.request)
    assert deep <= 2 and seq.computed >= 3 * deep
    finish(engine)
    assert leaked(engine) == 0
