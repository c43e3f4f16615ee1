"""`forerun lab` as it is typed: tables, JSON, files, and errors in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from forerun.cli import main
from tests.research.studies.common import write_data

STUDY = """
model: overridden
weights: float32
device: cpu
threads: 1
measures:
  - agreement: {prompts: 4, length: 200, continuation: 4, texts: [essays]}
  - copy: {prompts: 1, text: essays, length: 200, span: 48}
"""


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(["lab", "run", *args])
    return int(left.value.code or 0)


def test_a_study_from_the_command_line(
    tiny_folder: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    file, out = tmp_path / "study.yaml", tmp_path / "out"
    file.write_text(STUDY)
    asked = [str(file), "--model", str(tiny_folder("llama")), "--data", str(write_data(tmp_path / "data"))]
    asked += ["--out", str(out), "--prompts", "2"]
    assert run(*asked, "--only", "agreement") == 0
    text = capsys.readouterr().out
    assert "agreement" in text and "exact" in text and "copy" not in text and "0.000 (0.000 to 0.000)" in text
    assert run(*asked, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [table["measure"] for table in found["tables"]] == ["agreement", "copy"] and found["failures"] == 0
    (out / "copy.png").unlink()
    assert run(*asked, "--json", "--report-only") == 0
    assert json.loads(capsys.readouterr().out) == found and (out / "copy.png").exists()
    lines = (out / "results.jsonl").read_text().splitlines()
    assert sum('"agreement"' in line and '"record"' in line for line in lines) == 2  # not measured a second time
    assert (out / "agreement.png").exists() and (out / "report.json").exists()


def test_a_misspelt_study_is_one_line_of_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "study.yaml"
    file.write_text(STUDY.replace("prompts: 4", "promts: 4"))
    assert run(str(file), "--out", str(tmp_path / "out")) == 1
    error = capsys.readouterr().err
    assert "agreement: unknown 'promts'" in error and "hint: known are" in error and not (tmp_path / "out").exists()


def test_studies_of_the_package_are_found_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["lab", "list"])
    listed = capsys.readouterr().out
    assert not left.value.code and "prefill_agreement" in listed and "prefill_failures" in listed
    assert run("prefill_agrement", "--out", str(tmp_path)) == 1
    error = capsys.readouterr().err
    assert "'prefill_agrement'" in error and "prefill_agreement" in error
    with pytest.raises(SystemExit):  # found, opened and checked; the model that it is given is not there
        main(["lab", "run", "prefill_self", "--model", str(tmp_path / "none"), "--out", str(tmp_path)])
    assert "none" in capsys.readouterr().err
