"""Tasks of `forerun bench edit`, oracle programs through the grammar, and what is made of results."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from forerun import LLM
from forerun_research.bench import edit as bench
from forerun_research.bench.edit_tasks import EditTask, changed_hunks, humaneval_tasks, release_tasks

ENTRY = {
    "task_id": "Python/0",
    "prompt": "def double(x):\n",
    "canonical_solution": "    return 2 * x\n",
    "buggy_solution": "    return 3 * x\n",
    "entry_point": "double",
    "test": "assert double(2) == 4",
}


def test_tasks_of_humanevalpack(tmp_path: Path):
    (tmp_path / "pack.jsonl").write_text(json.dumps(ENTRY) + "\n")
    write, fix = humaneval_tasks(tmp_path / "pack.jsonl")
    assert (write.category, fix.category) == ("generation", "edit")
    assert fix.old.endswith("3 * x\n") and fix.new == write.new and "double" in fix.instruction


def test_tasks_of_two_releases(tmp_path: Path):
    lines = [f"value_{i} = {i}" for i in range(400)]
    changed = [*lines[:200], "value_200 = 'new'", *lines[201:]]
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "a.py").write_text("\n".join(lines) + "\n")
    (tmp_path / "old" / "same.py").write_text("x = 1\n")
    with zipfile.ZipFile(tmp_path / "new.whl", "w") as wheel:
        wheel.writestr("a.py", "\n".join(changed) + "\n")
        wheel.writestr("same.py", "x = 1\n")
    tasks = release_tasks(tmp_path / "old", tmp_path / "new.whl", lambda text: 5_000)
    assert [task.name for task in tasks] == ["new:a.py"]
    assert "value_199 = 199\nvalue_200 = 'new'\nvalue_201 = 201" in tasks[0].instruction
    assert release_tasks(tmp_path / "old", tmp_path / "new.whl", lambda text: 100) == []
    assert changed_hunks(["a", "b"], ["a", "c"]) == [(["b"], ["c"], ["a", "c"])]


def test_oracle_programs_and_copy_times(tiny_folder: Callable[[str], Path], tmp_path: Path):
    (tmp_path / "pack.jsonl").write_text(json.dumps(ENTRY) + "\n")
    with LLM(tiny_folder("qwen2"), quiet=True, max_model_len=1024) as llm:
        found = bench.round_trips(llm, humaneval_tasks(tmp_path / "pack.jsonl"))
        assert found["tasks"] == found["programs"] == found["through_grammar"] == found["replacements"] == 1
        assert found["replacements_through_grammar"] == 1
        assert not bench.follows_grammar(llm, "a\nb\n", llm.tokenizer.encode("<copy 2-1>\n"))
        times = bench.copy_times(llm, 16)
    assert [row["tokens"] for row in times] == list(bench.COPIED_TOKENS) and all(row["copy_s"] > 0 for row in times)


def test_results_are_judged_and_compared_on_common_tasks(tmp_path: Path):
    task = EditTask("edit", "t", "", "", "", ENTRY["test"])
    right, wrong = "def double(x):\n    return 2 * x\n", "def double(x):\n    return x\n"
    base = {"category": "edit", "broken": "", "exact": False, "tokens": 10}
    records = [
        base | {"task": "t", "way": "rewrite", "drafter": "off", "seconds": 4.0, "text": right},
        base | {"task": "u", "way": "rewrite", "drafter": "off", "seconds": 9.0, "text": right},
        base | {"task": "t", "way": "replace", "drafter": "off", "seconds": 2.0, "text": wrong},
    ]
    bench.judge(records, [task])
    assert [record["passed"] for record in records] == [True, None, False]
    rows = bench.summarise(records)
    assert [(row["tasks"], row["passed"], row["speedup"]) for row in rows] == [(1, 1, 1.0), (1, 0, 2.0), (1, 0, 2.0)]
    assert bench.table(rows).row_count == 3
    records[2] |= {"broken": "no such line", "text": ""}
    (both,) = bench.fallbacks(records)
    assert (both["way"], both["seconds"], both["text"]) == ("replace, else rewrite", 6.0, right)


def test_settings_are_chosen_by_way_and_drafter():
    copies = [("copy", by) for by in ("off", bench.FREE, bench.MODEL)]
    assert bench.settings_of(["copy"], True) == {"generation": [], "edit": copies, "release": copies}
    chosen = bench.settings_of([], False, ["off", bench.MODEL])
    assert chosen["release"] == [("rewrite", "off"), ("replace", "off"), ("copy", "off")]  # there is no draft model
    assert ("replace", bench.MODEL) in bench.settings_of([], True)["edit"]


def test_tasks_run_in_turn_or_setting_by_setting_and_none_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ran: list[tuple[str, str, str]] = []

    def run_task(llm: LLM, task: EditTask, way: str, drafter: str) -> dict[str, Any]:
        ran.append((task.name, way, drafter))
        return {"seconds": 1.0, "ttft_s": 0.5}

    monkeypatch.setattr(bench, "run_task", run_task)
    monkeypatch.setattr(bench, "SHORT_WAYS", ())
    tasks = [EditTask("edit", name, "", "", "") for name in "ab"]
    settings = {"edit": [("rewrite", "off"), ("replace", "off"), ("replace", bench.FREE)]}
    out, llm = tmp_path / "lines.jsonl", cast(LLM, None)
    bench.run(llm, tasks[:1], settings, out, 1e9)
    assert ran == [("a", *setting) for setting in settings["edit"]]
    bench.run(llm, tasks, settings, out, 1e9)
    assert ran[3:] == [("b", *setting) for setting in settings["edit"]]
    ran.clear()
    bench.run(llm, tasks, settings, None, 1e9, by_setting=True)
    order = [("replace", "off"), ("replace", bench.FREE), ("rewrite", "off")]
    assert ran == [(name, *setting) for setting in order for name in "ab"]
