"""An error in one sequence, of whatever kind, ends that sequence alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forerun.core import SamplingParams, Speculation
from forerun.engine.engine import Engine
from tests.engine.common import Answer, finish, leaked, make_engine, run
from tests.engine.fake_prefiller import fake
from tests.engine.test_speculative_prefill import DRAFTED, prefiller, prompt

PLAIN = SamplingParams(max_tokens=12, ignore_eos=True)


class Broken:
    """Raises at every use."""

    def __getattr__(self, name: str) -> Any:
        raise ZeroDivisionError(name)


@pytest.fixture
def make(tiny_folder: Callable[[str], Path]) -> Callable[[], Engine]:
    return lambda: make_engine(tiny_folder("qwen2"), prefiller=fake())


def check(engine: Engine, bad: Answer, good: Answer, expected: list[int]) -> None:
    finish(engine)
    assert bad.last.finish_reason == "error" and bad.last.error is not None and bad.last.usage is not None
    assert good.last.finish_reason == "length" and good.tokens() == expected
    assert engine.idle and leaked(engine) == 0 and not engine.output.open_texts


def test_while_sampling(make: Callable[[], Engine]):
    expected = run(make(), [prompt(1, 20)], PLAIN)[0]
    for drafter in ("off", "lookup"):
        engine = make()
        params = replace(PLAIN, logit_bias={3: 1.0}, speculation=Speculation(drafter))
        bad, good = Answer(engine, prompt(0, 20), params), Answer(engine, prompt(1, 20), PLAIN)
        engine.process_inbox()
        params.logit_bias["no token"] = 1.0  # type: ignore[index]
        check(engine, bad, good, expected)
        assert "TypeError" in str(bad.last.error) and isinstance(bad.last.error.__cause__, TypeError)


def test_while_the_answer_is_written(make: Callable[[], Engine], monkeypatch: pytest.MonkeyPatch):
    expected = run(make(), [prompt(1, 20)], PLAIN)[0]
    engine = make()
    bad, good = Answer(engine, prompt(0, 20), PLAIN), Answer(engine, prompt(1, 20), PLAIN)
    engine.process_inbox()
    seq = next(s for s in engine.scheduler.sequences if s.request is bad.request)
    seq.grammar = Broken()  # type: ignore[assignment]
    check(engine, bad, good, expected)
    assert isinstance(bad.last.error, ZeroDivisionError)


def test_at_its_end(make: Callable[[], Engine], monkeypatch: pytest.MonkeyPatch):
    expected = run(make(), [prompt(1, 20)], replace(PLAIN, max_tokens=20))[0]
    engine = make()
    bad = Answer(engine, prompt(0, 20), PLAIN)
    good = Answer(engine, prompt(1, 20), replace(PLAIN, max_tokens=20))
    finished = engine.output.finish

    def fails_once(seq: Any, reason: Any, event: Any) -> None:
        if seq.request is bad.request and reason == "length":
            raise ZeroDivisionError("at its end")
        finished(seq, reason, event)

    monkeypatch.setattr(engine.output, "finish", fails_once)
    check(engine, bad, good, expected)


def test_before_it_is_queued(make: Callable[[], Engine], monkeypatch: pytest.MonkeyPatch):
    expected = run(make(), [prompt(1, 20)], PLAIN)[0]
    engine = make()
    bad, good = Answer(engine, prompt(0, 20), replace(PLAIN, n=2)), Answer(engine, prompt(1, 20), PLAIN)
    sequences = engine.intake.sequences
    monkeypatch.setattr(
        engine.intake, "sequences", lambda request: 1 / 0 if request is bad.request else sequences(request)
    )
    check(engine, bad, good, expected)
    assert [(event.index, event.finish_reason) for event in bad.events] == [(0, "error"), (1, "error")]


def test_while_its_prompt_is_drafted(make: Callable[[], Engine], monkeypatch: pytest.MonkeyPatch):
    drafted = replace(DRAFTED, max_tokens=12, ignore_eos=True)
    expected = run(make(), [prompt(1)], drafted)[0]
    engine = make()
    bad, good = Answer(engine, prompt(0), drafted), Answer(engine, prompt(1), drafted)
    drafter = prefiller(engine)
    advance = drafter.advance
    monkeypatch.setattr(
        drafter, "advance", lambda state, budget: 1 / 0 if list(state.tokens) == prompt(0) else advance(state, budget)
    )
    check(engine, bad, good, expected)
    assert isinstance(bad.last.error, ZeroDivisionError) and not drafter.open_states
