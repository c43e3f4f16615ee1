"""Requests that want no cache: they read nothing that others left, leave nothing, and answer the same. Timelines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from forerun.checks.lossless.forced_drafting import all_drafts_verified
from forerun.core import Prefill, SamplingParams
from forerun.engine.engine import Engine
from forerun.errors import BadRequest
from tests.engine.common import Answer, finish, leaked, make_engine

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
COLD = replace(PARAMS, cache=False)
PROMPT = [7 + i % 90 for i in range(100)]


@pytest.fixture
def engine(tiny_folder: Callable[[str], Path]) -> Engine:
    return make_engine(tiny_folder("qwen2"))


def ask(engine: Engine, params: SamplingParams) -> Answer:
    answer = Answer(engine, PROMPT, params)
    finish(engine)
    return answer


def test_a_cold_request_reads_nothing_and_leaves_nothing(engine: Engine):
    first = ask(engine, COLD)
    assert engine.tree.num_pages == 0 and first.last.usage.written == 0
    warm = ask(engine, PARAMS)
    pages, reads = engine.tree.num_pages, [node.reads for node in engine.tree.root.children.values()]
    cold = ask(engine, COLD)
    assert cold.last.usage.cached_tokens == 0 and cold.last.usage.served["computed"] == len(PROMPT)
    assert engine.tree.num_pages == pages
    assert [node.reads for node in engine.tree.root.children.values()] == reads
    assert first.tokens() == warm.tokens() == cold.tokens()
    assert ask(engine, PARAMS).last.usage.cached_tokens > 80  # others go on as ever
    assert leaked(engine) == 0


def test_cold_requests_side_by_side_do_not_wait_for_each_other(engine: Engine):
    both = [Answer(engine, PROMPT, COLD) for _ in range(2)]
    warm = Answer(engine, PROMPT, PARAMS)  # nor does one that could read them, if they left anything
    engine.step()
    assert len(engine.scheduler.running) >= 1
    finish(engine)
    assert {answer.last.usage.cached_tokens for answer in (*both, warm)} == {0}
    assert both[0].tokens() == both[1].tokens() == warm.tokens()


def test_guesses_from_other_answers_are_left_out(engine: Engine):
    asked = replace(PARAMS, speculation="suffix")
    with all_drafts_verified(engine):
        for _ in range(3):
            ask(engine, asked)
        warm, cold = ask(engine, asked).last.usage, ask(engine, replace(asked, cache=False)).last.usage
    assert warm.drafted > 0 and cold.drafted == 0


def test_what_cannot_be_both_is_refused():
    with pytest.raises(BadRequest, match="chunk"):
        SamplingParams(cache=False, prefill=Prefill("speculative", source="chunk"))
    for name in ("cache", "timeline"):
        with pytest.raises(BadRequest, match=f"{name} must be true or false"):
            SamplingParams(**{name: 1})  # type: ignore[arg-type]


@pytest.mark.parametrize("speculate", ["off", "lookup"])
def test_a_timeline_tells_of_every_step(engine: Engine, speculate: str):
    usage = ask(engine, replace(PARAMS, timeline=True, speculation=speculate, max_tokens=40)).last.usage
    times = [at for at, *_ in usage.timeline]
    assert len(usage.timeline) == usage.steps and times == sorted(times) and times[0] >= usage.ttft_s > 0
    assert sum(tokens for _, tokens, *_ in usage.timeline) == 40
    assert sum(drafted for _, _, drafted, *_ in usage.timeline) == usage.drafted
    assert sum(step[3] for step in usage.timeline) == pytest.approx(usage.draft_s)
    assert sum(step[4] for step in usage.timeline) == pytest.approx(usage.verify_s)
    assert ask(engine, PARAMS).last.usage.timeline == []
