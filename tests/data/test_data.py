"""What ships with the package is there, varied and long enough; files of the user's own are read or refused."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from forerun import data
from forerun.errors import BadRequest


def test_prompts_are_many_and_varied() -> None:
    prompts = data.read_prompts()
    assert len(prompts) >= 24
    assert len({prompt.id for prompt in prompts}) == len({prompt.text for prompt in prompts}) == len(prompts)
    assert {"question", "code", "summary", "extraction", "multilingual"} <= {prompt.kind for prompt in prompts}


def test_documents_are_long_and_their_own() -> None:
    handbook, depot = data.text("documents/handbook.txt"), data.text("documents/depot.py")
    assert len(handbook.split()) > 1800
    assert len(depot.splitlines()) > 240
    ast.parse(depot)
    ast.parse(data.text("quality_code.txt"))
    sentences = [s for s in handbook.replace("\n", " ").split(". ") if len(s) > 40]
    assert len(set(sentences)) == len(sentences)  # no filler


def test_own_prompts_are_read(tmp_path: Path) -> None:
    lines = tmp_path / "mine.jsonl"
    lines.write_text(json.dumps({"prompt": "one"}) + "\n\n" + json.dumps({"id": "b", "prompt": "two"}) + "\n")
    assert [(p.id, p.text) for p in data.read_prompts(lines)] == [("1", "one"), ("b", "two")]
    plain = tmp_path / "mine.txt"
    plain.write_text("a long text")
    assert [p.text for p in data.read_prompts(plain)] == ["a long text"]


@pytest.mark.parametrize("content", ["{", "[1]", '{"text": "x"}', '{"prompt": ""}', '{"prompt": 3}'])
def test_bad_lines_are_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "fine"}\n' + content)
    with pytest.raises(BadRequest, match="line 2"):
        data.read_prompts(file)


def test_missing_empty_and_binary_files_are_refused(tmp_path: Path) -> None:
    empty, binary = tmp_path / "empty.txt", tmp_path / "binary.txt"
    empty.write_text(" \n")
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "missing.txt", empty, binary):
        with pytest.raises(BadRequest, match=path.name):
            data.read_prompts(path)
