"""Drafted steps launched before the last one's tokens are read: the same answers, nothing leaked, the host one behind.

A device is stood in for by one that decides at each launch how many tokens a step gives, computes them one by one with
both models, and hands them out when it is read.
"""

from __future__ import annotations

import json
import random
import shutil
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forerun import LLM, SamplingParams
from forerun.core.drafted import DraftedStart, DraftedTokens, rows_of
from forerun.decode.control.controller import Controller
from forerun.decode.control.cost import CostCurve
from forerun.decode.drafters.parallel import ParallelDrafter
from forerun.engine.engine import Engine
from forerun.models.execution.runner import Runner, Span
from tests.engine.common import Answer, finish, leaked, run
from tests.engine.test_run_ahead import Launching

MASK, DEPTH = 500, 12
PROMPTS = [[3 + i, 40, 77 + i, 5, 9 * i + 4] * (1 + i % 4) for i in range(7)]
GREEDY = SamplingParams(max_tokens=60, ignore_eos=True, speculation="parallel")


class Device:
    """Steps on a CPU. `most`: tokens of a step, at random up to so many."""

    def __init__(self, target: Runner, draft: Runner, most: int = DEPTH) -> None:
        self.target, self.draft, self.most, self.draw = target, draft, most, random.Random(4)
        self.log: list[str] = []
        self.count = 0

    def prepare(self) -> None:
        pass

    def begin(self, starts: Sequence[DraftedStart], depth: int, nodes: int) -> None:
        assert nodes >= 1 and 1 <= depth <= DEPTH
        self.rows = rows_of(len(starts))
        assert all(1 <= len(start.unread) < self.rows for start in starts)
        self.lengths, self.pages = [start.length for start in starts], [start.pages for start in starts]
        self.unread = [list(start.unread) for start in starts]
        self.log.append(f"begin {len(starts)}")

    def send_pages(self, pages: Sequence[Sequence[int]]) -> None:
        self.pages = list(pages)
        self.log.append("pages")

    def launch(self) -> Pending:
        self.count += 1
        self.log.append(f"launch {self.count}")
        return Pending(self, self.count, [self._step(s) for s in range(len(self.lengths))])

    def _step(self, s: int) -> DraftedTokens:
        pages, length, unread = array("i", self.pages[s]), self.lengths[s], self.unread[s]
        assert length + self.rows <= len(pages) * self.target.pool.page_size
        Runner.forward(self.draft, [Span(unread, length - len(unread), pages, ())])
        tokens, count = unread[-1:], self.draw.randrange(1, 1 + min(self.most, self.rows - 1))
        for entry in range(length - 1, length - 1 + count):
            logits = Runner.forward(self.target, [Span([tokens[-1]], entry, pages, (0,))]).logits
            tokens.append(int(logits.argmax()))
        self.lengths[s], self.unread[s] = length + count, tokens[1:]
        return DraftedTokens(tokens[1:], self.rows - 1, DEPTH)


class Pending:
    def __init__(self, device: Device, number: int, results: list[DraftedTokens]) -> None:
        self.device, self.number, self.results = device, number, results

    def read(self) -> list[DraftedTokens]:
        self.device.log.append(f"read {self.number}")
        return self.results


