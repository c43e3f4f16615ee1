"""The speculate bench: order and records with a scripted engine, the whole of it with a tiny pair."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from forerun.core import SamplingParams
from forerun.errors import BadRequest
from forerun_research.bench import speculate
from forerun_research.bench.common import Setup
from forerun_research.bench.sides import SideSpec
from forerun_research.bench.speculate_table import table
from forerun_research.bench.speculate_tasks import SpeculateBench
from tests import tiny

PROMPTS = ["Count the ships.", "Read the letters.", "Light the lamp."]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "tasks.jsonl"
    records = [{"prompt": text, "category": "ab"[i % 2]} for i, text in enumerate(PROMPTS)]
    file.write_text("\n".join(map(json.dumps, records)))
    return file


class ScriptedSide:
    """Answers at once: plain decoding takes a second, `auto` a third of one, anything else half of one."""

    opened: list[ScriptedSide] = []
    parts = False  # whether `lookup` gives other tokens

    def __init__(self, spec: SideSpec) -> None:
        self.spec = spec
        self.asked: list[tuple[Any, str]] = []
        self.about = {"weights": "int8", "device": "cpu"}
        self.opened.append(self)

    def __enter__(self) -> ScriptedSide:
        return self

    def __exit__(self, *exc: object) -> None:
        self.asked.append(("closed", ""))

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self, method)(*args)

    def answer(self, ids: list[int], params: SamplingParams | int, assisted: bool = False) -> dict[str, Any]:
        if isinstance(params, int):
            return {"total_s": 1.0 if assisted else 2.0, "token_ids": [1] * 9}
        name = params.speculation.drafter
        self.asked.append((tuple(ids), name))
        decode = {"off": 1.0, "auto": 1 / 3}.get(name, 0.5)
        guessed = name != "off"
        return {
            "token_ids": [7] * (8 if self.parts and name == "lookup" else 9),
            "completion_tokens": 9,
            "copied": 5,  # by edit programs: not what the bench calls so
            "decode_s": decode,
            "total_s": decode + 1,
            "steps": 3 if guessed else 9,
            "drafted": 8 if guessed else 0,
            "accepted": 6 if guessed else 0,
            "drafters": {"lookup": {"drafted": 8, "accepted": 6}} if guessed else {},
            "lengths": [0, 2, 2, 2] if guessed else [0] * 9,
            **{"draft_s": 0.0, "verify_s": decode, "other_s": 0.0, "ttft_s": 1.0},
        }

    def together(self, prompts: list[list[int]], params: SamplingParams) -> dict[str, Any]:
        name = params.speculation.drafter
        self.asked.append((len(prompts), name))
        return {"total_s": 1.0, "tokens_per_s": 9.0 if name == "off" else 12.0, "token_ids": [[1]] * len(prompts)}

    def conversation(self, messages: Any, follow_up: str, params: SamplingParams) -> dict[str, int]:
        return {"prompt_tokens": 100, "cached_tokens": 64}

    def bound(self, survival: list[float], drafter: str | None) -> float:
        assert survival == [1.0, 1.0] and drafter is None
        return 3.2

    def speculation(self) -> dict[str, Any]:
        return {"control": {"round_s": {"model": {}}}}

    def memory(self) -> dict[str, int]:
        return {"rss_bytes": 1}


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch) -> list[ScriptedSide]:
    opened: list[ScriptedSide] = []
    monkeypatch.setattr(ScriptedSide, "opened", opened)
    monkeypatch.setattr(ScriptedSide, "parts", False)
    monkeypatch.setattr(speculate, "SideProcess", ScriptedSide)
    return opened


@pytest.fixture
def setup(tiny_folder: Callable[[str], Path]) -> Setup:
    return Setup(str(tiny_folder("llama")), against="none", runs=2, threads=1)


def test_settings_take_turns_on_every_task(setup: Setup, data: Path, sides: list[ScriptedSide]) -> None:
    speculate.run(setup, SpeculateBench(data=(data,), tokens=9, drafters=("auto", "lookup")))
    asked = [(ids, name) for ids, name in sides[0].asked if ids != "closed"]
    warm, measured = asked[:3], asked[3:]
    assert [name for _, name in warm] == ["off", "auto", "lookup"]
    assert len(measured) == 2 * 3 * 3  # runs, tasks, settings
    orders = [tuple(name for _, name in measured[i : i + 3]) for i in range(0, 18, 3)]
    assert all(len({ids for ids, _ in measured[i : i + 3]}) == 1 for i in range(0, 18, 3))
    assert orders[:3] == [("off", "auto", "lookup"), ("auto", "lookup", "off"), ("lookup", "off", "auto")]
    assert orders[3] == ("auto", "lookup", "off")  # the second run starts elsewhere


def test_figures_goals_and_the_file(setup: Setup, data: Path, sides: list[ScriptedSide], tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    plan = SpeculateBench(data=(data,), tokens=9, drafters=("auto", "lookup"), batches=(1, 4), out=out)
    result = speculate.run(setup, plan)
    a = result["categories"]["a"]
    assert a["copied"] == 0.0
    assert a["tasks"] == 2 and a["auto"]["decode"]["median"] == pytest.approx(3.0, abs=1e-3)
    assert a["auto"]["of_bound"] == pytest.approx(3 / 3.2, abs=1e-3)
    assert {name: goal["pass"] for name, goal in result["goals"].items()} == dict.fromkeys(
        ("never_slower", "of_bound", "of_best", "same_answers", "batch"), True
    )
    assert result["prefix_cache"] == {"hit_rate": {"off": 0.64, "auto": 0.64}, "same": True}
    assert result["batch"]["4"]["ratio"]["median"] == pytest.approx(12 / 9, abs=1e-3)
    assert result["batch"]["4"]["equal"] == 1.0 and sides[0].spec.batch == 4
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(lines) == 18 + 1 and lines[-1]["result"]["goals"] == result["goals"]
    assert {line["setting"] for line in lines[:-1]} == {"off", "auto", "lookup"}


def test_answers_that_part_fail_where_bits_must_agree(
    setup: Setup, data: Path, sides: list[ScriptedSide], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ScriptedSide, "parts", True)
    result = speculate.run(setup, SpeculateBench(data=(data,), tokens=9, drafters=("auto", "lookup")))
    assert result["goals"]["same_answers"]["missed"] == ["a", "b"]
    assert result["categories"]["b"]["lookup"]["parted"] == [{"task": "2", "token": 8}] * 2
    assert result["categories"]["b"]["auto"]["equal"] == 1.0


def test_rules_are_compared_with_the_first(setup: Setup, data: Path, sides: list[ScriptedSide]) -> None:
    rules = ("match", "bounded:0.1")
    plan = SpeculateBench(data=(data,), tokens=9, draft="small", temperature=0.8, rules=rules, drafters=("auto",))
    found = speculate.run(setup, plan)["rules"]["bounded:0.1"]
    assert found == {"accepted_length": 3.0, "against_first": 1.0, "steps": 18, "drafted": 48, "accepted": 36}


def test_the_peer_gets_the_same_pair(setup: Setup, data: Path, sides: list[ScriptedSide]) -> None:
    against = Setup(setup.model, against="transformers", runs=1, threads=1)
    result = speculate.run(against, SpeculateBench(data=(data,), tokens=9, draft="small", drafters=("auto",)))
    assert [side.spec.engine for side in sides] == ["forerun", "transformers"]
    assert all(side.spec.draft == "small" for side in sides)
    peer = result["transformers"]
    assert peer["tokens_per_s"] == {"plain": 4.5, "assisted": 9.0}
    assert peer["ratio"] == pytest.approx(9 / (1 + 1 / 3) / 9, abs=1e-2)
    with pytest.raises(BadRequest, match="greedily"):
        speculate.run(against, SpeculateBench(data=(data,), tokens=9, temperature=0.8))


def test_rules_without_drafts_are_not_compared(
    setup: Setup, data: Path, sides: list[ScriptedSide], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = ScriptedSide.answer
    monkeypatch.setattr(ScriptedSide, "answer", lambda *args: answer(*args) | {"drafted": 0, "accepted": 0})
    plan = SpeculateBench(
        data=(data,), tokens=9, draft="small", temperature=0.8, rules=("match", "block"), drafters=("auto",)
    )
    result = speculate.run(setup, plan)
    assert result["rules"]["block"]["against_first"] is None
    text = io.StringIO()
    Console(file=text, width=200).print(table(result))
    assert "block: 3.000 tokens a pass, nothing drafted" in text.getvalue()
    assert "no draft was accepted in a, b" in text.getvalue()


def test_the_table_shows_every_part(setup: Setup, data: Path, sides: list[ScriptedSide]) -> None:
    plan = SpeculateBench(data=(data,), tokens=9, draft="small", temperature=0.8, rules=("match",), batches=(2,))
    result = speculate.run(setup, plan)
    rates = {"plain": 4.5, "assisted": 9.0}
    result["transformers"] = {"weights": "float32", "tasks": 3, "tokens_per_s": rates, "ratio": 0.75}
    result["goals"]["of_bound"] = {**result["goals"]["of_bound"], "pass": False, "missed": ["a"]}
    text = io.StringIO()
    Console(file=text, width=200).print(table(result))
    shown = text.getvalue()
    for part in (
        "a (2), 0% copied",
        "lookup 100%",
        "94%",
        "FAIL in a",
        "64.0% of second turns",
        "batch 2",
        "match: 3.000",
        "assisted 9.0",
    ):
        assert part in shown, part


def test_where_nothing_can_be_written_or_compared(setup: Setup, data: Path, sides: list[ScriptedSide]) -> None:
    with pytest.raises(BadRequest, match="cannot write"):
        speculate.run(setup, SpeculateBench(data=(data,), tokens=9, out=data.parent / "no" / "where.jsonl"))
    with pytest.raises(BadRequest, match="llama"):
        speculate.run(Setup(setup.model, against="llama.cpp"), SpeculateBench(data=(data,)))
    assert sides == []


def test_a_tiny_pair_answers_as_it_does_alone(setup: Setup, data: Path, tmp_path: Path) -> None:
    draft = tiny.write_folder(tmp_path / "draft", "llama", num_hidden_layers=2)
    plan = SpeculateBench(data=(data,), tokens=12, per_category=1, draft=str(draft), batches=(3,))
    result = speculate.run(Setup(setup.model, "float32", "cpu", "none", 1, 1), plan)
    for figures in result["categories"].values():
        assert all(figures[name]["equal"] == 1.0 for name in result["settings"])
    everything = result["categories"]["all"]
    assert everything["tasks"] == 2 and all(everything[name]["bound"] >= 1.0 for name in result["settings"])
    assert all(everything[name]["accepted_length"] >= 1.0 for name in result["settings"])
    assert "model" in result["forerun"]["speculation"]["control"]["round_s"]
    assert result["batch"]["3"]["equal"] == 1.0 and result["prefix_cache"]["same"]
