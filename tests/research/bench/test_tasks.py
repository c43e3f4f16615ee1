"""Reading tasks: every known format by its fields, choosing and mixing, files that are none."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from forerun.errors import BadRequest
from forerun_research.bench.tasks import FOLLOW_UP, BenchTask, mixed, read_tasks, select

RECORDS = {
    "spec.jsonl": {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]},
    "pack.jsonl": {
        "task_id": "Python/0",
        "prompt": "def f():\n",
        "buggy_solution": "    return 1\n",
        "entry_point": "f",
    },
    "eval.jsonl.gz": {"task_id": "HumanEval/0", "prompt": "def g():\n", "entry_point": "g", "test": "..."},
    "sums.jsonl": {"question": "2 + 2?", "answer": "4"},
    "mine.jsonl": {"id": "x", "kind": "letter", "prompt": "Dear"},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, record in RECORDS.items():
        raw = (json.dumps(record) + "\n\n").encode()
        (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    (tmp_path / "notes.md").write_text("not a task")
    return tmp_path


def test_formats_are_told_by_their_fields(folder: Path) -> None:
    found = {task.category: task for task in read_tasks([folder])}
    assert set(found) == {"writing", "edits", "humaneval", "sums", "letter"}
    assert found["writing"].turns == ("Write.", "Again.") and found["writing"].follow_up == "Again."
    assert "```python\ndef f():\n    return 1\n```" in found["edits"].turns[0] and "bug" in found["edits"].turns[0]
    assert found["humaneval"].id == "HumanEval/0" and "def g():" in found["humaneval"].turns[0]
    assert found["humaneval"].follow_up == FOLLOW_UP
    assert found["letter"].messages == [{"role": "user", "content": "Dear"}]


def test_files_come_in_the_order_they_are_named(folder: Path) -> None:
    tasks = read_tasks([folder / "sums.jsonl", folder / "mine.jsonl"])
    assert [task.category for task in tasks] == ["sums", "letter"]
    assert read_tasks([folder / "notes.md"])[0].turns == ("not a task",)


def test_shipped_prompts_need_no_files() -> None:
    tasks = read_tasks()
    assert len({task.id for task in tasks}) == len(tasks) >= 20
    assert {"code", "question"} <= {task.category for task in tasks}


def many() -> list[BenchTask]:
    return [BenchTask(f"{c}{i}", c, ("?",)) for c, count in (("a", 3), ("b", 1), ("c", 2)) for i in range(count)]


def test_select_takes_the_first_of_each_category() -> None:
    assert [t.id for t in select(many(), 2)] == ["a0", "a1", "b0", "c0", "c1"]
    assert [t.id for t in select(many(), 1, ["c", "a"])] == ["c0", "a0"]
    with pytest.raises(BadRequest, match="'poems'") as caught:
        select(many(), 1, ["poems"])
    assert "a, b, c" in caught.value.hint


def test_mixed_lets_categories_take_turns() -> None:
    assert [t.id for t in mixed(many())] == ["a0", "b0", "c0", "a1", "c1", "a2"]
    assert mixed([]) == []


@pytest.mark.parametrize(
    "line",
    ["{", "[]", "7", '{"turns": []}', '{"turns": "text"}', '{"turns": [""]}', '{"prompt": 3}', '{"answer": "4"}'],
)
def test_lines_that_are_no_task_are_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(BadRequest, match="line 2"):
        read_tasks([file])


def test_files_that_hold_nothing_are_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.jsonl.gz").write_bytes(b"\x1f\x8b no gzip")
    (tmp_path / "empty.jsonl").write_text("\n")
    for name in ("broken.jsonl.gz", "empty.jsonl", "missing.jsonl"):
        with pytest.raises(BadRequest, match=name):
            read_tasks([tmp_path / name])
    (tmp_path / "nothing").mkdir()
    with pytest.raises(BadRequest, match="nothing"):
        read_tasks([tmp_path / "nothing"])
