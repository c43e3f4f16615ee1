"""Clients of one engine: places in the batch, pages and cached prefixes are shared by weight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from forerun.core import SamplingParams
from forerun.engine import scheduler
from forerun.engine.engine import Engine
from forerun.engine.sequence import Client
from tests.engine.common import Answer, finish, leaked, make_engine, run
from tests.engine.test_speculative_prefill import prompt

ANN, BOB = Client("ann"), Client("bob")
LONG = SamplingParams(max_tokens=120, ignore_eos=True, speculation="off")
SHORT = SamplingParams(max_tokens=6, ignore_eos=True, speculation="off")


@pytest.fixture
def make(tiny_folder: Callable[[str], Path]) -> Callable[..., Engine]:
    return lambda **config: make_engine(tiny_folder("qwen2"), **config)


def ask(engine: Engine, client: Client, seed: int, tokens: int, params: SamplingParams) -> Answer:
    answer = Answer(engine, prompt(seed, tokens), params)
    answer.request.client = client
    return answer


def running(engine: Engine) -> Counter[str]:
    return Counter(seq.request.client.name for seq in engine.scheduler.running)


def test_a_client_that_comes_late_gets_its_share_of_the_places(make: Callable[..., Engine]):
    engine = make(max_num_seqs=8)
    first = [ask(engine, ANN, number, 10, LONG) for number in range(16)]
    for _ in range(6):
        engine.step()
    assert running(engine) == {"ann": 8}
    second = [ask(engine, BOB, 100 + number, 10, LONG) for number in range(8)]
    for _ in range(12):
        engine.step()
    assert running(engine) == {"ann": 4, "bob": 4}
    preempted = sum(seq.usage.preemptions for seq in engine.scheduler.sequences)
    for _ in range(12):
        engine.step()
    assert running(engine) == {"ann": 4, "bob": 4}  # and it stays so
    assert sum(seq.usage.preemptions for seq in engine.scheduler.sequences) == preempted == 4
    finish(engine)
    texts = [prompt(number, 10) for number in range(16)] + [prompt(100 + number, 10) for number in range(8)]
    assert [answer.tokens() for answer in (*first, *second)] == run(make(), texts, LONG)
    assert leaked(engine) == 0


def test_weights_count(make: Callable[..., Engine]):
    engine, heavy = make(max_num_seqs=8), Client("heavy", 3.0)
    for number in range(10):
        ask(engine, ANN, number, 10, LONG)
    engine.step()
    for number in range(10):
        ask(engine, heavy, 100 + number, 10, LONG)
    for _ in range(16):
        engine.step()
    assert running(engine) == {"ann": 2, "heavy": 6}


def test_a_client_that_comes_late_gets_pages(make: Callable[..., Engine]):
    engine = make(kv_cache_tokens=1024)
    params = SamplingParams(max_tokens=30, ignore_eos=True, speculation="off")
    first = [ask(engine, ANN, number, 220, params) for number in range(4)]
    while not all(answer.events for answer in first):
        engine.step()
    late = ask(engine, BOB, 50, 300, SHORT)
    steps = 0
    while not late.events:
        engine.step()
        steps += 1
    assert steps < 20 and not any(answer.last.finish_reason for answer in first)
    finish(engine)
    counts = [answer.last.usage.preemptions for answer in (*first, late) if answer.last.usage is not None]
    assert counts[0] == 0 == counts[-1] and counts[3] >= 1
    assert leaked(engine) == 0


def test_one_client_alone_is_never_preempted_for_itself(make: Callable[..., Engine]):
    engine = make(max_num_seqs=4)
    answers = [ask(engine, ANN, number, 10, SHORT) for number in range(12)]
    finish(engine)
    assert all(answer.last.usage is not None and answer.last.usage.preemptions == 0 for answer in answers)


def test_when_pages_run_out_the_heaviest_client_gives_some_up(make: Callable[..., Engine]):
    engine = make(kv_cache_tokens=1024)
    small = ask(engine, BOB, 1, 30, LONG)
    large = [ask(engine, ANN, 2 + number, 200, LONG) for number in range(2)]
    while not all(answer.events for answer in (small, *large)):
        engine.step()
    ask(engine, BOB, 9, 30, LONG)  # the youngest of all
    for _ in range(4):
        engine.step()
    engine.scheduler.make_room(engine.pool.num_pages)
    held = engine.pool.allocate(engine.pool.free)
    while not engine.scheduler.waiting:
        engine.step()
    assert [seq.request for seq in engine.scheduler.waiting] == [large[1].request]
    engine.pool.release(held)
    finish(engine)
    assert leaked(engine) == 0


def test_a_flood_does_not_evict_another_clients_prefix(make: Callable[..., Engine]):
    engine = make(kv_cache_tokens=1024)
    document = prompt(1, 300)
    mine = Answer(engine, document, SHORT)
    mine.request.client = BOB
    finish(engine)
    for number in range(12):
        ask(engine, ANN, 10 + number, 200, SHORT)
        finish(engine)
    again = Answer(engine, [*document, 7], SHORT)
    again.request.client = BOB
    finish(engine)
    assert again.last.usage is not None and again.last.usage.cached_tokens >= 296
    assert leaked(engine) == 0


def test_a_client_beyond_its_share_takes_no_pinned_pages_of_others(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(scheduler, "MAX_PINNED_WAIT_S", 0.0)
    engine, (ann, bob) = make(kv_cache_tokens=1024), (Client("ann"), Client("bob"))
    pins = engine.scheduler.pins
    for number, client in enumerate((bob, ann)):  # 240 of 1,024 tokens each
        engine.scheduler.pins.open(client.name, 600.0)
        answer = Answer(engine, prompt(number, 230), SHORT, session=client.name)
        answer.request.client = client
        finish(engine)
    for number in range(4):  # three of them have room, and then more than ann's share
        ask(engine, ann, 10 + number, 140, LONG)
    for _ in range(30):
        engine.step()
    assert pins.pages("bob") and not pins.pages("ann") and pins.owners == {"bob": 1.0}
    late = ask(engine, bob, 20, 60, LONG)
    while not late.events:
        engine.step()
    finish(engine)
    pins.clear()
    assert leaked(engine) == 0
