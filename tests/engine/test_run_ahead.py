"""Steps launched before the last one's tokens are read: the same answers, nothing leaked, and the host one step behind.

A device is stood in for by launches that compute at once, in order, and are read later.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from forerun.core import SamplingParams
from forerun.engine.engine import Engine
from forerun.models.execution.runner import Runner, Span
from tests.engine.common import Answer, leaked, make_engine, run

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

    def launch(self, tokens: np.ndarray, entries: np.ndarray, pages: list[np.ndarray]) -> Pending:  # type: ignore[override]
        known = [int(t) if t >= 0 else self.chosen[-1 - int(t)] for t in tokens]
        spans = [
            Span([t], int(e), array("i", own.tolist()), (0,)) for t, e, own in zip(known, entries, pages, strict=True)
        ]
        self.chosen = Runner.forward(self, spans).logits.argmax(-1).tolist()
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
    sampled = SamplingParams(max_tokens=9, temperature=0.8, seed=3, ignore_eos=True)  # needs the host in every step
    before = len(log)
    assert run(engine, PROMPTS[:3], sampled) == run(plain, PROMPTS[:3], sampled)
    assert all(line == "forward" for line in log[before:])
    assert not leaked(engine)


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
