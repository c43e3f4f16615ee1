"""What calibration refuses before it begins, and what it chooses where nothing was said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from forerun.errors import BadRequest
from forerun.models.formats.fingerprint import fingerprint
from forerun.prefill.calibration import setup
from forerun.prefill.calibration.setup import FitSettings, check_window, check_writable, open_models
from tests import tiny


def test_a_pair(models: tuple[Path, Path]) -> None:
    target, draft = models
    subject = open_models(str(target), str(draft), FitSettings(), 480)
    assert (subject.kind, subject.base, subject.taps) == ("draft", 1, (0, 1, 2))
    assert subject.fingerprints == (fingerprint(subject.target), fingerprint(subject.source))  # type: ignore[arg-type]
    pair = subject.build(torch.device("cpu"), quiet=True)
    assert not pair.alone and pair.mapped == 3 and pair.target.dtype == torch.float32


def test_a_target_that_drafts_for_itself(models: tuple[Path, Path]) -> None:
    subject = open_models(str(models[0]), None, FitSettings(base=2), 480)
    assert (subject.kind, subject.base, subject.taps) == ("self", 2, (0, 1, 2))
    assert subject.fingerprints[0] == subject.fingerprints[1]
    assert subject.build(torch.device("cpu"), quiet=True).alone


def test_taps_are_spread_and_bounded(models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    target = str(models[0])
    assert open_models(target, None, FitSettings(base=3, taps=2), 480).taps == (0, 3)
    assert open_models(target, None, FitSettings(base=3, taps=1), 480).taps == (3,)
    monkeypatch.setattr(setup, "MAX_MAP_INPUTS", 3 * 64)
    assert open_models(target, None, FitSettings(base=3), 480).taps == (0, 2, 3)
    with pytest.raises(BadRequest, match="the limit is 192"):
        open_models(target, None, FitSettings(base=3, taps=4), 480)


def test_the_targets_embedding_takes_some_of_the_inputs(
    models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = map(str, models)
    monkeypatch.setattr(setup, "MAX_MAP_INPUTS", 64 + 3 * 32)
    assert open_models(target, draft, FitSettings(), 480).taps == (0, 1, 2)
    monkeypatch.setattr(setup, "MAX_MAP_INPUTS", 64 + 3 * 32 - 1)
    assert open_models(target, draft, FitSettings(), 480).taps == (0, 2)
    with pytest.raises(BadRequest, match="make 160 inputs with the embedding of the target, the limit is 159") as error:
        open_models(target, draft, FitSettings(taps=3), 480)
    assert "--taps 2" in error.value.hint


def test_another_vocabulary(models: tuple[Path, Path], tmp_path: Path) -> None:
    other = tiny.write_folder(tmp_path / "other", "llama", num_hidden_layers=1)
    file = other / "tokenizer.json"
    stored = json.loads(file.read_text())
    vocabulary = stored["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(stored))
    with pytest.raises(BadRequest, match="another vocabulary") as error:
        open_models(str(models[0]), str(other), FitSettings(), 480)
    assert "--chooser cross" in error.value.hint


def test_a_draft_that_is_no_smaller(models: tuple[Path, Path]) -> None:
    target, draft = map(str, models)
    for wrong in ((draft, target), (target, target)):
        with pytest.raises(BadRequest, match="no smaller than the target"):
            open_models(*wrong, FitSettings(), 480)


def test_limits_of_the_models(models: tuple[Path, Path]) -> None:
    target, draft = map(str, models)
    with pytest.raises(BadRequest, match=r"2,112 tokens exceed the context of target, 2,048"):
        open_models(target, draft, FitSettings(), 2112)
    with pytest.raises(BadRequest, match="4 layers") as error:
        open_models(target, None, FitSettings(base=4), 480)
    assert "from 1 to 3" in error.value.hint


def test_windows_must_leave_something_to_draft() -> None:
    check_window(2048, 64)
    with pytest.raises(BadRequest, match="too short") as error:
        check_window(300, 64)
    least = int(error.value.hint.split()[2])
    check_window(least, 64)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "a.profile")
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "file").write_text("in the way")
    for wrong in (tmp_path, tmp_path / "file" / "a.profile"):
        with pytest.raises(BadRequest, match="cannot write a profile") as error:
            check_writable(wrong)
        assert "--out" in error.value.hint


@pytest.mark.parametrize("wrong", [{"rank": 0}, {"batch": 0}, {"quality": 0.2}, {"base": 0}, {"strength": -1.0}])
def test_settings_have_limits(wrong: dict[str, float]) -> None:
    (name,) = wrong
    with pytest.raises(BadRequest, match=f"{name} is"):
        FitSettings(**wrong)  # type: ignore[arg-type]
