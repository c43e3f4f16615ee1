"""What is kept between commands: K/V on disk, sessions, and how that is asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from forerun.cli import main
from forerun.commands.options import ModelOptions
from forerun.errors import BadRequest
from forerun.options import parse_bytes

LONG = "The lamp turns twelve times a minute, and every ship that hears the horn answers. " * 4


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(list(args))
    return left.value.code or 0  # type: ignore[return-value]


@pytest.fixture
def model(tiny_folder: Callable[[str], Path], tmp_path: Path) -> list[str]:
    asked = [
        "--model",
        str(tiny_folder("qwen3")),
        "--dtype",
        "float32",
        "--threads",
        "1",
        "--kv-cache-tokens",
        "2048",
    ]
    return [*asked, "--disk", str(tmp_path / "kv"), "--disk-bytes", "64M"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [("100", 100), ("2K", 2048), ("1.5m", 3 << 19), ("8G", 8 << 30), ("8GB", 8 << 30), (" 1 GiB ", 1 << 30)],
)
def test_sizes_as_people_write_them(given: str, expected: int) -> None:
    assert parse_bytes("--disk-bytes", given) == expected


@pytest.mark.parametrize("given", ["", "much", "-1", "8X", "1e9", "8 G G"])
def test_what_is_no_size_is_refused(given: str) -> None:
    with pytest.raises(BadRequest, match="--disk-bytes is"):
        parse_bytes("--disk-bytes", given)


def test_bytes_of_a_disk_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.LLM", lambda **options: options)
    with pytest.raises(BadRequest, match="there is none"):
        ModelOptions(disk_bytes="8G").open()
    opened: dict = ModelOptions(host_bytes="1K").open()  # type: ignore[assignment]
    assert opened["disk"] is None and opened["host_bytes"] == 1024 and "disk_bytes" not in opened


def test_the_next_command_reads_the_prompt_from_disk(model: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["generate", LONG, "--raw", "--max-tokens", "2", *model]
    assert run(*asked, "--stats") == 0
    assert "from disk" not in capsys.readouterr().err
    assert run(*asked, "--stats", "--host-bytes", "1M") == 0
    assert "from disk" in capsys.readouterr().err


def test_a_session_goes_on_from_command_to_command(
    model: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    again = [*model, "--session", "light", "--max-tokens", "4", "--temperature", "0"]
    assert run("generate", LONG, "--system", "Be brief.", *again, "--json") == 0
    first = json.loads(capsys.readouterr().out)
    assert first["session"] == "light" and first["usage"]["served"]["disk"] == 0
    assert run("generate", "And then?", *again, "--json") == 0
    second = json.loads(capsys.readouterr().out)
    known = first["usage"]["prompt_tokens"] + 4
    assert second["usage"]["prompt_tokens"] > known and second["usage"]["served"]["disk"] >= known - 17
    assert run("generate", "x " * 3000, *again) == 1  # too long: it does not become part of the session
    assert "tokens" in capsys.readouterr().err
    assert run("generate", "More?", "--system", "Be long.", *again) == 1
    assert "comes too late" in capsys.readouterr().err

    lines = iter(["Why?", "/quit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    assert run("chat", *again, "--stats") == 0
    said = capsys.readouterr().err
    assert "goes on after 2 answers" in said and "from disk" in said

    (tmp_path / "answers.jsonl").write_text(json.dumps(first) + "\n" + json.dumps(second) + "\n")
    assert run("stats", str(tmp_path / "answers.jsonl"), "--json") == 0
    account = json.loads(capsys.readouterr().out)["sessions"]["light"]
    assert account["answers"] == 2 and account["served"]["disk"] == second["usage"]["served"]["disk"]


def test_reset_forgets_a_sessions_turns(
    model: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["chat", *model, "--session", "new", "--max-tokens", "4", "--temperature", "0", "--system", "Be brief."]
    for script, expected in ((["Why?", "/reset", "How?", "/quit"], False), (["/quit"], True)):
        lines = iter(script)
        monkeypatch.setattr("builtins.input", lambda prompt, lines=lines: next(lines))
        assert run(*asked) == 0
        assert ("goes on after 1 answers" in capsys.readouterr().err) == expected


def test_a_session_without_a_disk_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["generate", "hi"], ["chat"]):
        assert run(*command, "--session", "light") == 1
        assert "--disk FOLDER" in capsys.readouterr().err
