"""Preemption: which sequence gives its pages up when there are no more, and that phases follow each other as they
may."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from forerun.core import SamplingParams
from forerun.engine import scheduler
from forerun.engine.engine import Engine
from forerun.engine.sequence import Phase, Request, Sequence
from tests.engine.common import Answer, finish, leaked, make_engine, run
from tests.engine.fake_prefiller import fake
from tests.engine.test_speculative_prefill import prompt

LONG = SamplingParams(max_tokens=40, ignore_eos=True)


@pytest.fixture
def make(tiny_folder: Callable[[str], Path]) -> Callable[[], Engine]:
    return lambda: make_engine(tiny_folder("qwen2"), prefiller=fake(), kv_cache_tokens=1024)


def decode_all(engine: Engine, count: int) -> None:
    """Step until so many sequences decode."""
    for _ in range(200):
        if sum(seq.phase is Phase.DECODING for seq in engine.scheduler.running) == count:
            return
        engine.step()
    raise AssertionError("they do not all decode")


def starve(engine: Engine) -> list[int]:
    """Take all free pages, and step until a sequence is preempted."""
    engine.scheduler.make_room(engine.pool.num_pages)
    held = engine.pool.allocate(engine.pool.free)
    for _ in range(40):
        engine.step()
        if engine.scheduler.waiting:
            return held
    raise AssertionError("none was preempted")


def test_the_youngest_is_preempted_first(make: Callable[[], Engine]):
    engine = make()
    answers = [Answer(engine, prompt(i, 20), LONG) for i in range(3)]
    decode_all(engine, 3)
    held = starve(engine)
    assert [seq.request for seq in engine.scheduler.waiting] == [answers[2].request]
    assert [seq.request for seq in engine.scheduler.running] == [answer.request for answer in answers[:2]]
    engine.pool.release(held)
    finish(engine)
    assert [answer.last.usage.preemptions for answer in answers] == [0, 0, 1]  # type: ignore[union-attr]
    assert [answer.tokens() for answer in answers] == run(make(), [prompt(i, 20) for i in range(3)], LONG)
    assert leaked(engine) == 0


def test_one_that_has_grown_far_beyond_the_others_is_preempted_before_them(make: Callable[[], Engine]):
    """An answer without a limit takes the pool in the end: those that come and go must not wait until it is over."""
    engine = make()
    large = Answer(engine, prompt(0, 400), LONG)
    decode_all(engine, 1)
    small = [Answer(engine, prompt(i, 20), LONG) for i in range(1, 4)]
    decode_all(engine, 4)
    held = starve(engine)
    assert [seq.request for seq in engine.scheduler.waiting] == [large.request]
    engine.pool.release(held)
    finish(engine)
    asked = [prompt(0, 400), *(prompt(i, 20) for i in range(1, 4))]
    assert [answer.tokens() for answer in (large, *small)] == run(make(), asked, LONG)
    assert leaked(engine) == 0


def test_sessions_that_pause_leave_half_of_the_pool_to_others(make: Callable[[], Engine]):
    """Those used longest ago go first, while others run."""
    engine = make()
    pins = engine.scheduler.pins
    for number in range(4):  # 800 of 1,024 tokens
        pins.open(f"s{number}", 600.0)
        Answer(engine, prompt(number, 196), replace(LONG, max_tokens=4), session=f"s{number}")
        finish(engine)
    assert pins.distinct_pages > 0.7 * engine.pool.num_pages
    answers = [Answer(engine, prompt(10 + number, 150), LONG) for number in range(2)]
    decode_all(engine, 2)
    held = [bool(pins.pages(f"s{number}")) for number in range(4)]
    assert held == [False, True, True, True]  # as many as were needed
    finish(engine)
    assert [answer.last.usage.preemptions for answer in answers] == [0, 0]  # type: ignore[union-attr]
    pins.clear()
    assert leaked(engine) == 0


@pytest.mark.parametrize("patience", [0.0, 1e9])
def test_one_that_waits_for_long_has_the_pages_of_sessions_that_pause(
    make: Callable[[], Engine], monkeypatch: pytest.MonkeyPatch, patience: float
):
    """Though they hold less than half of the pool: what they keep is found again, a reader's time is not."""
    monkeypatch.setattr(scheduler, "MAX_PINNED_WAIT_S", patience)
    engine = make()
    pins = engine.scheduler.pins
    for number in range(2):  # 480 of 1,024 tokens
        pins.open(f"s{number}", 600.0)
        Answer(engine, prompt(number, 230), replace(LONG, max_tokens=4), session=f"s{number}")
        finish(engine)
    answers = [Answer(engine, prompt(10 + number, 220), LONG) for number in range(2)]
    decode_all(engine, 2)
    late = Answer(engine, prompt(20, 150), LONG)
    for _ in range(12):
        engine.step()
    assert bool(engine.scheduler.waiting) == bool(patience)
    assert [bool(pins.pages(f"s{number}")) for number in range(2)] == [bool(patience), True]  # used longest ago
    finish(engine)
    asked = [prompt(10, 220), prompt(11, 220), prompt(20, 150)]
    assert [answer.tokens() for answer in (*answers, late)] == run(make(), asked, LONG)
    pins.clear()
    assert leaked(engine) == 0


