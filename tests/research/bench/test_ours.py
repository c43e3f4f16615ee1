"""Forerun as a side: answers of the speculate bench start from nothing, whatever was answered before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forerun.checks.lossless.forced_drafting import all_drafts_verified
from forerun.core import SamplingParams
from forerun.decode.control.controller import Controller
from forerun.decode.control.cost import CostCurve
from forerun_research.bench.ours import ForerunSide, max_speedup
from forerun_research.bench.sides import SideSpec

IDS = list(range(20, 60))


@pytest.fixture(scope="module")
def side(tiny_folder: Callable[[str], Path]) -> Iterator[ForerunSide]:
    model = str(tiny_folder("llama"))
    side = ForerunSide(SideSpec("forerun", model, "float32", "cpu", context=512, batch=2, draft=model))
    yield side
    side.llm.close()


def test_an_answer_knows_nothing_of_the_one_before(side: ForerunSide) -> None:
    """At temperature 1 a random model says nothing twice: only a memory of the whole answer could guess it."""
    params = SamplingParams(max_tokens=100, temperature=1.0, seed=5, ignore_eos=True, speculation="suffix")
    first = side.answer(IDS, params)
    again = [side.answer(IDS, params) for _ in range(2)]
    assert all(sample["token_ids"] == first["token_ids"] for sample in again)
    assert all(sample["accepted"] <= 20 and sample["cached_tokens"] == 0 for sample in again)
    side.together([IDS, IDS[:20]], params)
    assert side.answer(IDS, params)["accepted"] <= 20


def test_samples_say_what_became_of_drafts(side: ForerunSide) -> None:
    plain = side.answer(IDS, SamplingParams(max_tokens=30, ignore_eos=True, speculation="off"))
    drafted = side.answer(IDS, SamplingParams(max_tokens=30, ignore_eos=True, speculation="model"))
    assert drafted["token_ids"] == plain["token_ids"] and plain["drafted"] == 0
    assert drafted["accepted"] == sum(drafted["lengths"]) == drafted["drafters"].get("model", {}).get("accepted", 0)
    assert drafted["steps"] + drafted["accepted"] >= 30 and plain["steps"] == 30
    assert drafted["decode_s"] == pytest.approx(drafted["total_s"] - drafted["ttft_s"])


def test_what_is_measured_against_other_engines_is_plain_decoding(side: ForerunSide) -> None:
    with all_drafts_verified(side.llm.engine):
        drafted = side.answer(IDS, SamplingParams(max_tokens=8, ignore_eos=True, speculation="model"))["drafted"]
        before = side.speculation()["drafters"]
        side.decode(IDS, 8)
        side.batch([IDS, IDS[:20]], 8)
    assert drafted > 0 and side.speculation()["drafters"] == before


def test_the_second_turn_reuses_the_first(side: ForerunSide) -> None:
    messages = [{"role": "user", "content": "Count the ships that pass and write each name in a long grey book."}]
    found = [
        side.conversation(messages, "Again.", SamplingParams(max_tokens=8, speculation=name))
        for name in ("off", "auto")
    ]
    assert found[0] == found[1] and found[0]["cached_tokens"] >= 16


def test_bounds_and_figures_come_from_the_engine(side: ForerunSide) -> None:
    assert side.bound([], None) == 1.0
    assert side.bound([1.0] * 4, None) >= side.bound([1.0] * 4, "model") >= 1.0
    assert side.speculation()["drafters"]


def test_the_bound_is_that_of_the_best_depth():
    target = CostCurve({1: 0.051, 2: 0.053, 4: 0.060, 8: 0.079, 16: 0.121, 32: 0.200})
    c = Controller(target, {"paid": CostCurve({1: 0.019, 8: 0.03, 32: 0.07})})
    survival = [0.9, 0.8, 0.1]
    by_depth = [1.9 * 51 / (53 + 19), 2.7 * 51 / (56.5 + 38), 2.8 * 51 / (60 + 57)]
    assert max_speedup(c, survival, "paid") == pytest.approx(max(by_depth))
    assert max_speedup(c, [0.9, 0.8], None) == pytest.approx(2.7 * 51 / 56.5)
    assert max_speedup(c, [0.01], "paid") == 1.0
