"""`forerun stats`: sums of answers one has, or of a trace that is replayed."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forerun.cli import main

USAGE = {"prompt_tokens": 100, "cached_tokens": 60, "completion_tokens": 10, "written": 30, "total_s": 2.0}
SERVED = {"pool": 40, "disk": 20, "computed": 40}


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(["stats", *args])
    return left.value.code or 0  # type: ignore[return-value]


def answer(finish: str = "stop", **more: Any) -> str:
    return json.dumps({"choices": [{"text": "x", "finish_reason": finish}], "usage": USAGE} | more)


def test_answers_are_summed_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "answers.jsonl"
    lines = [answer(), answer(usage=USAGE | {"served": SERVED}, session="main"), "", answer("cancelled")]
    file.write_text("\n".join(lines))
    assert run(str(file), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["requests"] == 3 and found["answers"] == 2 and found["prompt_tokens"] == 300
    assert found["served"] == {"pool": 160, "host": 0, "disk": 20, "store": 0, "approximate": 0, "computed": 120}
    assert found["cached_share"] == pytest.approx(0.6) and found["written"] == 90
    assert found["computed_per_answer"] == (120 + 30) / 2 and found["seconds_per_answer"] == 3.0
    assert found["sessions"]["main"]["prompt_tokens"] == 100
    assert run(str(file)) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "total" in out and "main" in out and "60.0%" in out and "disk 20" in out


def test_what_generate_prints_can_be_read(
    tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["generate", "fog " * 9, "--threads", "1", "--model", str(tiny_folder("llama")), "--max-tokens", "3"]
    with pytest.raises(SystemExit):
        main([*args, "--json"])
    line = capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO(line))
    assert run("-", "--json") == 0
    found, usage = json.loads(capsys.readouterr().out), json.loads(line)["usage"]
    assert found["answers"] == 1 and found["prompt_tokens"] == found["computed"] == usage["prompt_tokens"]


def test_a_trace_is_replayed(
    tiny_folder: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "t.jsonl"
    turn = {"session": "main", "role": "user", "content": "A ship passes the light.", "max_tokens": 3}
    trace.write_text("\n".join(json.dumps(x) for x in [{"system": "You count."}, turn, turn, turn]))
    args = ["--trace", str(trace), "-m", str(tiny_folder("llama")), "--threads", "1"]
    assert run(*args, "--turns", "2", "--json", "--speculation", "off") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["answers"] == found["sessions"]["main"]["answers"] == 2 and 0 < found["cached_share"] < 1
    assert sum(found["served"].values()) == found["prompt_tokens"]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"usage": 3}',
        '{"usage": {"prompt_tokens": "many"}}',
        '{"usage": {"served": {"moon": 3}}}',
        '{"usage": {}, "session": 3}',
        '{"usage": {}, "choices": [1]}',
    ],
)
def test_what_is_no_answer_is_refused(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_text(content)
    assert run(str(file)) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ") and "answers.jsonl" in err and "hint: " in err


def test_records_and_a_trace_do_not_go_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("a.jsonl", "--trace", "t.jsonl") == 1
    assert "--trace" in capsys.readouterr().err
    assert run(str(tmp_path / "missing.jsonl")) == 1
    assert "missing.jsonl" in capsys.readouterr().err


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert out.count("forerun stats") >= 3 and "llm.stats()" in out
