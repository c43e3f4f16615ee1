"""Cost curves on disk: timed once, corrected by what steps observe, and never trusted for long."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from math import log
from pathlib import Path

import pytest

from forerun import LLM, SamplingParams, loading
from forerun.core import Draft
from forerun.decode.control import cost_cache
from forerun.decode.control.acceptance import ELSEWHERE
from forerun.decode.control.controller import Controller
from forerun.decode.control.cost import CostCurve
from forerun.decode.control.cost_cache import MIN_OBSERVATIONS, CostCache
from forerun.models import build
from forerun.models.execution.runner import Runner

POINTS = {1: 0.010, 4: 0.012, 16: 0.020, 64: 0.050}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORERUN_HOME", str(tmp_path))
    return tmp_path


def controller() -> Controller:
    target = CostCurve(POINTS, 1e-6, 1e-8, base_context=32)
    target.per_branch = 1e-4
    return Controller(target, {"model": CostCurve({1: 0.002}), "of a user": CostCurve({1: 1.0})})


def cache(*depends_on: str) -> CostCache:
    return CostCache(["a model", *depends_on], [Path(__file__)])


def observe(found: Controller, factor: float, steps: int = MIN_OBSERVATIONS) -> None:
    for _ in range(steps):
        found.target.observe(4, 1, 0, factor * 0.012)


def test_curves_come_back_as_they_were() -> None:
    assert cache().load() is None
    written = controller()
    cache().store(written)
    found = cache().load()
    assert found is not None
    for tokens, context in [(1, 0), (3, 100), (64, 0), (500, 2000)]:
        assert found.target.seconds(tokens, 1, context) == pytest.approx(written.target.seconds(tokens, 1, context))
    assert found.target.per_branch == written.target.per_branch
    assert set(found.drafters) == {"model"}  # a user's own may have changed: it is timed again


def test_other_models_and_machines_have_other_curves() -> None:
    cache("2 threads").store(controller())
    assert cache("1 threads").load() is None and cache("2 threads").load() is not None


def test_old_curves_are_timed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cache().store(controller())
    now = cost_cache.time.time()
    monkeypatch.setattr(cost_cache.time, "time", lambda: now + cost_cache.MAX_AGE_S + 1)
    assert cache().load() is None
    monkeypatch.setattr(cost_cache.time, "time", lambda: now - 3600)  # a clock that was set back
    assert cache().load() is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"costs": {}, "checksum": 0}', "null"])
def test_what_was_not_written_so_is_not_read(text: str) -> None:
    cache().store(controller())
    cache().path.write_text(text)
    assert cache().load() is None


def test_a_changed_number_is_noticed() -> None:
    cache().store(controller())
    body = json.loads(cache().path.read_text())
    body["costs"]["target"]["points"]["1"] *= 2
    cache().path.write_text(json.dumps(body))
    assert cache().load() is None


def test_what_steps_taught_is_kept_and_the_age_with_it() -> None:
    kept = cache()
    kept.store(controller())
    timed_at = json.loads(kept.path.read_text())["costs"]["timed_at"]
    kept = cache()
    found = kept.load()
    assert found is not None
    observe(found, 1.2)
    kept.close(found)
    again = cache().load()
    assert again is not None
    assert again.target.seconds(4) == pytest.approx(0.012 * 1.2, rel=0.05)
    assert json.loads(kept.path.read_text())["costs"]["timed_at"] == timed_at


@pytest.mark.parametrize("factor", [0.3, 3.0])
def test_curves_from_a_busy_moment_do_not_stay(factor: float) -> None:
    kept = cache()
    kept.store(controller())
    found = kept.load()
    assert found is not None
    observe(found, factor, 3)
    kept.close(found)
    assert kept.load() is not None  # too few steps to tell
    observe(found, factor)
    kept.close(found)
    assert kept.load() is None


def test_a_folder_that_cannot_be_written_changes_nothing(home: Path) -> None:
    (home / "costs").write_text("a file where the folder should be")
    cache().store(controller())
    assert cache().load() is None


def test_curves_of_models_that_are_gone_are_removed(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"x")
    gone = CostCache(["gone"], [model])
    gone.store(controller())
    cache().store(controller())
    os.unlink(model)
    cost_cache.remove_orphans()
    assert gone.load() is None and cache().load() is not None


# -- acceptance --------------------------------------------------------------------------------------------------------


def taught() -> Controller:
    found = controller()
    stats = found.new_request("code")
    for _ in range(40):
        found.record_draft(stats, Draft.chain([1, 2], [0.9, 0.9], "model"), [1, 2, 3])
        found.record_draft(stats, Draft.chain([1], [0.9], "of a user"), [1])
        found.record_run(stats, "lookup", 3, 50e-6)
    stats.tokens = 30
    found.record_end(stats)
    return found


def test_what_was_accepted_is_known_at_the_next_start_of_any_machine() -> None:
    here = CostCache(["weights", "int8", "2 threads"], [Path(__file__)], accepts_by=2)
    here.store_learnt(taught())
    there = CostCache(["weights", "int8", "8 threads"], [Path(__file__)], timed=False, accepts_by=2)
    found = controller()
    assert not found.acceptance.records
    there.load_learnt(found)
    assert set(found.acceptance.records) == {"model", "lookup"}  # a user's own drafter may have changed
    for name in ("model", "lookup"):
        assert found.acceptance.records[name].record() == taught().acceptance.records[name].record()
    assert found.acceptance.lengths == {"code": [1.0, log(30.0), log(30.0) ** 2]}
    assert found.acceptance.records["model"].has_paid("code")
    there.store(found)
    assert there.load() is None  # its curves are timed at every start
    other = controller()
    CostCache(["weights", "file"], [Path(__file__)], accepts_by=2).load_learnt(other)
    assert not other.acceptance.records


def test_what_servers_of_a_model_gave_is_kept_without_their_times() -> None:
    found = taught()
    name = ELSEWHERE + "small"
    found.acceptance.records[name] = found.acceptance.records["remote:host:1"] = found.acceptance.records["model"]
    found.acceptance.records[name].read_s = 0.004
    assert name not in found.acceptance.stats()
    cache().store_learnt(found)
    other = controller()
    cache().load_learnt(other)
    assert set(other.acceptance.records) == {"model", "lookup", name}  # no addresses
    assert other.acceptance.records[name].kinds == found.acceptance.records["model"].kinds
    assert (other.acceptance.records[name].run_s, other.acceptance.records[name].read_s) == (0.0, 0.0)


@pytest.mark.parametrize("damage", ["version", "key", "drafters", "text"])
def test_records_of_another_version_or_damaged_ones_are_not_read(damage: str) -> None:
    cache().store_learnt(taught())
    body = json.loads(cache().learnt_path.read_text())
    if damage == "drafters":
        body["learnt"]["drafters"]["model"]["first"][3] = [5.0, 1e12]
    elif damage != "text":
        body["learnt"][damage] = "other"
    if damage in ("version", "key"):
        body["checksum"] = cost_cache._checksum(body["learnt"])
    cache().learnt_path.write_text("{" if damage == "text" else json.dumps(body))
    found = controller()
    cache().load_learnt(found)
    assert not found.acceptance.records


def test_a_process_in_which_nothing_was_drafted_writes_nothing() -> None:
    cache().store_learnt(controller())
    assert not cache().learnt_path.exists()


# -- with a model ------------------------------------------------------------------------------------------------------


def test_a_second_start_times_nothing(tiny_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "MIN_KEPT_BYTES", 0)
    monkeypatch.setattr(loading, "MIN_KEPT_BYTES", 0)
    path, params = tiny_gguf("llama", "Q8_0"), SamplingParams(max_tokens=12, ignore_eos=True)
    timed: list[int] = []
    time_forward = Runner.time_forward

    def counted(self: Runner, tokens: int, *rest: int, **named: int) -> float:
        timed.append(tokens)
        return time_forward(self, tokens, *rest, **named)

    monkeypatch.setattr(Runner, "time_forward", counted)
    with LLM(path, draft_model=path, quantization="int8", quiet=True) as llm:
        first = llm.generate([5, 6, 7], params)[0].token_ids
        assert timed and not llm.load_report.costs_read and not llm.load_report.packed_read
    timed.clear()
    with LLM(path, draft_model=path, quantization="int8", quiet=True) as llm:
        assert llm.generate([5, 6, 7], params)[0].token_ids == first
        assert llm.load_report.costs_read and llm.load_report.packed_read and llm.load_report.packed_bytes > 0
        assert set(llm.engine.speculator.controller.drafters) == {"model"}
    assert timed == []
    with LLM(path, draft_model=path, quantization="int8", quiet=True, threads=3) as llm:
        assert not llm.load_report.costs_read and timed  # other threads, other costs