@pytest.fixture(scope="module")
def folders(tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    target, draft = tiny_folder("qwen2"), tmp_path_factory.mktemp("pard") / "drafter"
    shutil.copytree(target, draft)
    config = json.loads((draft / "config.json").read_text())
    config |= {"pard_token": MASK, "spd_type": "pard", "num_speculative_tokens": DEPTH}
    (draft / "config.json").write_text(json.dumps(config))
    return target, draft


def make(folders: tuple[Path, Path], **options: Any) -> Engine:
    values = {"kv_cache_tokens": 4096, "max_model_len": 512} | options
    return LLM(folders[0], draft_model=folders[1], dtype="float32", **values).engine


def on_device(folders: tuple[Path, Path], most: int = DEPTH, **options: Any) -> tuple[Engine, Device]:
    """An engine whose draft model is cheap and known to be right, with such a device."""
    engine = make(folders, **options)
    ctx = engine.speculator.ctx
    engine.runner.__class__ = Launching
    engine.runner.log, engine.runner.chosen, engine.runner.launches = [], [], 0  # type: ignore[attr-defined,misc]
    controller = engine.speculator.controller
    controller.target = CostCurve({1: 1e-3, 32: 1.1e-3})
    engine.speculator.check(GREEDY)
    engine.prepare(GREEDY)
    controller.drafters["parallel"] = curve = CostCurve({1: 1e-4, 32: 1e-4})
    curve.tokens_per_round = DEPTH
    controller.host.observe_on_device = lambda *_: None  # type: ignore[method-assign]  # what stands in is slow
    controller.acceptance.records["parallel"].add_measured({"text": [[90.0, 100.0]] * 8})
    assert ctx.draft_runner is not None
    device = Device(engine.runner, ctx.draft_runner, most)
    drafter = engine.speculator.drafter_pool["parallel"]
    assert isinstance(drafter, ParallelDrafter)
    drafter.steps = device  # type: ignore[assignment]
    return engine, device


@pytest.mark.parametrize("sequences", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("speculation", ["parallel", "auto"])
def test_answers_are_plain_ones(folders, sequences, speculation):
    params = replace(GREEDY, speculation=speculation)
    engine, device = on_device(folders)
    plain = run(make(folders), PROMPTS[:sequences], replace(GREEDY, speculation="off"))
    assert run(engine, PROMPTS[:sequences], params) == plain
    assert run(engine, PROMPTS[:sequences], params) == plain  # again, from the prefix tree
    assert not leaked(engine)
    if sequences <= 4 and speculation == "parallel":
        assert device.count > 4


def test_the_next_step_is_launched_before_a_step_is_read(folders):
    engine, device = on_device(folders, most=3)
    answer = Answer(engine, PROMPTS[1], GREEDY)
    finish(engine)
    steps = [line for line in device.log if line != "pages"]
    assert steps[:5] == ["begin 1", "launch 1", "launch 2", "read 1", "launch 3"]
    assert steps.count("begin 1") == 1  # it went on to the end
    usage = answer.last.usage
    assert usage.accepted == sum(usage.lengths) and usage.drafters["parallel"].accepted == usage.accepted
    assert usage.completion_tokens == 60 and usage.steps < 45
    assert "pages" in device.log


def test_an_answer_may_end_anywhere_in_a_step(folders):
    plain = make(folders)
    whole = run(plain, PROMPTS[:1], replace(GREEDY, speculation="off"))[0]
    for end in (7, 20, 33):
        stop = replace(GREEDY, stop_token_ids=(whole[end],))
        for most in (4, DEPTH):
            engine, _ = on_device(folders, most=most)
            expected = run(plain, PROMPTS[:1], replace(stop, speculation="off"))
            assert run(engine, PROMPTS[:1], stop) == expected
            assert run(engine, PROMPTS[:3], GREEDY) == run(plain, PROMPTS[:3], replace(GREEDY, speculation="off"))
            assert not leaked(engine)


@pytest.mark.parametrize("tokens", [1, 2, 9, 17, 18, 40])
def test_limits_hold(folders, tokens):
    engine, _ = on_device(folders)
    params = replace(GREEDY, max_tokens=tokens)
    answers = run(engine, PROMPTS[:2], params)
    assert answers == run(make(folders), PROMPTS[:2], replace(params, speculation="off"))
    assert [len(answer) for answer in answers] == [tokens, tokens]


def test_a_full_context_and_a_full_pool_end_answers_as_plain_decoding_does(folders):
    for options in ({"max_model_len": 64}, {"kv_cache_tokens": 128, "max_model_len": 120}):
        engine, _ = on_device(folders, **options)
        params = replace(GREEDY, max_tokens=100)
        plain = run(make(folders, **options), PROMPTS[:2], replace(params, speculation="off"))
        assert run(engine, PROMPTS[:2], params) == plain
        assert not leaked(engine)


def test_requests_that_come_in_between_and_cancellations(folders):
    engine, device = on_device(folders, most=3)
    plain = make(folders)
    expected = run(plain, PROMPTS[:3], replace(GREEDY, speculation="off"))
    first = Answer(engine, PROMPTS[0], GREEDY)
    while len(first.tokens()) < 20:
        engine.step()
    second, third = (Answer(engine, prompt, GREEDY) for prompt in PROMPTS[1:3])
    while len(third.tokens()) < 10:
        engine.step()
    engine.cancel(third.request.id)
    finish(engine)
    assert [first.tokens(), second.tokens()] == expected[:2]
    assert third.tokens() == expected[2][: len(third.tokens())] and third.last.finish_reason == "cancelled"
    assert "begin 3" in device.log and not leaked(engine)


def test_what_needs_the_host_is_not_drafted_so(folders):
    engine, device = on_device(folders)
    for how in ({"temperature": 0.8, "seed": 1}, {"frequency_penalty": 0.5}, {"logprobs": 2}):
        run(engine, PROMPTS[:1], replace(GREEDY, max_tokens=12, **how))
    for drafters in ("parallel+model", "lookup", "off"):  # two that run the draft model, none
        run(engine, PROMPTS[:1], replace(GREEDY, max_tokens=12, speculation=drafters))
    assert not device.count


def test_a_drafter_that_is_never_right_is_left(folders):
    engine, device = on_device(folders, most=1)
    plain = make(folders)
    params = SamplingParams(max_tokens=300, ignore_eos=True)
    assert run(engine, PROMPTS[:1], params) == run(plain, PROMPTS[:1], replace(params, speculation="off"))
    assert device.count < 150
    assert isinstance(engine.speculator.controller, Controller)


def test_a_drafter_that_fails_while_it_reads_is_left_out(folders, monkeypatch):
    engine, device = on_device(folders)
    monkeypatch.setattr(ParallelDrafter, "read_up", lambda *_: 1 / 0)
    assert run(engine, PROMPTS[:1], GREEDY) == run(make(folders), PROMPTS[:1], replace(GREEDY, speculation="off"))
    assert not device.count and not leaked(engine)
