"""What `forerun bench speculate` asks: tasks by category, from the shipped prompts or from files people have.

Reads Spec-Bench questions (`turns`), HumanEvalPack (`buggy_solution`: edits), HumanEval (`entry_point`: completions)
and plain prompts, each told by its fields; `.gz` files too. Knows no model.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.errors import BadRequest
from forerun.text.tokenizer import Tokenizer
from forerun_research.bench.prompts import read_prompts

_EDIT = "This file has a bug. Fix it and write the whole file again, changing nothing else.\n\n```python\n{}```"
_SUFFIXES = (".jsonl", ".jsonl.gz")
FOLLOW_UP = "Say the same again in fewer words."  # where a task has only one turn and a second one is wanted


@dataclass(frozen=True)
class BenchTask:
    """One conversation of a bench: its category and what the user says, turn by turn."""

    id: str
    category: str
    turns: tuple[str, ...]
    raw: bool = False  # text to continue, not a message to answer

    def ids(self, tokenizer: Tokenizer, turn: str | None = None) -> list[int]:
        """The first turn (or another in its place) as the model gets it."""
        text = self.turns[0] if turn is None else turn
        if self.raw:
            return tokenizer.encode(text, add_special=True)
        return tokenizer.apply_chat_template([{"role": "user", "content": text}])

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.turns[0]}]

    @property
    def follow_up(self) -> str:
        return self.turns[1] if len(self.turns) > 1 else FOLLOW_UP


def read_tasks(paths: Sequence[Path] = ()) -> list[BenchTask]:
    """Tasks of files and folders, in order; of the package when none are given."""
    if not paths:
        return [BenchTask(prompt.id, prompt.kind, (prompt.text,)) for prompt in read_prompts()]
    return [task for path in paths for file in _files(path) for task in _read_file(file)]


def select(tasks: Iterable[BenchTask], per_category: int, categories: Sequence[str] = ()) -> list[BenchTask]:
    """The first few tasks of each category, categories in the order they come (or are asked for)."""
    found: dict[str, list[BenchTask]] = {}
    for task in tasks:
        found.setdefault(task.category, []).append(task)
    for name in categories:
        if name not in found:
            raise BadRequest(f"no task is of category {name!r}", f"there are: {', '.join(found) or 'none'}")
    return [task for name in categories or found for task in found[name][:per_category]]


def mixed(tasks: Sequence[BenchTask]) -> list[BenchTask]:
    """The same tasks with categories taking turns, as requests of a service would come."""
    queues: dict[str, list[BenchTask]] = {}
    for task in tasks:
        queues.setdefault(task.category, []).append(task)
    longest = max(map(len, queues.values()), default=0)
    return [queue[i] for i in range(longest) for queue in queues.values() if i < len(queue)]


def _files(path: Path) -> list[Path]:
    """A file as it is; of a folder, every file of JSON lines."""
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.iterdir() if file.name.endswith(_SUFFIXES))
    if not found:
        raise BadRequest(f"{path} has no {' or '.join(_SUFFIXES)} file", "name a folder or files with tasks")
    return found


def _read_file(path: Path) -> Iterator[BenchTask]:
    if not path.name.endswith(_SUFFIXES):
        yield from (BenchTask(prompt.id, prompt.kind, (prompt.text,)) for prompt in read_prompts(path))
        return
    found = False
    for number, line in enumerate(_content(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            task = _task(json.loads(line), path, number)
        except (ValueError, TypeError, AttributeError):
            task = None
        if task is None:
            raise BadRequest(
                f"{path}, line {number}: not a task",
                "give JSON objects with `turns`, `prompt` and `buggy_solution`, `question`, or just `prompt`",
            )
        found = True
        yield task
    if not found:
        raise BadRequest(f"{path} is empty", "name a file with tasks")


def _content(path: Path) -> str:
    try:
        raw = path.read_bytes()
        return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise BadRequest(f"cannot read {path}: {error}", "give a UTF-8 file of JSON lines, plain or .gz") from None


def _task(record: dict[str, Any], path: Path, number: int) -> BenchTask | None:
    """A line by its fields; None where it has none that are known."""
    name = str(record.get("task_id", record.get("question_id", record.get("id", number))))
    if "turns" in record:
        return _checked(name, record.get("category", "questions"), record["turns"])
    if "buggy_solution" in record:
        return _checked(name, "edits", [_EDIT.format(record.get("prompt", "") + record["buggy_solution"])])
    if "entry_point" in record and "prompt" in record:
        return _checked(name, "humaneval", [record["prompt"]], raw=True)
    if "question" in record:
        return _checked(name, record.get("category", path.name.split(".")[0]), [record["question"]])
    if "prompt" in record:
        return _checked(name, record.get("category", record.get("kind", "prompt")), [record["prompt"]])
    return None


def _checked(name: str, category: Any, turns: Any, raw: bool = False) -> BenchTask | None:
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        return None
    return BenchTask(name, str(category), tuple(turns), raw)
