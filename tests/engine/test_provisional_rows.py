"""Provisional answers on a device where only forwards of few rows give the tokens of plain decoding."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forerun.core import Grammar, SamplingParams, Speculation
from forerun.engine.engine import Engine
from forerun.engine.provisional import NAME, ProvisionalAnswer
from forerun.models.decoder import Output
from forerun.models.execution.runner import Runner, Span
from tests.engine.common import Answer, finish, make_engine, run
from tests.engine.fake_prefiller import fake
from tests.engine.test_provisional import PROVISIONAL, SAMPLED, cancel, final, shown, three_answers, tokens
from tests.engine.test_speculative_prefill import EXACT, assert_clean, prompt

ROWS = 4
CHUNK = 16
LONG = 300  # a prompt of so many chunks that its provisional sequence reaches its limit
PLAIN = Speculation("off")
Make = Callable[..., Engine]
Truth = Callable[..., list[int]]


class Forwards:
    """What ran in each forward of an engine: provisional sequences too."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.spans: list[list[Span]] = []
        forward = engine.runner.forward

        def noted(spans: list[Span], *others: Any) -> Output:
            self.spans.append(spans)
            return forward(spans, *others)

        monkeypatch.setattr(engine.runner, "forward", noted)


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runner, "decoding_rows", ROWS)


@pytest.fixture
def make(tiny_folder: Callable[[str], Path]) -> Make:
    def engine(config: dict[str, Any] | None = None, **values: Any) -> Engine:
        limits = {"max_num_seqs": 8, "max_num_batched_tokens": CHUNK} | (config or {})
        made = make_engine(tiny_folder("qwen2"), prefiller=fake(**values), **limits)
        made.runner.splits_batches = True
        return made

    return engine


@pytest.fixture(scope="module")
def truth(tiny_folder: Callable[[str], Path]) -> Truth:
    engine = make_engine(tiny_folder("qwen2"), enable_prefix_caching=False)
    return lambda text, params: run(engine, [text], replace(params, prefill="exact"))[0]


def check_events(answer: Answer, index: int = 0) -> None:
    """What is confirmed and what is retracted make up what was shown, and only the last of it is retracted."""
    events, tokens_shown = final(answer, index), shown(answer)
    settling = [e for e in events if e.confirmed or e.retracted]
    assert sum(e.confirmed + e.retracted for e in events) == len(tokens_shown)
    assert all(e.retracted == 0 for e in settling[:-1]) and events[: len(settling)] == settling
    stood = 0
    for event in settling:
        assert event.token_ids[: event.confirmed] == tokens_shown[stood : stood + event.confirmed]
        assert event.confirmed == len(event.token_ids) or event is settling[-1]
        stood += event.confirmed
    usage = answer.last.usage
    assert usage is not None and usage.confirmed == stood and usage.provisional == len(tokens_shown)


@pytest.mark.parametrize("values", [{}, SAMPLED, {"repetition_penalty": 1.3}], ids=["greedy", "sampled", "penalised"])
@pytest.mark.parametrize("bad", [0.0, 0.3, 3.0])
def test_the_answer_is_that_of_exact_prefill(bad: float, values: dict[str, Any], make: Make, truth: Truth):
    engine, draw = make(bad=bad), random.Random(5)
    for seed in range(3):
        text, params = prompt(seed, draw.randrange(100, LONG)), replace(PROVISIONAL, **values, max_tokens=40)
        answer = Answer(engine, text, params)
        finish(engine)
        assert tokens(final(answer)) == truth(text, params) and shown(answer)
        check_events(answer)
        if bad == 0.0:
            assert sum(e.retracted for e in answer.events) == 0
    assert_clean(engine)


