"""`forerun check lossless` as a command: what it prints, and its exit status."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forerun.checks import Finding
from forerun.cli import main

PARTED = {
    "prompt": 2,
    "position": 7,
    "plain": 11,
    "other": 12,
    "plain_text": " north",
    "other_text": "[red]",
    "gap": 0.25,
    "noise": 0.001,
    "factor": 4.0,
    "tie": False,
    "verdict": "BUG",
}
SOUND = [
    Finding("exact", "lookup", True, "with match: largest difference 1e-16", data={"differences": {"match": {}}}),
    Finding("greedy", "copy, batch of 4", True, "nothing drafted", checked=False, data={"differences": []}),
]
BROKEN = [*SOUND, Finding("greedy", "auto, batch of 4", False, "1 differ: BUG", data={"differences": [PARTED]})]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the check was asked for; it finds what stands under `findings`."""
    seen: dict[str, Any] = {"findings": SOUND}

    def check(model: str, draft: str | None, **options: Any) -> Iterator[Finding]:
        seen.update(options, model=model, draft=draft)
        options["on_progress"]("looking")
        yield from seen["findings"]

    monkeypatch.setattr("forerun.checks.lossless.run.check_lossless", check)
    monkeypatch.setattr("forerun.models.fetch.store.resolve", lambda name: Path(name))
    return seen


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(["check", "lossless", *args])
    return left.value.code or 0  # type: ignore[return-value]


def test_all_is_well(asked: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--model", "m", "--draft-model", "d", "--prompts", "4", "--temperature", "0.5", "--samples", "100") == 0
    out = capsys.readouterr().out
    assert "drafted for by d" in out and "not checked" in out and "FAIL" not in out
    wanted = {"model": "m", "draft": "d", "prompts": 4, "temperature": 0.5, "samples": 100, "weights": "auto"}
    assert wanted.items() <= asked.items()


def test_a_bug_is_told_in_full_and_ends_with_status_one(
    asked: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    asked["findings"] = BROKEN
    assert run("--model", "m") == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "FAIL" in out
    assert "prompt 2, position 7: plain 11 ' north', speculative 12 '[red]'" in out
    assert "gap 0.25, noise 0.001 (a tie up to 4 times): BUG" in out


def test_json_has_everything_and_the_same_status(asked: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    asked["findings"] = BROKEN
    assert run("--model", "m", "--json") == 1
    record = json.loads(capsys.readouterr().out)
    assert (record["check"], record["model"], record["draft"]) == ("lossless", "m", None)
    assert [finding["verdict"] for finding in record["findings"]] == ["pass", "not checked", "FAIL"]
    assert record["findings"][2]["data"]["differences"] == [PARTED]


def test_help_teaches_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    assert "Example: forerun check lossless" in " ".join(capsys.readouterr().out.split())
