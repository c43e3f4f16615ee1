"""Provisional answers: whatever the provisional sequence emits, the answer is that of exact prefill."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forerun.core import Grammar, Prefill, SamplingParams, Speculation
from forerun.engine.engine import Engine
from forerun.engine.provisional import MAX_PROVISIONAL_TOKENS, ProvisionalAnswer
from forerun.engine.sequence import Event
from tests.engine.common import Answer, finish, make_engine, run
from tests.engine.fake_prefiller import FakePrefiller, fake
from tests.engine.test_speculative_prefill import DRAFTED, EXACT, assert_clean, prompt

PROVISIONAL = replace(EXACT, prefill="provisional")
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 7}
LONG = 300  # a prompt of several chunks


@pytest.fixture(scope="module")
def make(tiny_folder: Callable[[str], Path]) -> Callable[..., Engine]:
    def engine(config: dict[str, Any] | None = None, **values: Any) -> Engine:
        return make_engine(tiny_folder("qwen2"), prefiller=fake(**values), **(config or {}))

    return engine


@pytest.fixture(scope="module")
def truth(tiny_folder: Callable[[str], Path]) -> Callable[..., list[int]]:
    engine = make_engine(tiny_folder("qwen2"), enable_prefix_caching=False)
    return lambda text, params: run(engine, [text], replace(params, prefill="exact"))[0]


def final(answer: Answer, index: int = 0) -> list[Event]:
    return [e for e in answer.events if e.index == index and not e.provisional]


def tokens(events: list[Event]) -> list[int]:
    return [t for event in events for t in event.token_ids]


def shown(answer: Answer) -> list[int]:
    return tokens([e for e in answer.events if e.provisional])


@pytest.mark.parametrize("values", [{}, SAMPLED, {"repetition_penalty": 1.3}], ids=["greedy", "sampled", "penalised"])
@pytest.mark.parametrize("bad", [0.0, 0.3, 3.0])
def test_the_answer_is_that_of_exact_prefill(
    bad: float, values: dict[str, Any], make: Callable[..., Engine], truth: Callable[..., list[int]]
):
    engine, draw = make(bad=bad), random.Random(5)
    for seed in range(4):
        text, params = prompt(seed, draw.randrange(20, 400)), replace(PROVISIONAL, **values, max_tokens=40)
        answer = Answer(engine, text, params)
        finish(engine)
        assert tokens(final(answer)) == truth(text, params)
        first = final(answer)[0]
        assert first.confirmed + first.retracted == len(shown(answer))
        assert first.token_ids[: first.confirmed] == shown(answer)[: first.confirmed]
        if len(text) > 200:
            assert shown(answer)
        if bad == 0.0:
            assert first.retracted == 0
    assert_clean(engine)


def test_provisional_tokens_come_before_the_prompt_is_computed(make: Callable[..., Engine]):
    engine = make(bad=0.0)
    answer = Answer(engine, prompt(0, LONG), PROVISIONAL)
    while not shown(answer):
        engine.step()
    (last,) = [s for s in engine.scheduler.sequences if s.final is None]
    assert last.computed == 0  # not a token of it has run
    before = len(shown(answer))
    engine.step()
    assert last.computed == 16 and len(shown(answer)) == before + 1  # both in one forward
    finish(engine)
    usage = answer.last.usage
    assert usage is not None and usage.provisional == len(shown(answer)) == usage.confirmed > 5
    assert usage.confirmed_share == 1.0 and 0 < usage.provisional_s < usage.ttft_s < usage.total_s
    assert usage.prefill is not None and usage.prefill.drafted > 0 and usage.completion_tokens == 16
    assert len(final(answer)[0].token_ids) == usage.confirmed + 1 or usage.confirmed == 16  # in one event
    assert_clean(engine)


def test_texts_and_events_fit_together(make: Callable[..., Engine]):
    engine = make(bad=3.0)
    answer = Answer(engine, prompt(1, LONG), PROVISIONAL)
    finish(engine)
    assert engine.tokenizer is not None
    assert "".join(e.text for e in final(answer)) == engine.tokenizer.decode(tokens(final(answer)))
    provisional = [e for e in answer.events if e.provisional]
    assert engine.tokenizer.decode(shown(answer)).startswith("".join(e.text for e in provisional))
    assert final(answer)[0].retracted > 0  # this draft was bad
    assert all(e.finish_reason is None and e.usage is None for e in provisional)
    assert answer.events[: len(provisional)] == provisional


def test_the_exact_cache_gets_exact_pages_only(make: Callable[..., Engine], truth: Callable[..., list[int]]):
    engine = make(bad=3.0)
    Answer(engine, prompt(2, LONG), PROVISIONAL)
    finish(engine)
    assert engine.approximate.num_pages == 0 and len(engine.upgrades) == 0
    again = Answer(engine, prompt(2, LONG), EXACT)
    finish(engine)
    assert again.last.usage.cached_tokens == (LONG - 1) // 8 * 8  # type: ignore[union-attr]
    assert again.tokens() == truth(prompt(2, LONG), EXACT)
    warm = Answer(engine, prompt(2, LONG), PROVISIONAL)  # nothing left to draft
    finish(engine)
    assert not shown(warm) and tokens(final(warm)) == again.tokens()
    assert_clean(engine)


def test_a_provisional_sequence_ends_where_the_answer_would(
    make: Callable[..., Engine], truth: Callable[..., list[int]]
):
    engine = make(bad=0.0, config={"max_num_batched_tokens": 16, "max_num_seqs": 8})
    longest = Answer(engine, prompt(3, LONG), replace(PROVISIONAL, max_tokens=200))
    finish(engine)
    assert len(shown(longest)) == MAX_PROVISIONAL_TOKENS
    short = Answer(engine, prompt(4, LONG), replace(PROVISIONAL, max_tokens=3))
    ended = Answer(engine, prompt(5, LONG), replace(PROVISIONAL, ignore_eos=False, logit_bias={2: 100.0}))
    whole = engine.tokenizer.decode(truth(prompt(6, LONG), EXACT))  # type: ignore[union-attr]
    stopped = Answer(engine, prompt(6, LONG), replace(PROVISIONAL, stop=(whole[8:12],)))
    finish(engine)
    assert len(shown(short)) == 3 and tokens(final(short)) == shown(short) and short.last.confirmed == 3
    assert shown(ended) == [2] == tokens(final(ended)) and ended.last.finish_reason == "stop"
    assert "".join(e.text for e in final(stopped)) == whole[: whole.index(whole[8:12])]
    assert stopped.last.finish_reason == "stop" and len(shown(stopped)) < 16
    assert_clean(engine)


def test_grammars_and_drafters_and_other_verifiers_go_along(
    make: Callable[..., Engine], truth: Callable[..., list[int]]
):
    engine = make(bad=3.0)
    for values in (
        {"grammar": Grammar("regex", "[a-c]{20}")},
        {"speculation": Speculation("lookup+suffix")},
        {"speculation": Speculation("off")},
    ):
        params = replace(PROVISIONAL, **values)  # type: ignore[arg-type]
        answer = Answer(engine, prompt(7, LONG), params)
        finish(engine)
        assert tokens(final(answer)) == truth(prompt(7, LONG), params) and shown(answer)
        engine.clear_cache()
    assert_clean(engine)


def test_provisional_tokens_stand_by_the_answers_own_draws_whatever_the_verifier(make: Callable[..., Engine]):
    engine = make(bad=0.0)
    params = replace(PROVISIONAL, **SAMPLED, max_tokens=6, speculation=Speculation("lookup", verify="rejection"))
    for seed in range(4):
        answer = Answer(engine, prompt(seed, LONG), params)
        finish(engine)
        assert tokens(final(answer)) == shown(answer) and answer.last.retracted == 0


def cancel(engine: Engine, gone: Answer) -> None:
    """It ends once, and leaves nothing behind."""
    engine.cancel(gone.request.id)
    finish(engine)
    assert gone.last.finish_reason in ("cancelled", "length")
    assert sum(e.finish_reason is not None for e in gone.events) == 1
    assert_clean(engine)


def three_answers(engine: Engine, truth: Callable[..., list[int]], length: int) -> Answer:
    """To one prompt, each as it would be alone."""
    params = replace(PROVISIONAL, n=3, temperature=1.2, seed=5)
    answer = Answer(engine, prompt(8, length), params)
    finish(engine)
    for i in range(3):
        assert tokens(final(answer, i)) == truth(prompt(8, length), replace(params, n=1, seed=5 + i))
    return answer


def test_n_answers(make: Callable[..., Engine], truth: Callable[..., list[int]]):
    engine = make(bad=0.3)
    answer = three_answers(engine, truth, LONG)
    assert shown(answer) and {e.index for e in answer.events if e.provisional} == {0}
    assert_clean(engine)


def test_mixed_with_others(make: Callable[..., Engine], truth: Callable[..., list[int]]):
    engine = make(bad=3.0, config={"kv_cache_tokens": 6000})
    modes = [PROVISIONAL, EXACT, DRAFTED, PROVISIONAL, EXACT, PROVISIONAL]
    texts = [prompt(9 + i // 2, 100 + 60 * i) for i in range(6)]
    answers = [Answer(engine, text, mode) for text, mode in zip(texts, modes, strict=True)]
    finish(engine)
    for text, mode, answer in zip(texts, modes, answers, strict=True):
        if mode is not DRAFTED:
            assert tokens(final(answer)) == truth(text, EXACT)
    assert sum(bool(shown(answer)) for answer in answers) == 3
    while engine.upgrade_step():
        pass
    assert_clean(engine)


def test_cancelling_at_any_time(make: Callable[..., Engine], truth: Callable[..., list[int]]):
    engine = make(bad=3.0)
    for wait in range(0, 36, 3):
        gone, other = Answer(engine, prompt(20, LONG), PROVISIONAL), Answer(engine, prompt(21), EXACT)
        for _ in range(wait):
            engine.step()
        cancel(engine, gone)
        assert other.tokens() == truth(prompt(21), EXACT)


@pytest.mark.parametrize(
    "config",
    [{"kv_cache_tokens": 480}, {"kv_cache_tokens": 340}, {"max_num_seqs": 1}],
    ids=["tight", "no room", "no place"],
)
def test_a_provisional_sequence_never_stands_in_the_way(
    config: dict[str, Any], make: Callable[..., Engine], truth: Callable[..., list[int]]
):
    engine = make(bad=3.0, config=config)
    params = replace(PROVISIONAL, max_tokens=30)
    answers = [Answer(engine, prompt(30 + i, 120 + 60 * (i % 2)), params) for i in range(4)]
    finish(engine)
    assert [tokens(final(a)) for a in answers] == [truth(prompt(30 + i, 120 + 60 * (i % 2)), params) for i in range(4)]
    assert_clean(engine)


@pytest.mark.parametrize("values", [{"fails_at": 48}, {"exact_from": 48}], ids=["fails", "exact"])
def test_a_provisional_sequence_that_cannot_be_is_no_loss(
    values: dict[str, Any], make: Callable[..., Engine], truth: Callable[..., list[int]]
):
    engine = make(**values)
    answer = Answer(engine, prompt(40, LONG), PROVISIONAL)
    finish(engine)
    assert tokens(final(answer)) == truth(prompt(40, LONG), EXACT) and not shown(answer)
    assert "failed" in answer.last.usage.prefill.fell_back  # type: ignore[union-attr]
    impossible = Prefill("provisional", source="impossible", allow_exact=True)
    answer = Answer(engine, prompt(41, LONG), replace(EXACT, prefill=impossible))
    finish(engine)
    assert answer.tokens() == truth(prompt(41, LONG), EXACT)
    assert "impossible" in answer.last.usage.prefill.fell_back  # type: ignore[union-attr]
    assert_clean(engine)


def test_tokens_are_shown_as_long_as_they_are_likely_to_stand():
    answer = ProvisionalAnswer(tokens=[1, 2])
    assert answer.sure([0.0, 0.0]) == 2  # nothing is known of how far its tokens are from the exact ones
    answer.kl = 0.01
    assert answer.sure([9.0, 8.0, 9.0]) == 3 and answer.max_tokens == MAX_PROVISIONAL_TOKENS
    assert answer.sure([7.0, 0.0, 0.0, 9.0]) == 2 and answer.max_tokens == 4  # two that might as well be others
    sure, unsure = (ProvisionalAnswer(kl=kl) for kl in (0.001, 0.5))
    margins = [0.4] * 10
    assert sure.sure(margins) > unsure.sure(margins)  # the same tokens over worse K/V


@pytest.mark.parametrize("speculation", ["off", "lookup+suffix"])
def test_doubted_tokens_are_held_back(
    speculation: str, make: Callable[..., Engine], truth: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch
):
    params, counts = replace(PROVISIONAL, speculation=Speculation(speculation)), []
    for kl in (1e-9, 0.003, 1e9):
        monkeypatch.setattr(FakePrefiller, "kl", kl)
        engine, found = make(bad=0.0), 0
        for seed in range(6):
            answer = Answer(engine, prompt(50 + seed, LONG), params)
            finish(engine)
            assert tokens(final(answer)) == truth(prompt(50 + seed, LONG), params)
            assert answer.last.usage is not None and answer.last.usage.provisional == len(shown(answer))
            assert shown(answer) == tokens(final(answer))[: len(shown(answer))]
            found += len(shown(answer))
        counts.append(found)
        assert_clean(engine)
    assert counts[0] > counts[1] > counts[2] == 6  # of each answer one token, whose chance is a half


def test_an_answer_that_begins_with_doubt_shows_nothing(
    make: Callable[..., Engine], truth: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(FakePrefiller, "kl", 1e9)
    monkeypatch.setattr("forerun.engine.provisional.MIN_STANDING", 0.6)
    engine = make(bad=0.0)
    answer = Answer(engine, prompt(60, LONG), PROVISIONAL)
    finish(engine)
    assert not shown(answer) and tokens(final(answer)) == truth(prompt(60, LONG), EXACT)
    assert answer.last.finish_reason == "length" and answer.last.retracted == 0
    assert_clean(engine)


def test_a_reader_that_fails_at_a_provisional_event_is_cut_off(make: Callable[..., Engine]):
    engine = make(bad=3.0)
    answer = Answer(engine, prompt(42, LONG), PROVISIONAL)

    def fail(event: Event) -> None:
        raise RuntimeError("reader gone")

    answer.request.sink = fail
    finish(engine)
    assert_clean(engine)


def test_an_error_ends_provisional_sequences_too(make: Callable[..., Engine]):
    engine = make(bad=3.0)
    answer = Answer(engine, prompt(43, LONG), PROVISIONAL)
    for _ in range(20):
        engine.step()
    engine.end_all(RuntimeError("out of memory"))
    assert answer.last.finish_reason == "error" and sum(e.finish_reason is not None for e in answer.events) == 1
    assert_clean(engine)


def test_judging() -> None:
    for answer, expected in (([5, 6, 7, 8], (3, 0)), ([5, 9], (1, 2)), ([5], (1, 2)), ([], (0, 3)), ([9], (0, 3))):
        provisional = ProvisionalAnswer([5, 6, 7])
        assert provisional.verify(answer) == expected and provisional.verified
    draft = ProvisionalAnswer([5, 6, 7]).draft(2)
    assert draft.tokens == [5, 6] and draft.parents == [-1, 0] and draft.problem(10) is None
    assert not len(ProvisionalAnswer([5]).draft(-1))


def test_params_name_the_mode() -> None:
    assert SamplingParams(prefill="provisional").prefill.mode == "provisional"
