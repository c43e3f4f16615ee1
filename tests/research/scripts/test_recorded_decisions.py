"""Recorded answers on a simulated clock: each drafter gives the same tokens, in the time that the costs say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forerun.core import ROOT
from forerun_research.bench.recorded_engine import CORES, H200, RecordedAnswer, RecordedEngine, seconds_by_drafter
from forerun_research.scripts.recorded_decisions import DRAFTERS, read, table

OUTCOMES = {"text": [[90.0, 100.0]] * 8}
MACHINES = {"cores": CORES, "h200": H200}


def recorded(right: bool, tokens: int = 100, category: str = "made") -> RecordedAnswer:
    """An answer of which the draft model has everything right, or nothing."""
    answer, drafts = list(range(1000, 1000 + tokens)), {}
    for at in range(1, tokens):
        path = [token if right else -token for token in answer[at : at + 12]]
        tree = path, [ROOT, *range(len(path) - 1)], [0.9] * len(path)
        drafts[at] = {"plain": tree, "markov": tree}
    return RecordedAnswer(category, list(range(60)), answer, drafts, tokens)


@pytest.mark.parametrize("machine", MACHINES)
def test_a_drafter_that_is_right_saves_steps_and_one_that_is_wrong_costs_few(machine: str) -> None:
    for right in (True, False):
        engine = RecordedEngine(MACHINES[machine], OUTCOMES)
        seconds = seconds_by_drafter(engine, [recorded(right)] * 3, DRAFTERS)["made"]
        ratio = seconds["off"] / seconds["auto"]
        assert ratio > 2.0 if right else 0.9 < ratio <= 1.0
        assert all(seq.num_sampled == 100 for seq in engine.answer([recorded(right)], "auto"))


@pytest.mark.parametrize("machine", MACHINES)
def test_plain_decoding_takes_a_forward_for_each_token(machine: str) -> None:
    costs = MACHINES[machine]
    (seq,) = RecordedEngine(costs, OUTCOMES).answer([recorded(True)], "off")
    host_s = 0.0 if costs.step_s else costs.host_s  # a device that runs ahead hides it
    assert seq.seconds == pytest.approx(99 * (costs.target[1] + host_s), rel=0.01)
    assert [new for *_, new in seq.log] == [1] * 99


def test_steps_on_the_device_follow_each_other() -> None:
    engine = RecordedEngine(H200, OUTCOMES)
    (seq,) = engine.answer([recorded(True)], "parallel")
    drafted = [seconds for _, seconds, why, _ in seq.log if why == "device"]
    assert len(drafted) >= 6
    gaps = [after - before for before, after in zip(drafted[:-1], drafted[1:], strict=True)]
    assert min(gaps) == pytest.approx(H200.step_s, rel=0.05)


def test_answers_of_a_batch_all_come_to_their_end() -> None:
    found = RecordedEngine(H200, OUTCOMES).answer([recorded(True, 40), recorded(False, 60), recorded(True, 90)], "auto")
    assert [seq.num_sampled for seq in found] == [40, 60, 90]


def test_files_are_read_and_shown(tmp_path: Path) -> None:
    made = recorded(True, 20)
    body = {"category": "made", "prompt": made.prompt, "answer": made.answer, "drafts": made.drafts}
    for number in (0, 3):
        (tmp_path / f"made_{number}.json").write_text(json.dumps(body))
    (found,) = read(tmp_path, [0, 1], most=16)
    assert found.answer == made.answer[:16] and found.tree(3, "plain", 5, 4).tokens == made.answer[3:7]
    lines = table({"made": {"off": 2.0, "auto": 1.0, "lookup": 1.5, "parallel": 0.9}})
    assert "auto 2.00" in lines[0] and "auto of the best 0.90" in lines[0] and lines[1].startswith("all")