def test_a_preempted_sequence_is_admitted_before_those_that_wait(make: Callable[[], Engine]):
    engine = make()
    answers = [Answer(engine, prompt(i, 20), LONG) for i in range(3)]
    decode_all(engine, 3)
    engine.scheduler.make_room(engine.pool.num_pages)
    held = engine.pool.allocate(engine.pool.free)
    late = Answer(engine, prompt(3, 40), LONG)
    for _ in range(40):
        engine.step()
        if len(engine.scheduler.waiting) == 2:
            break
    assert [seq.request for seq in engine.scheduler.waiting] == [answers[2].request, late.request]
    engine.pool.release(held)
    finish(engine)
    assert leaked(engine) == 0


def test_a_sessions_turn_is_spared_as_long_as_others_run(make: Callable[[], Engine]):
    engine = make()
    engine.scheduler.pins.open("talk", 600.0)
    first, second = (Answer(engine, prompt(i, 20), LONG) for i in range(2))
    turn = Answer(engine, prompt(2, 20), LONG, session="talk")
    decode_all(engine, 3)
    held = starve(engine)
    assert [seq.request for seq in engine.scheduler.waiting] == [second.request]
    assert [seq.request for seq in engine.scheduler.running] == [first.request, turn.request]
    engine.pool.release(held)
    finish(engine)
    engine.scheduler.pins.clear()
    assert leaked(engine) == 0


def test_a_provisional_sequence_is_preempted_before_any_other(make: Callable[[], Engine]):
    engine = make()
    provisional_answer = Answer(engine, prompt(0, 400), replace(LONG, prefill="provisional"))
    decode_all(engine, 1)  # the provisional sequence; the final one prefills
    other = Answer(engine, prompt(1, 8), LONG)
    decode_all(engine, 2)
    provisional = next(seq for seq in engine.scheduler.running if seq.final is not None)
    assert engine.scheduler.running[-1] is not provisional
    engine.scheduler.make_room(engine.pool.num_pages)
    held = engine.pool.allocate(engine.pool.free)
    while provisional.phase is not Phase.FINISHED:
        engine.step()
    assert not engine.scheduler.waiting and [seq.final for seq in engine.scheduler.running] == [None, None]
    engine.pool.release(held)
    finish(engine)
    for answer in (provisional_answer, other):
        assert answer.last.usage is not None and answer.last.usage.preemptions == 0
    assert leaked(engine) == 0


def test_phases_follow_each_other_as_they_may():
    seq = Sequence(Request([1, 2, 3], SamplingParams(), sink=lambda event: None), 0, 1)
    seq.enter_next()
    assert seq.phase is Phase.PREFILLING and seq.running
    seq.computed = 3
    seq.enter_next()
    assert seq.phase is Phase.DECODING
    with pytest.raises(AssertionError, match=r"from Phase\.DECODING to Phase\.PREFILLING"):
        seq.enter(Phase.PREFILLING)
    seq.enter(Phase.WAITING)
    seq.enter_next()
    assert seq.phase is Phase.DECODING  # a preempted one whose prompt is known
    seq.enter(Phase.FINISHED)
    assert not seq.running
    for phase in Phase:
        with pytest.raises(AssertionError):
            seq.enter(phase)
