"""Upgrades: what was answered from drafted K/V becomes exact while no request waits, and is exact the next time."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forerun import LLM
from forerun.core import SamplingParams
from forerun.engine.engine import Engine
from forerun.prefill.upgrade import MAX_WAITING_TEXTS
from forerun.runtime.driver import Driver
from tests.engine.common import Answer, finish, leaked, make_engine, run
from tests.engine.fake_prefiller import fake
from tests.engine.test_speculative_prefill import BAD, DRAFTED, EXACT, assert_clean, prompt


@pytest.fixture(scope="module")
def make(tiny_folder: Callable[[str], Path]) -> Callable[..., Engine]:
    def engine(**config: Any) -> Engine:
        return make_engine(tiny_folder("qwen2"), prefiller=fake(bad=BAD), **config)

    return engine


@pytest.fixture(scope="module")
def truth(tiny_folder: Callable[[str], Path]) -> Callable[..., list[int]]:
    engine = make_engine(tiny_folder("qwen2"), enable_prefix_caching=False)
    return lambda text, params=EXACT: run(engine, [text], params)[0]


def upgrade(engine: Engine) -> int:
    steps = 0
    while engine.upgrade_step():
        steps += 1
    return steps


def test_the_second_turn_is_exact(make: Callable[..., Engine], truth: Callable[..., list[int]]):
    engine = make()
    first = run(engine, [prompt(0)], DRAFTED)[0]
    assert not engine.step() and engine.idle  # nothing left but the upgrade
    assert upgrade(engine) > 3  # in small chunks
    whole = len([*prompt(0), *first]) // 8 * 8
    second = [*prompt(0), *first, *prompt(1, 40)]
    answer = Answer(engine, second, EXACT)
    finish(engine)
    assert answer.last.usage is not None and answer.last.usage.cached_tokens == whole
    assert answer.tokens() == truth(second)
    drafted = Answer(engine, [*second, *answer.tokens(), *prompt(2, 60)], DRAFTED)
    finish(engine)
    assert drafted.last.usage.cached_tokens == len([*second, *answer.tokens()]) // 8 * 8 - 0  # type: ignore[union-attr]


def test_the_approximate_entry_is_dropped(make: Callable[..., Engine]):
    engine = make()
    run(engine, [prompt(3)], DRAFTED)
    assert engine.approximate.num_pages > 0
    upgrade(engine)
    assert engine.approximate.num_pages == 0 and len(engine.upgrades) == 0 and leaked(engine) == 0


def test_a_request_comes_before_it_and_what_was_done_stays(
    make: Callable[..., Engine], truth: Callable[..., list[int]]
):
    engine = make()
    run(engine, [prompt(4)], DRAFTED)
    assert engine.upgrade_step() and engine.upgrade_step()
    answer = Answer(engine, prompt(4), EXACT)
    assert not engine.upgrade_step()  # a request waits
    finish(engine)
    assert answer.last.usage.cached_tokens == 32  # type: ignore[union-attr]
    assert answer.tokens() == truth(prompt(4))
    upgrade(engine)
    assert_clean(engine)


def test_a_full_pool_skips_it_and_cancelled_or_failed_drafts_leave_none(make: Callable[..., Engine]):
    engine = make(kv_cache_tokens=192)
    run(engine, [prompt(5)], DRAFTED)
    engine.approximate.clear()
    assert len(engine.upgrades) == 1
    held = engine.pool.allocate(engine.pool.free - 1)  # a step of an upgrade needs two pages
    assert not engine.upgrade_step() and engine.pool.free == 1 and len(engine.upgrades) == 0
    engine.pool.release(held)
    gone = Answer(engine, prompt(6), DRAFTED)
    engine.step()
    engine.step()
    engine.cancel(gone.request.id)
    finish(engine)
    assert len(engine.upgrades) == 0  # its draft was never ready


def test_the_queue_is_bounded_and_holds_the_latest(make: Callable[..., Engine]):
    engine = make()
    for i in range(MAX_WAITING_TEXTS + 5):
        engine.upgrades.add([i] * 16)
    assert len(engine.upgrades) == MAX_WAITING_TEXTS
    engine.upgrades.add([MAX_WAITING_TEXTS + 4] * 24)  # continues one that waits: it takes its place
    assert len(engine.upgrades) == MAX_WAITING_TEXTS
    engine.upgrades.add([1] * 7)  # no whole page
    assert len(engine.upgrades) == MAX_WAITING_TEXTS
    assert engine.upgrade_step()
    assert engine.tree.match([MAX_WAITING_TEXTS + 4] * 24)
    engine.clear_cache()
    assert len(engine.upgrades) == 0


def test_the_driver_does_it_in_the_background(make: Callable[..., Engine], truth: Callable[..., list[int]]):
    engine = make()
    driver = Driver(engine)
    driver.run([driver.request(prompt(7), DRAFTED)])  # returns at once
    deadline = time.monotonic() + 20
    while len(engine.upgrades) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(engine.upgrades) == 0
    events = driver.run([driver.request(prompt(7), EXACT)])[0]
    assert events[-1].usage is not None and events[-1].usage.cached_tokens == 144
    assert [t for e in events for t in e.token_ids] == truth(prompt(7))
    driver.close()


def test_upgrade_blocks_until_all_is_done(make: Callable[..., Engine], truth: Callable[..., list[int]]):
    driver = Driver(make())
    driver.run([driver.request(prompt(seed), DRAFTED) for seed in (8, 9)])
    driver.upgrade()
    assert len(driver.engine.upgrades) == 0
    for seed in (8, 9):
        events = driver.run([driver.request(prompt(seed), EXACT)])[0]
        assert events[-1].usage.cached_tokens == 144  # type: ignore[union-attr]
        assert [t for e in events for t in e.token_ids] == truth(prompt(seed))
    driver.close()
    assert leaked(driver.engine) == 0


def test_requests_go_on_while_the_thread_upgrades(make: Callable[..., Engine], truth: Callable[..., list[int]]):
    driver = Driver(make())
    for seed in range(10, 16):
        driver.run([driver.request(prompt(seed), DRAFTED)])
        events = driver.run([driver.request(prompt(seed), EXACT)])[0]  # in the middle of upgrading the same text
        assert [t for e in events for t in e.token_ids] == truth(prompt(seed))
    driver.close()
    assert leaked(driver.engine) == 0


def test_a_failing_upgrade_is_given_up(make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch):
    engine = make()
    driver = Driver(engine)
    answered = run(engine, [prompt(16)], DRAFTED)
    monkeypatch.setattr(engine.runner, "forward", lambda spans: 1 / 0)
    driver._background()
    deadline = time.monotonic() + 20
    while len(engine.upgrades) and time.monotonic() < deadline:
        time.sleep(0.01)
    monkeypatch.undo()
    assert len(engine.upgrades) == 0 and answered and leaked(engine) == 0
    driver.close()


def test_llm_upgrades(tiny_folder: Callable[[str], Path]):
    with LLM(str(tiny_folder("qwen2")), dtype="float32", threads=1, quiet=True) as llm:
        llm.upgrade()  # nothing to do
        assert llm.generate("The lamp", SamplingParams(max_tokens=2))[0].text is not None
