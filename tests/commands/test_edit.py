"""`forerun edit` as a user meets it; the model's answers are given."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forerun.commands.options import ModelOptions
from forerun.recipes.edit import stream_edit
from tests.commands.test_generate import run
from tests.recipes.test_edit import DIFF, NEW, OLD, ScriptedLLM, answer_for


@pytest.fixture
def depot(
    tiny_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, SimpleNamespace]:
    """A file, and what the model will answer to its edit."""
    script = SimpleNamespace(write=lambda content, way: answer_for(OLD, NEW, way))
    file = tmp_path / "depot.py"
    file.write_text(OLD)
    file.chmod(0o640)

    @contextmanager
    def opened(self: ModelOptions, **more: Any) -> Iterator[Any]:
        llm = ScriptedLLM(tiny_folder("qwen2"), lambda *asked: script.write(*asked))
        llm.stream_edit = lambda *args, **named: stream_edit(llm, *args, **named)  # type: ignore[attr-defined, arg-type]
        yield llm

    monkeypatch.setattr(ModelOptions, "open", opened)
    return file, script


@pytest.mark.parametrize("mode", ["copy", "replace", "rewrite"])
def test_text_or_diff_is_printed_and_the_file_stays(
    mode: str, depot: tuple[Path, SimpleNamespace], capsys: pytest.CaptureFixture[str]
):
    file, _ = depot
    assert run("edit", str(file), "Fix total.", "--mode", mode, "--stats") == 0
    shown = capsys.readouterr()
    assert shown.out == NEW and f"used: {mode} (asked for)" in shown.err and "total" in shown.err
    assert run("edit", str(file), "Fix total.", "--mode", mode, "--diff") == 0
    assert capsys.readouterr().out == DIFF and file.read_text() == OLD
    assert run("edit", str(file), "Fix total.", "--mode", mode, "--json") == 0
    assert json.loads(capsys.readouterr().out)["diff"] == DIFF


def test_write_replaces_the_file_whole(depot: tuple[Path, SimpleNamespace], capsys: pytest.CaptureFixture[str]):
    file, script = depot
    link = file.with_name("link.py")
    link.symlink_to(file)
    assert run("edit", str(link), "Fix total.", "--write", "--mode", "replace") == 0
    assert capsys.readouterr().out == DIFF.replace("depot", "link")
    assert file.read_text() == NEW and file.stat().st_mode & 0o777 == 0o640 and link.is_symlink()
    file.write_text(OLD)
    assert run("edit", str(file), "Fix total.", "--write", "--mode", "replace", "--json") == 0
    assert json.loads(capsys.readouterr().out)["diff"] == DIFF and file.read_text() == NEW  # the JSON alone is printed
    script.write = lambda content, way: answer_for(NEW, NEW, "copy")
    assert run("edit", str(file), "Fix total.", "--write", "--mode", "copy") == 0
    assert "nothing changed: say more, or use --mode rewrite" in capsys.readouterr().err
    assert sorted(path.name for path in file.parent.iterdir()) == ["depot.py", "link.py"]


def test_a_broken_answer_writes_nothing(depot: tuple[Path, SimpleNamespace], capsys: pytest.CaptureFixture[str]):
    file, script = depot
    script.write = lambda content, way: "..."
    assert run("edit", str(file), "Fix total.", "--write", "--mode", "rewrite") == 1
    shown = capsys.readouterr().err
    assert "did not end" in shown and "use another model" in shown and file.read_text() == OLD
    assert run("edit", str(file), "Fix total.", "--write", "--diff") == 1
    assert run("edit", str(file.with_name("none")), "Fix total.") == 1


def test_what_must_not_be_written_is_known_before_the_model_is_asked(
    depot: tuple[Path, SimpleNamespace], capsys: pytest.CaptureFixture[str]
):
    file, script = depot
    asked: list[str] = []
    script.write = lambda content, way: asked.append(way) or answer_for(OLD, NEW, way)
    file.chmod(0o444)
    assert run("edit", str(file), "Fix total.", "--write", "--mode", "replace") == 1
    assert "read-only" in capsys.readouterr().err and not asked and file.read_text() == OLD
    assert run("edit", str(file), "Fix total.", "--diff", "--mode", "replace") == 0


def test_a_file_that_others_change_meanwhile_is_not_written(
    depot: tuple[Path, SimpleNamespace], capsys: pytest.CaptureFixture[str]
):
    file, script = depot
    script.write = lambda content, way: file.write_text("theirs\n") and answer_for(OLD, NEW, way)
    assert run("edit", str(file), "Fix total.", "--write", "--mode", "replace") == 1
    assert "has changed" in capsys.readouterr().err and file.read_text() == "theirs\n"
