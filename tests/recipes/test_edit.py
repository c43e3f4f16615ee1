"""Edits of files: each way with answers as models write them, what breaks, and which way is taken."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from forerun import LLM, SamplingParams
from forerun.core import Usage
from forerun.engine.sequence import Event
from forerun.errors import BadRequest
from forerun.models.formats.checkpoint import open_checkpoint
from forerun.recipes.edit import PROBES, BrokenEdit, EditMode, edit, probe, stream_edit
from forerun.text.edit_program import SourceLines, oracle, program_text
from forerun.text.edit_replace import replacements

OLD = "def total(items):\n    return sum(items) + 1\n\n\ndef mean(items):\n    return total(items) / len(items)\n"
NEW = OLD.replace(" + 1", "")
DIFF = """--- a/depot.py
+++ b/depot.py
@@ -1,5 +1,5 @@
 def total(items):
-    return sum(items) + 1
+    return sum(items)
 
 
 def mean(items):
"""


def answer_for(old: str, new: str, way: str) -> str:
    source, lines = SourceLines(old), SourceLines(new).lines
    if way == "rewrite":
        return f"```python\n{new}```\n"
    return program_text(oracle(source, lines)) if way == "copy" else replacements(source, lines)


class ScriptedLLM:
    """Answers with given texts: `write(content of the last message, way)`."""

    def __init__(self, folder: Path, write: Callable[[str, str], str]) -> None:
        self.tokenizer, self.write = open_checkpoint(folder).tokenizer(), write
        self.asked: list[tuple[str, SamplingParams]] = []

    def _answer(self, messages: Any, params: SamplingParams) -> str:
        way = "rewrite" if params.grammar is None else "copy" if params.grammar.kind == "edit" else "replace"
        self.asked.append((way, params))
        return self.write(messages[-1]["content"], way)

    def stream(self, messages: Any, params: SamplingParams) -> Iterator[Event]:
        text = self._answer(messages, params)
        for at in range(0, len(text), 5):
            yield Event(0, 0, text=text[at : at + 5])
        yield Event(0, 0, finish_reason="length" if text.endswith("...") else "stop", usage=Usage())

    def chat(self, prompts: list[Any], params: list[SamplingParams]) -> list[Any]:
        return [SimpleNamespace(text=self._answer(*pair)) for pair in zip(prompts, params, strict=True)]


@pytest.fixture
def scripted(tiny_folder: Callable[[str], Path]) -> Callable[..., LLM]:
    def make(*right: str, otherwise: str = "```\nnothing\n```\n") -> LLM:
        """A model that gets the edits of this file and the probes right in these ways."""

        def write(content: str, way: str) -> str:
            for old, asked, new in [*PROBES, (OLD, "Fix total.", NEW)]:
                if asked in content and way in right:
                    return answer_for(old, new, way)
            return otherwise

        return cast(LLM, ScriptedLLM(tiny_folder("qwen2"), write))

    return make


@pytest.mark.parametrize("way", ["copy", "replace", "rewrite"])
def test_each_way_gives_text_and_diff_as_they_come(way: EditMode, scripted: Callable[..., LLM]):
    pieces = list(stream_edit(scripted(way), "src/depot.py", "Fix total.", text=OLD, mode=way))
    assert len(pieces) > 2 and all(piece.result is None for piece in pieces[:-1])
    result = pieces[-1].result
    assert result is not None and result.used == way and result.changed
    assert "".join(piece.text for piece in pieces) == result.text == NEW
    assert "".join(piece.diff for piece in pieces) == result.diff == DIFF.replace("depot.py", "src/depot.py")


def test_files_are_read_and_keep_their_line_ends(scripted: Callable[..., LLM], tmp_path: Path):
    file = tmp_path / "depot.py"
    file.write_bytes(OLD.replace("\n", "\r\n").removesuffix("\r\n").encode())
    for way in ("copy", "replace", "rewrite"):
        found = edit(scripted(way), file, "Fix total.", mode=way)  # type: ignore[arg-type]
        assert found.text == NEW.replace("\n", "\r\n").removesuffix("\r\n")
    with pytest.raises(BadRequest, match="cannot read"):
        edit(scripted("copy"), tmp_path / "none.py", "Fix total.")


@pytest.mark.parametrize(
    ("right", "used"),
    [(("copy", "replace"), "replace"), (("copy",), "copy"), (("replace",), "replace"), (("rewrite",), "rewrite")],
)
def test_auto_takes_what_the_model_can_write(right: tuple[str, ...], used: str, scripted: Callable[..., LLM]):
    llm = scripted(*right, otherwise="```\n")
    found = edit(llm, "depot.py", "Fix total.", text=OLD)
    assert found.used == used and "of 3 test edits right" in found.why
    tried = len(cast(ScriptedLLM, llm).asked)
    edit(llm, "depot.py", "Fix total.", text=OLD)
    assert len(cast(ScriptedLLM, llm).asked) == tried + 1  # probes are not repeated
    assert edit(scripted("rewrite"), "new.py", "Write.", text="").used == "rewrite"


@pytest.mark.parametrize(
    "broken",
    [
        "<<<<<<< SEARCH\nno such line\n=======\n>>>>>>> REPLACE\n",
        "<<<<<<< SEARCH\ndef total(items):\n=======\n...",
        "<<<<<<< SEARCH\ndef mean(items):\n=======\n>>>>>>> REPLACE\n"
        "<<<<<<< SEARCH\ndef total(items):\n=======\n>>>>>>> REPLACE\n",  # backwards, after some text was emitted
    ],
)
def test_an_answer_that_breaks_is_replaced_by_a_rewrite(broken: str, scripted: Callable[..., LLM]):
    llm = scripted("replace", "rewrite")
    assert probe(llm)["replace"] == 3
    write = cast(ScriptedLLM, llm).write
    cast(ScriptedLLM, llm).write = lambda content, way: broken if way == "replace" else write(content, way)
    found = edit(llm, "depot.py", "Fix total.", text=OLD)
    assert (found.used, found.text) == ("rewrite", NEW) and ("not in the text" in found.why or "end" in found.why)
    pieces = list(stream_edit(llm, "depot.py", "Fix total.", text=OLD))
    assert len(pieces) > 2 and "".join(piece.text for piece in pieces) == NEW  # and nothing of what broke
    assert "".join(piece.diff for piece in pieces) == DIFF
    with pytest.raises(BrokenEdit):
        edit(llm, "depot.py", "Fix total.", text=OLD, mode="replace")


def test_a_rewrite_is_drafted_from_the_file(scripted: Callable[..., LLM]):
    llm = cast(ScriptedLLM, scripted("rewrite"))
    edit(cast(LLM, llm), "depot.py", "Fix total.", text=OLD, mode="rewrite")
    assert llm.asked[-1][1].prediction == tuple(llm.tokenizer.encode(OLD))


@pytest.mark.parametrize(
    "values", [{"mode": "diff"}, {"instruction": " "}, {"params": SamplingParams(n=2)}, {"mode": "replace", "text": ""}]
)
def test_what_is_refused(values: dict[str, Any], scripted: Callable[..., LLM]):
    with pytest.raises(BadRequest) as error:
        edit(scripted("copy"), "depot.py", **({"instruction": "Fix total.", "text": OLD} | values))
    assert error.value.hint


def test_a_real_model_edits_a_file(smollm2: Path, tmp_path: Path):
    """Whatever a small model makes of it: the diff and the text are the same change, in each way."""
    file = tmp_path / "notes.txt"
    file.write_text("# Shopping\n\n- bread\n- milk\n- tea\n- lamp oil\n- salt\n")
    with LLM(str(smollm2), quiet=True, max_model_len=2048) as llm:
        found = [llm.edit(file, "Replace tea by coffee.")]
        for way in ("copy", "replace"):
            try:
                found.append(llm.edit(file, "Replace tea by coffee.", mode=way))  # type: ignore[arg-type]
            except BrokenEdit as error:
                assert error.hint
    assert "test edits right" in found[0].why
    for each in found:
        (tmp_path / "copy").mkdir(exist_ok=True)
        (tmp_path / "copy" / "notes.txt").write_text(file.read_text())
        if each.changed:
            subprocess.run(["git", "apply", "-"], input=each.diff, text=True, cwd=tmp_path / "copy", check=True)
        assert (tmp_path / "copy" / "notes.txt").read_text() == each.text
