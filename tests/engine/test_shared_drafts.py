"""Further answers to a drafted prompt: one draft serves all, and whatever happens to one, the others are served."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forerun.core import Prefill, PrefillReport, Usage
from forerun.engine.engine import Engine
from forerun.errors import BadRequest
from tests.engine.common import Answer, finish, leaked, make_engine, run
from tests.engine.fake_prefiller import TAIL, fake
from tests.engine.test_speculative_prefill import BAD, DRAFTED, EXACT, assert_clean, prefiller, prompt

THREE = replace(DRAFTED, n=3)
SAMPLED = replace(THREE, temperature=1.5, seed=3)
CACHES: list[tuple[bool, bool]] = [(True, True), (True, False), (False, True)]  # of the engine, of the request
SHARED = 144  # of 150 tokens: whole pages


@pytest.fixture(scope="module")
def make(tiny_folder: Callable[[str], Path]) -> Callable[..., Engine]:
    def engine(fakes: dict[str, Any] | None = None, **config: Any) -> Engine:
        return make_engine(tiny_folder("qwen2"), prefiller=fake(**{"bad": BAD} | (fakes or {})), **config)

    return engine


@pytest.fixture(scope="module")
def truth(tiny_folder: Callable[[str], Path]) -> Callable[..., list[int]]:
    engine = make_engine(tiny_folder("qwen2"), enable_prefix_caching=False)
    return lambda text, params=EXACT: run(engine, [text], params)[0]


def usage(answer: Answer, index: int) -> Usage:
    (last,) = [event.usage for event in answer.events if event.index == index and event.usage is not None]
    return last


def report(answer: Answer, index: int) -> PrefillReport:
    found = usage(answer, index).prefill
    assert found is not None
    return found


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(("enable_prefix_caching", "cache"), CACHES)
def test_one_draft_serves_all_and_each_says_what_it_would_alone(
    enable_prefix_caching: bool, cache: bool, ahead: bool, make: Callable[..., Engine], truth: Callable[..., list[int]]
):
    params = replace(SAMPLED, cache=cache)
    alone = [
        run(make(), [prompt(5)], replace(params, n=1, seed=3 + i))[0] for i in range(3)
    ]  # the same noise each time
    engine = make({"ahead": ahead}, enable_prefix_caching=enable_prefix_caching)
    answer = Answer(engine, prompt(5), params)
    finish(engine)
    assert [answer.tokens(i) for i in range(3)] == alone and len({tuple(tokens) for tokens in alone}) == 3
    assert len(prefiller(engine).opened) == 1
    assert run(engine, [prompt(5)], EXACT)[0] == truth(prompt(5))
    assert_clean(engine)


def test_the_others_hold_the_same_pages_and_nothing_of_them_is_exact(
    make: Callable[..., Engine], truth: Callable[..., list[int]]
):
    engine = make()
    known = prompt(5)[:60]
    run(engine, [known], EXACT)
    answer = Answer(engine, prompt(5), THREE)
    while len(engine.scheduler.running) < 3:
        engine.step()
    first, *others = engine.scheduler.running
    for other in others:
        assert other.pages[: SHARED // 8] == first.pages[: SHARED // 8] and other.pages[-1] != first.pages[-1]
        assert other.exact == first.exact == 56
    finish(engine)
    assert answer.tokens(0) == answer.tokens(1) == answer.tokens(2) != truth(prompt(5))
    assert [usage(answer, i).served["computed"] for i in range(3)] == [150 - 56, 150 - SHARED, 150 - SHARED]
    again = Answer(engine, prompt(5), EXACT)
    finish(engine)
    assert again.last.usage.cached_tokens == 56 and again.tokens() == truth(prompt(5))  # type: ignore[union-attr]
    assert len(engine.upgrades) > 0
    while engine.upgrade_step():
        pass
    assert run(engine, [[*prompt(5), *answer.tokens(1)]], EXACT)[0] == truth([*prompt(5), *answer.tokens(1)])
    assert_clean(engine)


def test_their_reports_tell_of_the_prompt_and_of_their_own_work(make: Callable[..., Engine]):
    engine = make()
    answer = Answer(engine, prompt(5), THREE)
    finish(engine)
    layers = len(engine.pool.kv)
    for i in (1, 2):
        told = report(answer, i)
        assert (told.tokens, told.layers, told.drafted, told.accepted) == (150, layers, 150 - TAIL, 150 - TAIL)
        assert told.depth_runs == [(1, 150 - TAIL), (layers, TAIL)]
        assert told.token_layers == (150 - SHARED) * layers and told.cost == (150 - SHARED) / 150
        served = usage(answer, i).served
        assert served["approximate"] == 150 - TAIL and sum(served.values()) == 150
        assert usage(answer, i).cached_tokens == served["pool"] == SHARED - (150 - TAIL)


@pytest.mark.parametrize(("enable_prefix_caching", "cache"), CACHES)
@pytest.mark.parametrize("config", [{}, {"max_num_seqs": 1}])
def test_the_first_may_end_before_the_others_begin(
    config: dict[str, Any], enable_prefix_caching: bool, cache: bool, make: Callable[..., Engine]
):
    engine = make(enable_prefix_caching=enable_prefix_caching, **config)
    answer = Answer(engine, prompt(6), replace(THREE, max_tokens=1 if not config else 8, cache=cache))
    finish(engine)
    assert answer.tokens(0) == answer.tokens(1) == answer.tokens(2) != []
    assert len(prefiller(engine).opened) == 1
    assert_clean(engine)


def test_what_is_held_for_those_who_wait_is_let_go_when_it_is_needed(make: Callable[..., Engine]):
    engine = make(enable_prefix_caching=False, max_num_seqs=1)
    answer = Answer(engine, prompt(6), THREE)
    while not any(event.finish_reason for event in answer.events):
        engine.step()
    assert engine.pool.used == SHARED // 8 and not engine.scheduler.running
    assert engine.scheduler.make_room(engine.pool.num_pages) and engine.pool.used == 0
    finish(engine)
    assert [len(answer.tokens(i)) for i in range(3)] == [16] * 3
    assert len(prefiller(engine).opened) == 2  # the second drafts it anew, for the third as well
    assert_clean(engine)


def test_what_has_become_exact_meanwhile_is_read_from_the_tree(
    make: Callable[..., Engine], truth: Callable[..., list[int]]
):
    engine = make(max_num_seqs=1)
    answer = Answer(engine, prompt(6), THREE)
    while not any(event.finish_reason for event in answer.events):
        engine.step()
    while engine.upgrades.step():
        pass
    finish(engine)
    assert answer.tokens(1) == answer.tokens(2) == truth(prompt(6)) != answer.tokens(0)
    assert usage(answer, 1).cached_tokens == SHARED
    assert_clean(engine)


@pytest.mark.parametrize("cache", [True, False])
def test_cancelling_at_any_time_frees_everything(cache: bool, make: Callable[..., Engine]):
    for config in ({}, {"max_num_seqs": 1}):
        engine = make(**config)
        for wait in range(0, 30, 2):
            gone = Answer(engine, prompt(14), replace(THREE, cache=cache, max_tokens=4))
            for _ in range(wait):
                engine.step()
            engine.cancel(gone.request.id)
            finish(engine)
            assert len([event for event in gone.events if event.finish_reason]) == 3
            assert_clean(engine)


@pytest.mark.parametrize("cache", [True, False])
def test_where_the_first_is_lost_the_next_one_drafts(cache: bool, make: Callable[..., Engine]):
    engine = make()
    answer = Answer(engine, prompt(7), replace(THREE, cache=cache))
    for _ in range(2):
        engine.step()
    (first,) = engine.scheduler.drafting
    assert len(engine.scheduler.waiting) == 2
    engine.fail(first, BadRequest("lost", "none"))
    finish(engine)
    assert [len(answer.tokens(i)) for i in range(3)] == [0, 16, 16] and answer.tokens(1) == answer.tokens(2)
    assert len(prefiller(engine).opened) == 2
    assert_clean(engine)


@pytest.mark.parametrize(("enable_prefix_caching", "cache"), CACHES)
def test_where_the_first_is_left_to_exact_prefill_all_are_exact(
    enable_prefix_caching: bool, cache: bool, make: Callable[..., Engine], truth: Callable[..., list[int]]
):
    engine = make({"exact_from": 60}, enable_prefix_caching=enable_prefix_caching)
    answer = Answer(engine, prompt(9), replace(THREE, cache=cache))
    finish(engine)
    assert [answer.tokens(i) for i in range(3)] == [truth(prompt(9))] * 3
    assert all(report(answer, i).fell_back for i in range(3))
    if enable_prefix_caching and cache:
        assert [usage(answer, i).cached_tokens for i in range(3)] == [0, SHARED, SHARED]
    assert_clean(engine)


def test_a_source_that_fails_fails_all_or_leaves_them_to_exact_prefill(
    make: Callable[..., Engine], truth: Callable[..., list[int]]
):
    engine = make({"fails_at": 48})
    answer = Answer(engine, prompt(12), THREE)
    finish(engine)
    assert [event.finish_reason for event in answer.events] == ["error"] * 3
    allowed = Answer(engine, prompt(12), replace(THREE, prefill=Prefill("speculative", allow_exact=True)))
    finish(engine)
    assert [allowed.tokens(i) for i in range(3)] == [truth(prompt(12))] * 3
    assert_clean(engine)


@pytest.mark.parametrize("cache", [True, False])
def test_a_preempted_one_starts_from_the_others(cache: bool, make: Callable[..., Engine]):
    params = replace(SAMPLED, max_tokens=40, cache=cache)
    calm = make()
    expected = Answer(calm, prompt(5), params)
    finish(calm)
    engine = make()
    answer = Answer(engine, prompt(5), params)
    while len(answer.tokens(2)) < 5:
        engine.step()
    for seq in engine.scheduler.running[:2]:  # the first one, too
        engine.scheduler._preempt(seq)
        while engine.scheduler.waiting:
            engine.step()
    finish(engine)
    assert [answer.tokens(i) for i in range(3)] == [expected.tokens(i) for i in range(3)]
    assert len(prefiller(engine).opened) == 1
    assert [usage(answer, i).preemptions for i in range(3)] == [1, 1, 0]
    assert report(answer, 0).token_layers == report(expected, 0).token_layers
    assert_clean(engine)


@pytest.mark.parametrize("cache", [True, False])
def test_a_pool_that_is_too_small_for_all_of_them(
    cache: bool, make: Callable[..., Engine], truth: Callable[..., list[int]]
):
    engine = make(kv_cache_tokens=240, enable_prefix_caching=cache)
    many = Answer(engine, prompt(5), replace(THREE, max_tokens=60))
    other = Answer(engine, prompt(6, 40), replace(EXACT, max_tokens=60))
    finish(engine)
    assert [len(many.tokens(i)) for i in range(3)] == [60] * 3
    assert other.tokens() == truth(prompt(6, 40), replace(EXACT, max_tokens=60))
    assert sum(usage(many, i).preemptions for i in range(3)) > 0 and leaked(engine) == 0
    assert all(state.known == 0 or cache for state in prefiller(engine).opened)  # new pages hold no old draft
    assert_clean(engine)


def test_no_other_request_waits_for_the_draft_that_the_others_wait_for(
    make: Callable[..., Engine], truth: Callable[..., list[int]]
):
    engine = make()
    many = Answer(engine, prompt(5, 400), replace(THREE, n=2))
    exact = Answer(engine, prompt(6, 40), EXACT)
    provisional = Answer(engine, prompt(7, 100), replace(EXACT, prefill="provisional"))
    engine.step()
    engine.step()
    assert [seq.request for seq in engine.scheduler.waiting] == [many.request]
    finish(engine)
    assert exact.tokens() == truth(prompt(6, 40))
    assert [t for e in provisional.events if not e.provisional for t in e.token_ids] == truth(prompt(7, 100))
    assert many.tokens(0) == many.tokens(1) and len(prefiller(engine).opened) == 2
    assert_clean(engine)


@pytest.mark.parametrize("cache", [True, False])
def test_the_first_may_be_preempted_while_it_drafts(cache: bool, make: Callable[..., Engine]):
    engine = make()
    answer = Answer(engine, prompt(5), replace(THREE, cache=cache))
    engine.step()
    engine.step()
    (first,) = engine.scheduler.drafting
    engine.scheduler._preempt(first)
    finish(engine)
    assert answer.tokens(0) == answer.tokens(1) == answer.tokens(2) and len(answer.tokens()) == 16
    assert [state.known for state in prefiller(engine).opened] == [0, 0]
    assert_clean(engine)


def test_other_requests_never_share_pages(make: Callable[..., Engine]):
    engine = make()
    answers = [Answer(engine, prompt(5), replace(THREE, n=2)) for _ in range(2)]
    while len(engine.scheduler.running) < 4:
        engine.step()
    a, b, c, d = (seq.pages[: SHARED // 8] for seq in engine.scheduler.running)
    assert a == b and c == d and not set(a) & set(c)
    assert len(prefiller(engine).opened) == 2
    finish(engine)
    assert all(len(answer.tokens(i)) == 16 for answer in answers for i in range(2))
    assert_clean(engine)
