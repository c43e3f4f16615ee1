"""Tasks of `forerun bench edit`: functions to write, bugs to fix (HumanEvalPack), and changes between two releases.

A release task is a file of a package with the change that its next release made: a few short hunks, shown as the new
lines with a line of context. Knows files and wheels, no model.
"""

from __future__ import annotations

import difflib
import json
import zipfile
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from forerun.errors import BadRequest

MIN_FILE_TOKENS, MAX_FILE_TOKENS = 4_000, 16_000
MAX_HUNKS, MAX_CHANGED_LINES = 3, 20
CATEGORIES = ("generation", "edit", "release")


@dataclass(frozen=True)
class EditTask:
    category: str
    name: str
    old: str  # of generation: the beginning of the file
    new: str
    instruction: str
    tests: str = ""  # a program that passes after the right text; empty: there are none


def choose_tasks(
    data: Path | None,
    releases: Sequence[Path],
    encode: Callable[[str], list[int]],
    categories: Collection[str],
    limit: int,
) -> list[EditTask]:
    """The first `limit` tasks of each category, of HumanEvalPack's file and of pairs of releases, short files first."""
    tasks = humaneval_tasks(data) if data is not None else []
    pairs = iter(releases)
    for older, newer in zip(pairs, pairs, strict=True):
        tasks += release_tasks(older, newer, lambda text: len(encode(text)))
    tasks.sort(key=lambda task: len(task.old) if task.category == "release" else 0)
    chosen = [task for name in categories for task in [t for t in tasks if t.category == name][:limit]]
    if not chosen:
        raise BadRequest("there are no tasks", "give --data or two times --release")
    return chosen


def humaneval_tasks(path: Path) -> list[EditTask]:
    """From each entry of HumanEvalPack a function to write and a bug to fix."""
    tasks = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        try:
            start, name = row["prompt"], row["entry_point"]
            right, wrong = start + row["canonical_solution"], start + row["buggy_solution"]
            tests = "\n" + row["test"] + "\n"
        except KeyError as missing:
            raise BadRequest(f"{path} has an entry without {missing}", "give HumanEvalPack's python.jsonl") from None
        write = f"Complete the function {name}. Answer with the whole file in one code block."
        tasks.append(EditTask("generation", row["task_id"], start, right, write, tests))
        tasks.append(EditTask("edit", row["task_id"], wrong, right, f"Fix the bug in {name}.", tests))
    return tasks


def release_tasks(old: Path, new: Path, count_tokens: Callable[[str], int]) -> list[EditTask]:
    """Files that are in both releases (folders or wheels) and differ a little."""
    before, after = dict(python_files(old)), dict(python_files(new))
    tasks = []
    for name in sorted(before.keys() & after.keys()):
        hunks = changed_hunks(before[name].split("\n"), after[name].split("\n"))
        size = sum(len(removed) + len(added) for removed, added, _ in hunks)
        if not hunks or len(hunks) > MAX_HUNKS or size > MAX_CHANGED_LINES:
            continue
        if MIN_FILE_TOKENS <= count_tokens(before[name]) <= MAX_FILE_TOKENS:
            snippet = "\n...\n".join("\n".join(shown) for _, _, shown in hunks)
            asked = f"Apply this update, where ... stands for code that stays as it is:\n...\n{snippet}\n..."
            tasks.append(EditTask("release", f"{new.stem}:{name}", before[name], after[name], asked))
    return tasks


def changed_hunks(old: list[str], new: list[str]) -> list[tuple[list[str], list[str], list[str]]]:
    """Lines removed, lines added, and the new lines with the nearest line of text before and after them."""
    found = []
    for tag, i, j, a, b in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag == "equal":
            continue
        first, last = a - 1, b
        while first > 0 and not new[first].strip():
            first -= 1
        while last < len(new) - 1 and not new[last].strip():
            last += 1
        found.append((old[i:j], new[a:b], new[max(0, first) : last + 1]))
    return found


def python_files(where: Path) -> Iterator[tuple[str, str]]:
    """The Python files of a folder or a wheel, by their paths."""
    if where.is_dir():
        for path in sorted(where.rglob("*.py")):
            yield str(path.relative_to(where)), path.read_text(encoding="utf-8")
        return
    try:
        with zipfile.ZipFile(where) as wheel:
            for name in wheel.namelist():
                if name.endswith(".py"):
                    yield name, wheel.read(name).decode("utf-8")
    except (OSError, zipfile.BadZipFile) as error:
        raise BadRequest(f"cannot read {where}: {error}", "give a folder or a wheel") from None
