"""`forerun calibrate` as a command: what it prints, what it refuses, how it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forerun.cli import main
from forerun.prefill.calibration import resume
from forerun.prefill.calibration.setup import least_window
from forerun.prefill.calibration.windows import WindowSettings
from forerun.prefill.profile import Profile
from tests.prefill.calibration.common import write_pair, write_text


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"), files=4)


def run(*args: object) -> int:
    with pytest.raises(SystemExit) as left:
        main(["calibrate", *map(str, args)])
    return left.value.code or 0  # type: ignore[return-value]


QUICK = ("--window", 416, "--rank", 16, "--tokens", 6000, "--device", "cpu")


def test_from_files_to_a_profile(
    models: tuple[Path, Path], text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = sorted(text.iterdir())
    out = tmp_path / "new" / "a.profile"
    # One file belongs to --text, the rest follows as a shell expands it
    given = ("--target", models[0], "--draft-model", models[1], "--text", *files, "--out", out)
    assert run(*given, *QUICK, "--steps", 2, "--json", "--force") == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["kind"], record["rank"], record["base"]) == ("draft", 16, 1)
    assert record["facts"]["files"] == 4 and record["facts"]["steps"] == 2
    profile = Profile.load(out)
    assert record["share"] == profile.share and len(record["curve"]) == len(profile.curve) == 6
    assert record["bytes"] == out.stat().st_size


def test_without_a_rank_the_model_decides(
    models: tuple[Path, Path], text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--target", models[0], "--draft-model", models[1], "--text", text, "--out", tmp_path / "a.profile")
    small = ("--window", 416, "--tokens", 3000, "--device", "cpu", "--no-distill", "--json", "--force")
    assert run(*given, *small) == 0
    assert json.loads(capsys.readouterr().out)["rank"] == 64  # as wide as the target
    maps = Profile.load(tmp_path / "a.profile").maps
    assert maps.target_embedding and maps.down.shape == (64, 3 * 32 + 64)


def test_a_table_for_people(
    models: tuple[Path, Path], text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.profile"
    given = ("--target", models[0], "--text", text, "--out", out)
    assert run(*given, *QUICK, "--base", 2, "--no-distill", "--quality", 1.0, "--force") == 0
    printed = capsys.readouterr()
    shown, stages = " ".join(printed.out.split()), printed.err
    assert [f"{n} of 4: " in stages for n in (1, 2, 3, 4)] == [True, True, False, True]  # nothing is distilled
    assert "hold on prose: agreement" in shown and "was not measured" in shown
    assert "target, drafted by itself" in shown and "default" in shown and "30%" in shown
    assert "No share reaches an agreement of 1" in shown and "a.profile" in shown.replace(" ", "")


def test_ctrl_c_shows_how_to_resume(
    models: tuple[Path, Path],
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save_point = resume.CalibrationState.save_point

    def stop(self: resume.CalibrationState, values: Any) -> None:
        self.stop_requested = True
        save_point(self, values)

    monkeypatch.setattr(resume.CalibrationState, "save_point", stop)
    assert run("--target", models[0], "--text", text, "--out", tmp_path / "a", *QUICK, "--steps", 2) == 130
    assert "the same command resumes from" in capsys.readouterr().err
    assert (tmp_path / "a.state").exists()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (("--steps", 3, "--minutes", 2), "--steps 3 and --minutes 2 cannot go together"),
        (("--no-distill", "--steps", 3), "--no-distill"),
        (("--start", "other.profile"), "--start trains the maps of a profile on"),  # beside --rank
        (("--maps", "other.profile", "--start", "other.profile"), "--maps keeps maps as they are"),
        (("--base", 4), "4 layers"),
        (("--text", "nowhere.txt"), "cannot read nowhere.txt"),
        (("--window", 900), "too short: 5 files"),
        (("--out", "/"), "cannot write a profile"),
    ],
)
def test_what_cannot_work_is_said_at_once(
    wrong: tuple[object, ...],
    said: str,
    models: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = write_text(tmp_path / "text", files=5, words=300)
    given = ("--target", models[0], "--text", text, "--out", tmp_path / "a", *QUICK)
    assert run(*given, *wrong) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("calibrating, 1 of 4")]
    assert lines[0].startswith("error: ") and said in lines[0] and lines[1].startswith("hint: ")
    assert not (tmp_path / "a").exists()


def test_a_window_that_the_help_rules_out_is_refused(models: tuple[Path, Path], text: Path, tmp_path: Path) -> None:
    least = least_window(WindowSettings().continuation)
    given = ("--target", models[0], "--text", text, "--out", tmp_path / "a", "--no-distill", "--force")
    assert run(*given, "--window", least - 1) == 2 and not list(tmp_path.iterdir())
    assert run(*given, "--window", least, "--rank", 8, "--tokens", 3000, "--device", "cpu") == 0


def test_help_teaches_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    assert "Example: forerun calibrate --target" in " ".join(capsys.readouterr().out.split())
