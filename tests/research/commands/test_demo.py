"""The demo on a tiny model: what it shows must be what happened."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from forerun import data
from forerun.cli import main
from forerun.engine.sequence import Event
from forerun_research.commands import demo
from forerun_research.commands.race import Lane, Race
from tests import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_folder(tmp_path_factory.mktemp("demo"), "llama", max_position_embeddings=16_384)


def run(folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    with pytest.raises(SystemExit) as left:
        main(["demo", "--model", str(folder), "--dtype", "float32", "--threads", "1", "--max-tokens", "4", *more])
    assert left.value.code in (0, None)
    return capsys.readouterr().out


@pytest.mark.parametrize("columns", ["60", "120"])
def test_the_second_question_reuses_the_document(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    out = run(folder, capsys)
    assert max(map(len, out.splitlines())) <= int(columns)
    rows = dict(re.findall(r"^ *(\d (?:plain|Forerun)) +(.*\S)", out, re.M))
    assert "…" not in out
    assert list(rows) == [f"{number} {side}" for number in (1, 2, 3) for side in ("plain", "Forerun")]
    cached = {name: int(re.split(r" {2,}", cells)[3].replace(",", "")) for name, cells in rows.items()}
    words = len(data.text(demo.DOCUMENT).split())
    assert cached["1 plain"] == cached["1 Forerun"] == cached["2 plain"] == 0 and cached["2 Forerun"] > words
    told = " ".join(out.split())
    found = re.search(r"([\d.,]+) times sooner, since ([\d,]+) of ([\d,]+) prompt tokens", told)
    assert found is not None and int(found[2].replace(",", "")) == cached["2 Forerun"]
    assert int(found[2].replace(",", "")) > 0.95 * int(found[3].replace(",", ""))
    assert "Answers: the same, token for token." in told
    for question in (*demo.QUESTIONS, demo.CHANGED_QUESTION):
        assert question in told
    assert told.count("first token after") == 6
    assert "The handbook's first line has changed." in told and cached["3 plain"] == 0
    assert re.search(r"3: (the first word [\d.]+ times sooner|computed exactly: \w)", told)


def test_ctrl_c_leaves_cleanly(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Lane, events: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Lane, "run", interrupted)
    with pytest.raises(SystemExit) as left:
        main(["demo", "--model", str(folder), "--dtype", "float32", "--threads", "1"])
    assert left.value.code == 130 and "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(("width", "beside"), [(60, False), (120, True), (24, False)])
def test_lanes_fit_the_screen(width: int, beside: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, width=width, height=16, force_terminal=True, color_system=None)
    lanes = [Lane("plain", text="one two three four\n" * 40), Lane("Forerun", text="five six seven\n" * 40)]
    race = Race(console, *lanes)
    console.print(race._view())
    lines = out.getvalue().splitlines()
    assert len(lines) <= 16 and max(map(len, lines)) <= width
    both = [line for line in lines if "four" in line and "seven" in line]
    assert bool(both) is beside and "four" in out.getvalue() and "seven" in out.getvalue()


def test_provisional_words_stay_until_all_of_them_are_settled() -> None:
    lane, seen = Lane("Forerun"), []
    events = [
        Event(0, 0, "The old lamp", [1, 2, 3], provisional=True),
        Event(0, 0, "The", [1], confirmed=1),
        Event(0, 0, " old", [2], confirmed=1),
        Event(0, 0, " keeper", [4], retracted=1),
        Event(0, 0, ".", [5], finish_reason="stop"),
    ]

    def told() -> Iterator[Event]:
        for event in events:
            yield event
            seen.append((lane.provisional, lane.text))

    lane.run(told())
    assert [provisional for provisional, _ in seen] == ["The old lamp"] * 3 + ["", ""]
    assert [text for _, text in seen] == ["", "The", "The old", "The old keeper", "The old keeper."]
    assert 0 < lane.shown_s <= lane.first_s and lane.token_ids == [1, 2, 4, 5]
