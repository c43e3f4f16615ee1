"""Prompts launched before the first tokens of the last ones are read: the same answers, nothing leaked, one step ahead.

The device is that of test_run_ahead.py, which computes at once and is read later.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from forerun.checks.lossless.forced_drafting import all_drafts_verified
from forerun.core import SamplingParams
from forerun.engine.engine import Engine
from forerun.engine.sequence import Event
from forerun.params import Grammar
from tests.engine.common import Answer, finish, leaked, make_engine, run
from tests.engine.test_run_ahead import Launching, Pending

# more than a step's 64 tokens, chunked and whole prompts, and two that begin alike
PROMPTS = [[(7 * i + 3 * j) % 120 + 1 for j in range(12 + 19 * i)] for i in range(7)]
PROMPTS.append([*PROMPTS[4][:48], 9, 8, 7])
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True, speculation="off")


class LaunchingPrompts(Launching):
    """Launches prompts, too."""

    launches_prompts = True  # type: ignore[assignment]

    def choose_later(self, logits: Tensor, choose: Callable[[Tensor, int], Tensor] | None = None) -> Pending:  # type: ignore[override]
        tokens = (logits.argmax(-1) if choose is None else choose(logits, 0)).tolist()
        number = sum(line.startswith("prompts") for line in self.log)
        self.log.append(f"prompts {number}")
        return Pending(tokens, f"prompts {number}", self.log)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folder(tiny_folder: Callable[[str], Path]) -> Path:
    return tiny_folder("qwen2")


def launching(folder: Path, **options: Any) -> tuple[Engine, list[str]]:
    engine = make_engine(folder, **options)
    engine.runner.__class__ = LaunchingPrompts
    log: list[str] = []
    engine.runner.log, engine.runner.chosen, engine.runner.launches = log, [], 0  # type: ignore[attr-defined,misc]
    return engine, log


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("how", [{}, {"temperature": 1.2, "seed": 3, "top_k": 20}])
def test_answers_are_those_of_steps_one_by_one(folder: Path, caching: bool, how: dict[str, Any]):
    params, plain = replace(GREEDY, **how), make_engine(folder, enable_prefix_caching=caching)
    engine, log = launching(folder, enable_prefix_caching=caching)
    assert run(engine, PROMPTS, params) == run(plain, PROMPTS, params)
    assert sum(line.startswith("prompts") for line in log) >= 7  # every step with prompts
    assert not leaked(engine)


def test_the_next_prompts_are_launched_before_the_last_ones_are_read(folder: Path):
    engine, log = launching(folder, enable_prefix_caching=False)
    run(engine, [PROMPTS[3]] * 4, GREEDY)  # of 69 tokens, in steps of 64
    steps = [line for line in log if line != "forward"]
    assert steps[:4] == ["prompts 0", "prompts 1", "read prompts 0", "prompts 2"]
    last = max(i for i, line in enumerate(steps) if line.startswith("prompts"))
    assert [line for line in steps[last:] if "prompts" in line][-1] == f"read {steps[last]}"
    assert sum(line.startswith("read prompts") for line in steps) == sum(line.startswith("prompts") for line in steps)


def test_rows_that_decode_are_launched_before_the_prompts_beside_them_and_read_at_once(folder: Path):
    engine, log = launching(folder, enable_prefix_caching=False)
    first = Answer(engine, PROMPTS[0], GREEDY)
    while not first.tokens():
        engine.step()
    log.clear()
    others = [Answer(engine, PROMPTS[6], GREEDY) for _ in range(2)]
    for _ in range(3):
        engine.step()
    lines = [line for line in log if line != "forward"]
    at = lines.index("prompts 0")
    assert lines[at - 1].startswith("launch") and lines[at + 1] == f"read {lines[at - 1].split()[1]}"
    finish(engine)
    assert [a.tokens() for a in (first, *others)] == run(make_engine(folder), [PROMPTS[0], *[PROMPTS[6]] * 2], GREEDY)


def test_answers_of_one_token_and_stop_tokens(folder: Path):
    plain, (engine, _) = make_engine(folder), launching(folder)
    firsts = [answer[0] for answer in run(plain, PROMPTS, GREEDY)]
    for params in (replace(GREEDY, max_tokens=1), replace(GREEDY, stop_token_ids=tuple(firsts[:3]))):
        assert run(engine, PROMPTS, params) == run(plain, PROMPTS, params)
    assert not leaked(engine)


def test_a_request_that_is_cancelled_while_its_token_is_on_its_way(folder: Path):
    engine, log = launching(folder)
    answers = [Answer(engine, prompt, GREEDY) for prompt in PROMPTS]
    engine.step()
    assert log[-1] == "prompts 0"
    gone = [seq for seq in engine.scheduler.running if not seq.remaining]
    assert gone and not any(answer.events for answer in answers)
    for seq in gone:
        engine.cancel(seq.request.id)
    finish(engine)
    want = run(make_engine(folder), PROMPTS, GREEDY)
    for answer, tokens in zip(answers, want, strict=True):
        cancelled = any(answer.request is seq.request for seq in gone)
        assert answer.tokens() == ([] if cancelled else tokens)
        assert answer.last.finish_reason == ("cancelled" if cancelled else "length")
    assert not leaked(engine)


def test_all_requests_are_cancelled(folder: Path):
    engine, _ = launching(folder)
    for prompt in PROMPTS[:2]:
        Answer(engine, prompt, GREEDY)
    engine.step()
    engine.end_all()
    assert engine.idle and not leaked(engine)
    assert run(engine, PROMPTS[:3], GREEDY) == run(make_engine(folder), PROMPTS[:3], GREEDY)


@pytest.mark.parametrize("pages", [24, 30, 44])
def test_few_pages_preempt_as_usual(folder: Path, pages: int):
    options = {"enable_prefix_caching": pages == 30, "kv_cache_tokens": 8 * pages}
    plain, (engine, log) = make_engine(folder, **options), launching(folder, **options)  # type: ignore[arg-type]
    params = replace(GREEDY, max_tokens=40, temperature=0.8, seed=4)
    assert run(engine, PROMPTS, params) == run(plain, PROMPTS, params)
    assert any(line.startswith("prompts") for line in log) and not leaked(engine)


def test_a_sequence_that_is_preempted_while_its_token_is_on_its_way_samples_it_again(folder: Path):
    engine, _ = launching(folder)
    answers = [Answer(engine, prompt, GREEDY) for prompt in PROMPTS[:4]]
    engine.step()
    awaited = [seq for seq in engine.scheduler.running if not seq.remaining]
    for seq in awaited:
        engine.scheduler._preempt(seq)
    finish(engine)
    assert awaited and all(seq.usage.preemptions for seq in awaited)
    assert [answer.tokens() for answer in answers] == run(make_engine(folder), PROMPTS[:4], GREEDY)
    assert not leaked(engine)


def test_a_prompt_on_its_way_is_read_by_those_that_begin_alike(folder: Path):
    engine, _ = launching(folder)
    prompts = [PROMPTS[3], [*PROMPTS[3][:64], 5]]
    answers = [Answer(engine, prompt, GREEDY) for prompt in prompts]
    finish(engine)
    assert sorted(answer.last.usage.cached_tokens for answer in answers if answer.last.usage) == [0, 64]
    assert [answer.tokens() for answer in answers] == run(make_engine(folder), prompts, GREEDY)


def test_steps_that_need_the_host_run_as_usual_beside_others(folder: Path):
    needs = [
        replace(GREEDY, frequency_penalty=0.8),
        replace(GREEDY, logprobs=2),
        replace(GREEDY, grammar=Grammar("regex", "[a-c]{6}"), ignore_eos=False),
        GREEDY,
        replace(GREEDY, n=3, temperature=0.9, seed=2),
        replace(GREEDY, temperature=0.7, seed=1),
    ]
    found = []
    for engine in (make_engine(folder), launching(folder)[0]):
        answers = [Answer(engine, prompt, params) for prompt, params in zip(PROMPTS, needs, strict=False)]
        finish(engine)
        found.append([(answer.tokens(), answer.tokens(2), answer.text()) for answer in answers])
        logprobs = [entry for event in answers[1].events for entry in event.logprobs]
        assert len(logprobs) == 12 and not leaked(engine)
    assert found[0] == found[1]


def test_prompts_beside_streams_run_as_usual(folder: Path):
    engine, log = launching(folder)
    first = Answer(engine, PROMPTS[0], GREEDY)
    first.request.streamed = True
    while not first.tokens():
        engine.step()
    log.clear()
    second = Answer(engine, PROMPTS[2], GREEDY)
    while not second.tokens():
        engine.step()
    assert "forward" in log and not any("prompts" in line for line in log)
    finish(engine)


def test_the_first_token_of_a_stream_is_read_before_anything_else_is_launched(folder: Path):
    engine, log = launching(folder)
    first, second = Answer(engine, PROMPTS[2], GREEDY), Answer(engine, PROMPTS[6], GREEDY)
    first.request.streamed = True
    while not first.tokens():
        engine.step()
    steps = [line for line in log if line != "forward"]
    assert steps[:2] == ["prompts 0", "read prompts 0"]
    finish(engine)
    want = run(make_engine(folder), [PROMPTS[2], PROMPTS[6]], GREEDY)
    assert [first.tokens(), second.tokens()] == want


def test_those_that_decode_go_on_together_where_others_wait_for_a_place(folder: Path):
    engine, log = launching(folder, max_num_seqs=2)
    answers = [Answer(engine, prompt, GREEDY) for prompt in PROMPTS[:5]]
    finish(engine)
    assert [answer.tokens() for answer in answers] == run(make_engine(folder, max_num_seqs=2), PROMPTS[:5], GREEDY)
    assert any(line.startswith("prompts") for line in log) and not leaked(engine)


def test_rows_with_drafts_beside_prompts(folder: Path):
    repeated = [[5, 9, 23, 40, 77, 12, 30, 61] * 3, *PROMPTS[4:7]]
    engine, log = launching(folder)
    with all_drafts_verified(engine):
        found = run(engine, repeated, replace(GREEDY, max_tokens=30, speculation="lookup"))
    assert found == run(make_engine(folder), repeated, replace(GREEDY, max_tokens=30))
    assert engine.speculator.totals.drafted > 0 and any("prompts" in line for line in log)
    assert not leaked(engine)


def test_one_answer_that_fails_at_its_first_token_ends_alone(folder: Path, monkeypatch: pytest.MonkeyPatch):
    engine, _ = launching(folder)
    answers, append = [Answer(engine, prompt, GREEDY) for prompt in PROMPTS[:3]], engine.output.append

    def fails(seq: Any, step: Any) -> Any:
        if seq.request is answers[1].request:
            raise RuntimeError("no text")
        return append(seq, step)

    monkeypatch.setattr(engine.output, "append", fails)
    finish(engine)
    assert isinstance(answers[1].last.error, RuntimeError) and not leaked(engine)
    want = run(make_engine(folder), PROMPTS[:3], GREEDY)
    assert [answers[0].tokens(), answers[2].tokens()] == [want[0], want[2]]


@pytest.mark.parametrize("seed", range(6))
def test_any_arrivals_and_cancellations(folder: Path, seed: int):
    """Answers that were not cancelled are those of each request alone."""
    draw = random.Random(seed)
    engine, _ = launching(folder, kv_cache_tokens=8 * draw.choice([40, 60, 256]), max_num_seqs=draw.choice([2, 5, 16]))
    pool = [
        GREEDY,
        replace(GREEDY, temperature=1.0, seed=5),
        replace(GREEDY, presence_penalty=0.4),
        replace(GREEDY, max_tokens=3),
    ]
    asked: list[tuple[Answer, list[int], SamplingParams]] = []
    for _ in range(60):
        if len(asked) < 14 and draw.random() < 0.4:
            prompt, params = draw.choice(PROMPTS), draw.choice(pool)
            asked.append((Answer(engine, prompt, params), prompt, params))
        if asked and draw.random() < 0.1:
            engine.cancel(draw.choice(asked)[0].request.id)
        engine.step()
    finish(engine)
    assert not leaked(engine)
    plain = make_engine(folder, enable_prefix_caching=False)
    for answer, prompt, params in asked:
        last: Event = answer.last
        want = run(plain, [prompt], params)[0]
        assert answer.tokens() == (want if last.finish_reason == "length" else want[: len(answer.tokens())])
