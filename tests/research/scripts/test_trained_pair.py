"""A pair trained on the spot: what its parts leave for each other."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from forerun.models.formats.checkpoint import open_checkpoint
from forerun_research.bench.shapes import SHAPES
from forerun_research.scripts import trained_pair
from forerun_research.studies import small_models
from forerun_research.studies.study import load

TEXTS = [f"def work_{n}(value):\n    return value * {n} + offset({n % 7})\n" * 8 for n in range(40)]


def test_models_of_one_tokenizer_and_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trained_pair, "code_texts", lambda limit: TEXTS)
    monkeypatch.setattr(trained_pair, "CALIBRATION_CHARS", 3000)
    monkeypatch.setattr(small_models, "ROW_TOKENS", 64)
    trained_pair.prepare(tmp_path, 400, 10**6, ["tiny", "tinier"])
    files = [tmp_path / name / "tokenizer.json" for name in ("tiny", "tinier")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert (np.load(tmp_path / trained_pair.STREAM) == 0).sum() == len(TEXTS)
    assert 0 < sum(path.stat().st_size for path in (tmp_path / "text").iterdir()) <= 3000
    small_models.network(SHAPES["tinier"])  # what is imported for it takes longer than the training
    for shape in ("tiny", "tinier"):
        trained_pair.train_one(tmp_path, shape, 0.7, "cpu")
        assert json.loads((tmp_path / f"{shape}.json").read_text())["steps"] >= 1
    target, draft = (open_checkpoint(tmp_path / shape) for shape in ("tiny", "tinier"))
    assert target.tokenizer().same_tokens(draft.tokenizer()) and draft.config.macs < target.config.macs


def test_a_study_of_the_pair_can_be_read(tmp_path: Path) -> None:
    study = load(trained_pair.write_study(tmp_path, "250m", trained_pair.folder_of("25m deep"), 4, 2048))
    assert [setting.name for setting in study.settings] == ["default", "5%", "10%", "20%"]
    assert study.settings[1].share == 0.05 and str(study.variants[0].profile).endswith("25m-deep.profile")
    assert [name for name, _ in study.measures] == ["agreement", "copy", "recall"]


def test_what_fails_side_by_side_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained_pair.together([["true"], ["false"]], tmp_path, ["good", "bad"])
    said = capsys.readouterr().out
    assert "bad failed: see bad.txt" in said and "good" not in said
