"""Files of a user's own prompts are read or refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forerun.errors import BadRequest
from forerun_research.bench.prompts import read_prompts


def test_own_prompts_are_read(tmp_path: Path) -> None:
    lines = tmp_path / "mine.jsonl"
    lines.write_text(json.dumps({"prompt": "one"}) + "\n\n" + json.dumps({"id": "b", "prompt": "two"}) + "\n")
    assert [(p.id, p.text) for p in read_prompts(lines)] == [("1", "one"), ("b", "two")]
    plain = tmp_path / "mine.txt"
    plain.write_text("a long text")
    assert [p.text for p in read_prompts(plain)] == ["a long text"]


@pytest.mark.parametrize("content", ["{", "[1]", '{"text": "x"}', '{"prompt": ""}', '{"prompt": 3}'])
def test_bad_lines_are_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "fine"}\n' + content)
    with pytest.raises(BadRequest, match="line 2"):
        read_prompts(file)


def test_missing_empty_and_binary_files_are_refused(tmp_path: Path) -> None:
    empty, binary = tmp_path / "empty.txt", tmp_path / "binary.txt"
    empty.write_text(" \n")
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "missing.txt", empty, binary):
        with pytest.raises(BadRequest, match=path.name):
            read_prompts(path)