def test_tokens_are_verified_after_the_prompt_in_forwards_of_few_rows(make: Make, monkeypatch: pytest.MonkeyPatch):
    engine = make(bad=0.0)
    ran = Forwards(engine, monkeypatch)
    answer = Answer(engine, prompt(0, LONG), replace(PROVISIONAL, max_tokens=40, speculation=PLAIN))
    finish(engine)
    events, tokens_shown = final(answer), len(shown(answer))
    assert tokens_shown > 2 * ROWS
    assert [len(e.token_ids) for e in events[:3]] == [1, ROWS, ROWS]  # the prompt's own word, then all that stand
    assert [e.confirmed for e in events[:3]] == [1, ROWS, ROWS] and max(len(e.token_ids) for e in events) == ROWS
    drafts = [span for spans in ran.spans for span in spans if span.parents]
    assert drafts and all(len(span.ids) <= ROWS and len(span.logits_indices) == len(span.ids) for span in drafts)
    assert answer.last.usage.with_first == 0  # type: ignore[union-attr]


def test_the_prompt_is_cut_and_computed_as_if_there_were_no_provisional_sequence(
    make: Make, monkeypatch: pytest.MonkeyPatch
):
    prompts = []
    for params in (PROVISIONAL, EXACT):
        engine = make(bad=0.0)
        ran = Forwards(engine, monkeypatch)
        Answer(engine, prompt(1, 200), replace(params, speculation=PLAIN))
        finish(engine)
        alone = [spans[0] for spans in ran.spans if len(spans) == 1]
        prompts.append([(s.first, len(s.ids)) for s in alone if s.isolated or params is EXACT and len(s.ids) > 1])
    assert prompts[0] == prompts[1] == [(at, min(CHUNK, 200 - at)) for at in range(0, 200, CHUNK)]


def test_room_is_shared_with_others_that_decode(make: Make, truth: Truth, monkeypatch: pytest.MonkeyPatch):
    engine = make(bad=0.0)
    ran = Forwards(engine, monkeypatch)
    params = replace(PROVISIONAL, max_tokens=24, speculation=PLAIN)
    answers = [Answer(engine, prompt(10 + i, 200 + 40 * i), params) for i in range(3)]
    others = [Answer(engine, prompt(20 + i), replace(EXACT, max_tokens=90, speculation=PLAIN)) for i in range(2)]
    finish(engine)
    for i, answer in enumerate(answers):
        assert tokens(final(answer)) == truth(prompt(10 + i, 200 + 40 * i), params)
        check_events(answer)
    assert [a.tokens() for a in others] == [truth(prompt(20 + i), replace(EXACT, max_tokens=90)) for i in range(2)]
    drafting = [spans for spans in ran.spans if any(span.parents for span in spans)]
    assert any(sum(map(bool, (span.parents for span in spans))) and len(spans) > 1 for spans in drafting)
    assert all(sum(len(span.ids) for span in spans if not span.isolated) <= ROWS for spans in drafting)
    assert_clean(engine)


def test_where_there_is_no_room_tokens_are_confirmed_one_by_one(
    make: Make, truth: Truth, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Runner, "decoding_rows", 1)
    engine = make(bad=0.0)
    answer = Answer(engine, prompt(2, LONG), PROVISIONAL)
    finish(engine)
    assert [len(e.token_ids) for e in final(answer)] == [1] * 16 and answer.last.usage.confirmed > 5  # type: ignore[union-attr]
    assert tokens(final(answer)) == truth(prompt(2, LONG), EXACT)
    check_events(answer)


def test_answers_end_where_they_would(make: Make, truth: Truth):
    engine = make(bad=0.0)
    short = Answer(engine, prompt(4, LONG), replace(PROVISIONAL, max_tokens=6))
    ended = Answer(engine, prompt(5, LONG), replace(PROVISIONAL, ignore_eos=False, logit_bias={2: 100.0}))
    finish(engine)
    assert len(shown(short)) == 6 and tokens(final(short)) == shown(short)
    assert short.last.finish_reason == "length"
    assert shown(ended) == [2] == tokens(final(ended)) and ended.last.finish_reason == "stop"
    whole = engine.tokenizer.decode(truth(prompt(6, LONG), EXACT))  # type: ignore[union-attr]
    stopped = Answer(engine, prompt(6, LONG), replace(PROVISIONAL, stop=(whole[8:12],)))
    finish(engine)
    assert "".join(e.text for e in final(stopped)) == whole[: whole.index(whole[8:12])]
    assert stopped.last.finish_reason == "stop"
    for answer in (short, ended, stopped):
        check_events(answer)
    assert_clean(engine)


