"""Random requests of all modes come, go and are cancelled on a small pool: exact answers are exact, nothing is left."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from forerun.core import Prefill
from tests.engine.common import Answer, finish, leaked, make_engine, run
from tests.engine.fake_prefiller import fake
from tests.engine.test_speculative_prefill import EXACT, assert_clean, prompt

MODES = ("exact", "speculative", "provisional")


@pytest.mark.parametrize("seed", range(4))
def test_anything_may_happen(seed: int, tiny_folder: Callable[[str], Path]):
    draw = random.Random(seed)
    limits: dict[str, Any] = {"kv_cache_tokens": draw.choice([400, 640, 1600]), "max_num_seqs": draw.choice([2, 5, 16])}
    engine = make_engine(
        tiny_folder("qwen2"), prefiller=fake(bad=draw.choice([0.3, 3.0]), exact_from=draw.choice([None, 100])), **limits
    )
    reference = make_engine(tiny_folder("qwen2"), enable_prefix_caching=False)

    @cache
    def truth(text: tuple[int, ...], seed: int) -> list[int]:
        return run(reference, [list(text)], replace(EXACT, temperature=0.7, seed=seed))[0]

    answers: list[tuple[Answer, str]] = []
    for _ in range(60):
        if draw.random() < 0.3 and len(engine.scheduler.sequences) < 12:
            text = [*prompt(draw.randrange(3), 64), *prompt(draw.randrange(3, 8), draw.randrange(1, 160))]
            mode, source = draw.choice(MODES), draw.choice(["auto", "other"])
            prefill = Prefill() if mode == "exact" else Prefill(mode, source=source)
            params = replace(EXACT, temperature=0.7, seed=draw.randrange(3), prefill=prefill, n=draw.choice([1, 1, 3]))
            answers.append((Answer(engine, text, params), mode))
        if answers and draw.random() < 0.05:
            engine.cancel(draw.choice(answers)[0].request.id)
        for _ in range(draw.randrange(6)):
            engine.step()
        for _ in range(draw.randrange(3)):
            engine.upgrade_step()
    finish(engine)
    assert len(answers) > 8
    for answer, mode in answers:
        ends = [event for event in answer.events if event.finish_reason]
        params = answer.request.params
        assert len(ends) == params.n
        for end in ends:
            given = [e for e in answer.events if e.index == end.index and not e.provisional]
            if mode != "speculative" and end.finish_reason == "length":
                assert params.seed is not None
                expected = truth(tuple(answer.request.prompt_ids), params.seed + end.index)
                assert [t for e in given for t in e.token_ids] == expected
    assert leaked(engine) == 0
    while engine.upgrade_step():
        pass
    assert len(engine.upgrades) == 0 and leaked(engine) == 0
    assert_clean(engine)
