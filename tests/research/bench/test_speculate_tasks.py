"""What a speculate bench asks: settings, rules, prompts for batches, and plans that cannot be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forerun.errors import BadRequest
from forerun_research.bench.common import Setup
from forerun_research.bench.speculate_tasks import SpeculateBench, parse_rule, prepare


def test_settings_are_those_that_can_do_something() -> None:
    assert SpeculateBench().settings == ("auto", "lookup", "suffix", "copy")
    assert SpeculateBench(draft="d").settings == ("auto", "model", "lookup", "suffix", "copy")
    assert SpeculateBench(draft="d", drafters=("auto",)).settings == ("auto",)


def test_rules_are_names_with_bounds() -> None:
    rule = parse_rule("bounded:0.25")
    assert (rule.drafter, rule.verify, rule.bound) == ("model", "bounded", 0.25)
    assert parse_rule("match").bound == 0.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"drafters": ("auto", "off")},
        {"drafters": ("auto", "auto")},
        {"rules": ("match",), "draft": "d"},
        {"rules": ("match",), "temperature": 0.8},
        {"rules": ("bounded:much",), "temperature": 0.8, "draft": "d"},
        {"batches": (4, 0)},
        {"tokens": 0},
        {"temperature": -1.0},
    ],
    ids=str,
)
def test_plans_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as caught:
        SpeculateBench(**wrong)
    assert caught.value.hint


def test_prompts_are_the_models_own_tokens(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    lines = [
        {"prompt": "fog", "category": "a"},
        {"prompt": "ships", "category": "a"},
        {"prompt": "oil " * 9, "kind": "b"},
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    setup = Setup(str(tiny_folder("llama")))
    work = prepare(setup, SpeculateBench(data=(file,), per_category=1, tokens=8, batches=(1, 7)))
    assert [a.task.turns[0].strip()[:3] for a in work.asked] == ["fog", "oil"]
    assert [a.number for a in work.asked] == [0, 1] and work.mixed == work.asked
    assert len({tuple(ids) for ids in work.crowd}) == 7  # three prompts: the others are numbered
    assert work.context >= max(len(a.ids) for a in work.asked) + 16
    assert prepare(setup, SpeculateBench(data=(file,))).crowd == []
    with pytest.raises(BadRequest, match="holds 2048"):
        prepare(setup, SpeculateBench(data=(file,), tokens=2044))
    file.write_text(json.dumps({"prompt": "fog " * 4000}))
    with pytest.raises(BadRequest, match="task 1"):
        prepare(setup, SpeculateBench(data=(file,)))
