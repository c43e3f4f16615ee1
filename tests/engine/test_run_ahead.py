"""Steps launched before the last one's tokens are read: the same answers, nothing leaked, and the host one step behind.

A device is stood in for by launches that compute at once, in order, and are read later.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from forerun.checks.lossless.forced_drafting import all_drafts_verified
from forerun.core import SamplingParams
from forerun.engine.engine import Engine
from forerun.engine.sequence import Client
from forerun.models.execution.runner import Runner, Span
from tests.engine.common import Answer, finish, leaked, make_engine, run

PROMPTS = [[3 + i, 40, 77 + i, 5, 9 * i + 4] * (1 + i % 4) for i in range(7)]
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True, speculation="off")


class Pending:
    def __init__(self, tokens: list[int], launch: int, log: list[str]) -> None:
        self.tokens, self.launch, self._log = tokens, launch, log

    def read(self) -> list[int]:
        self._log.append(f"read {self.launch}")
        return self.tokens


class Launching(Runner):
    """Launches on a CPU."""

    can_launch, launches = True, 0  # type: ignore[assignment]
    log: list[str]
    chosen: list[int]

    def launch(self, tokens, entries, pages, choose=None):  # type: ignore[no-untyped-def,override]
        known = [int(t) if t >= 0 else self.chosen[-1 - int(t)] for t in tokens]
        each = zip(known, entries, pages, strict=True)
        logits = Runner.forward(self, [Span([t], int(e), array("i", own.tolist()), (0,)) for t, e, own in each]).logits
        self.chosen = (logits.argmax(-1) if choose is None else choose(logits, 0)).tolist()
        self.launches += 1
        self.log.append(f"launch {self.launches}")
        return Pending(list(self.chosen), self.launches, self.log)

    def forward(self, spans: list[Span], *others: object) -> object:  # type: ignore[override]
        self.log.append("forward")
        return super().forward(spans, *others)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folder(tiny_folder: Callable[[str], Path]) -> Path:
    return tiny_folder("qwen2")


def launching(folder: Path, **options: object) -> tuple[Engine, list[str]]:
    engine = make_engine(folder, **options)  # type: ignore[arg-type]
    engine.runner.__class__ = Launching
    log: list[str] = []
    engine.runner.log, engine.runner.chosen, engine.runner.launches = log, [], 0  # type: ignore[attr-defined,misc]
    return engine, log


@pytest.mark.parametrize("caching", [False, True])
def test_answers_are_those_of_steps_one_by_one(folder: Path, caching: bool):
    plain = make_engine(folder, enable_prefix_caching=caching)
    engine, log = launching(folder, enable_prefix_caching=caching)
    assert run(engine, PROMPTS, GREEDY) == run(plain, PROMPTS, GREEDY)
    assert sum(line.startswith("launch") for line in log) == 39  # all but the prompts' own tokens
    assert not leaked(engine)


def test_the_next_step_is_launched_before_a_step_is_read(folder: Path):
    engine, log = launching(folder)
    run(engine, PROMPTS[:2], GREEDY)
    steps = [line for line in log if line != "forward"]
    assert steps[:4] == ["launch 1", "launch 2", "read 1", "launch 3"]
    assert steps[-2:] == ["read 38", "read 39"]  # no launch for a token behind the last one


def test_answers_that_end_leave_one_row_too_many_which_is_dropped(folder: Path):
    plain, (engine, _) = make_engine(folder), launching(folder)
    answers = run(plain, PROMPTS, GREEDY)
    stop = SamplingParams(max_tokens=40, ignore_eos=True, speculation="off", stop_token_ids=(answers[0][12],))
    assert run(engine, PROMPTS, stop) == run(plain, PROMPTS, stop)
    assert len(run(engine, PROMPTS[:1], stop)[0]) <= 13
    assert not leaked(engine)


def test_requests_that_come_in_between_and_cancellations(folder: Path):
    engine, log = launching(folder, max_num_seqs=4)
    plain = make_engine(folder, max_num_seqs=4)
    assert run(engine, PROMPTS, GREEDY) == run(plain, PROMPTS, GREEDY)
    # what needs the host in every step
    penalised = SamplingParams(max_tokens=9, frequency_penalty=0.8, ignore_eos=True, speculation="off")
    before = len(log)
    assert run(engine, PROMPTS[:3], penalised) == run(plain, PROMPTS[:3], penalised)
    assert all(line == "forward" for line in log[before:])
    assert not leaked(engine)


def test_steps_are_launched_ahead_where_others_wait_for_a_place(folder: Path):
    engine, log = launching(folder, max_num_seqs=3)
    assert run(engine, PROMPTS, GREEDY) == run(make_engine(folder, max_num_seqs=3), PROMPTS, GREEDY)
    steps = [line for line in log if line != "forward"]
    assert steps[:4] == ["launch 1", "launch 2", "read 1", "launch 3"]
    assert not leaked(engine)


def test_one_client_does_not_wait_for_the_steps_of_another(folder: Path):
    """Its place is taken from a client that has them all."""
    engine, log = launching(folder, max_num_seqs=2)
    many = [Answer(engine, prompt, GREEDY) for prompt in PROMPTS[:2]]
    while not many[1].tokens():
        engine.step()
    late = Answer(engine, PROMPTS[2], GREEDY)
    late.request.client = Client("other")
    for _ in range(4):
        engine.step()
    assert late.tokens()
    finish(engine)
    assert [a.tokens() for a in (*many, late)] == run(make_engine(folder), PROMPTS[:3], GREEDY)


@pytest.mark.parametrize("how", [{}, {"min_p": 0.1}, {"top_k": 20}, {"top_k": 40, "top_p": 0.7}])
def test_tokens_are_drawn_as_they_are_step_by_step(folder: Path, how: dict[str, float]):
    sampled = SamplingParams(max_tokens=20, temperature=1.2, seed=3, ignore_eos=True, speculation="off", **how)  # type: ignore[arg-type]
    engine, log = launching(folder)
    assert run(engine, PROMPTS, sampled) == run(make_engine(folder), PROMPTS, sampled)
    assert sum(line.startswith("launch") for line in log) == 19


def test_greedy_and_drawn_answers_run_ahead_together(folder: Path):
    wants = [GREEDY, replace(GREEDY, temperature=0.9, seed=5), replace(GREEDY, temperature=1.5, seed=6, top_k=9)]
    found = []
    for engine in (make_engine(folder), launching(folder)[0]):
        answers = [Answer(engine, prompt, params) for prompt, params in zip(PROMPTS, wants, strict=False)]
        finish(engine)
        found.append([answer.tokens() for answer in answers])
    assert found[0] == found[1]


def test_few_pages_stop_the_run_ahead_and_preempt_as_usual(folder: Path):
    options = {"enable_prefix_caching": False, "kv_cache_tokens": 16 * 14}
    plain, (engine, _) = make_engine(folder, **options), launching(folder, **options)  # type: ignore[arg-type]
    assert run(engine, PROMPTS[:5], GREEDY) == run(plain, PROMPTS[:5], GREEDY)
    assert not leaked(engine)


def test_another_forward_on_the_device_in_between(folder: Path):
    """What it chose is on the device then: the next step takes its tokens from the host."""
    engine, _ = launching(folder)
    want = run(make_engine(folder), PROMPTS[:2], GREEDY)
    answers = [Answer(engine, prompt, GREEDY) for prompt in PROMPTS[:2]]
    for step in range(80):
        if step in (5, 6, 20):
            engine.runner.launches += 1  # type: ignore[misc]
            engine.runner.chosen = [0, 0]  # type: ignore[attr-defined]
        if not engine.idle:
            engine.step()
    assert [answer.tokens() for answer in answers] == want


REPEATED = [[5, 9, 23, 40, 77, 12, 30, 61] * 6, [8, 15, 99, 3] * 9]
AUTO = replace(GREEDY, speculation="auto")


def test_drafters_run_beside_a_step_in_flight_and_their_outcomes_are_learnt(folder: Path):
    engine, log = launching(folder)
    speculator = engine.speculator
    speculator.controller.host.idle = lambda sequences: 60.0  # type: ignore[method-assign]
    assert run(engine, REPEATED, AUTO) == run(make_engine(folder), REPEATED, GREEDY)
    assert any(line.startswith("launch") for line in log)
    known = speculator.controller.acceptance.records
    assert any(record.observations for record in known.values())  # though no draft need have been verified
    assert not leaked(engine)


def test_a_draft_that_is_worth_it_keeps_the_next_step_from_being_launched(folder: Path):
    engine, log = launching(folder)
    with all_drafts_verified(engine):
        assert run(engine, REPEATED, AUTO) == run(make_engine(folder), REPEATED, GREEDY)
    assert engine.speculator.totals.drafted > 0 and "forward" in log[2:]
    assert not leaked(engine)


def test_a_step_that_could_not_hide_a_run_has_none_beside_it(folder: Path):
    """Where the host never waits for the device there is no time that would cost nothing."""
    engine, _ = launching(folder)
    controller = engine.speculator.controller
    controller.host.idle = lambda sequences: 0.0  # type: ignore[method-assign]
    assert run(engine, REPEATED, AUTO) == run(make_engine(folder), REPEATED, GREEDY)
    assert not any(record.observations for record in controller.acceptance.records.values())
    whys = {decision.why for decision in controller.decisions}
    assert "no draft is worth the overlap with the host" in whys