def test_what_an_answer_ends_before_is_retracted() -> None:
    provisional = ProvisionalAnswer([5, 6, 7, 8])
    assert provisional.verify([5, 6], last=False) == (2, 0) and provisional.open == [7, 8]
    assert provisional.verify([7], last=True) == (1, 1) and provisional.verified and provisional.open == []


def test_drafters_wait_until_tokens_are_verified(make: Make, truth: Truth, monkeypatch: pytest.MonkeyPatch):
    for values in ({"speculation": Speculation("lookup+suffix")}, {"grammar": Grammar("regex", "[a-c]{30}")}):
        engine = make(bad=0.3)
        params = replace(PROVISIONAL, max_tokens=40, **values)  # type: ignore[arg-type]
        sources: list[tuple[bool, set[str]]] = []
        append = engine._append

        def noted(seq: Any, output: Any, scheduled: Any, append: Any = append, sources: Any = sources) -> None:
            if seq.final is None:
                sources.append(
                    (seq.provisional is not None and not seq.provisional.verified, set(scheduled.draft.sources))
                )
            append(seq, output, scheduled)

        monkeypatch.setattr(engine, "_append", noted)
        answer = Answer(engine, prompt(7, LONG) + prompt(7, 40), params)
        finish(engine)
        assert tokens(final(answer)) == truth(prompt(7, LONG) + prompt(7, 40), params)
        check_events(answer)
        assert all(found <= {NAME} for waiting, found in sources if waiting)
        assert all(NAME not in found for waiting, found in sources if not waiting)
        assert any(waiting and found for waiting, found in sources)
        assert_clean(engine)


def test_n_answers(make: Make, truth: Truth):
    engine = make(bad=0.3)
    answer = three_answers(engine, truth, LONG)
    assert not any(e.confirmed or e.retracted for i in (1, 2) for e in final(answer, i))
    tokens_shown = shown(answer)
    assert tokens_shown and sum(e.confirmed + e.retracted for e in answer.events) == len(tokens_shown)
    assert_clean(engine)


def test_a_provisional_sequence_without_tokens(make: Make, truth: Truth):
    engine = make(fails_at=48)
    answer = Answer(engine, prompt(40, LONG), replace(PROVISIONAL, speculation=Speculation("lookup")))
    finish(engine)
    assert tokens(final(answer)) == truth(prompt(40, LONG), EXACT) and not shown(answer)
    check_events(answer)
    assert_clean(engine)


def test_cancelling_at_any_time(make: Make, truth: Truth):
    engine = make(bad=0.0)
    verifying = 0
    for wait in range(0, 50, 2):
        engine.clear_cache()
        gone, other = Answer(engine, prompt(20, 200), PROVISIONAL), Answer(engine, prompt(21), EXACT)
        for _ in range(wait):
            engine.step()
        verifying += 0 < sum(e.confirmed for e in gone.events) < len(shown(gone))
        cancel(engine, gone)
        assert other.tokens() == truth(prompt(21), EXACT)
    assert verifying


@pytest.mark.parametrize("config", [{"kv_cache_tokens": 480}, {"kv_cache_tokens": 340}, {"max_num_seqs": 1}])
def test_preempted_answers_go_on_being_verified(config: dict[str, Any], make: Make, truth: Truth):
    engine = make(bad=0.0, config=config)
    params: SamplingParams = replace(PROVISIONAL, max_tokens=30)
    answers = [Answer(engine, prompt(30 + i, 120 + 60 * (i % 2)), params) for i in range(4)]
    finish(engine)
    for i, answer in enumerate(answers):
        assert tokens(final(answer)) == truth(prompt(30 + i, 120 + 60 * (i % 2)), params)
        check_events(answer)
    assert_clean(engine)
