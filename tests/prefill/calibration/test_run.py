"""A whole calibration of tiny models: a profile comes out that knows its models and drafts better than nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.errors import BadRequest
from forerun.models.formats.checkpoint import open_checkpoint
from forerun.models.formats.fingerprint import fingerprint
from forerun.prefill.calibration import run
from forerun.prefill.calibration.fit import _examples
from forerun.prefill.calibration.model_pair import ModelPair
from forerun.prefill.calibration.quality import CURVE_SHARES
from forerun.prefill.calibration.ridge import Ridge
from forerun.prefill.calibration.run import calibrate
from forerun.prefill.calibration.setup import FitSettings
from forerun.prefill.calibration.windows import WindowSettings, read_windows
from forerun.prefill.checks import SIGNALS, check_thresholds
from forerun.prefill.maps import Maps
from forerun.prefill.profile import Profile

CPU = torch.device("cpu")
TEXT = WindowSettings(prompt=300, continuation=16, tokens=8000)
SETTINGS = FitSettings(rank=64, steps=3)


@pytest.fixture(scope="module")
def made(models: tuple[Path, Path], text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "pair.profile"
    calibrate(str(models[0]), str(models[1]), [text], out, SETTINGS, TEXT, CPU, quiet=True, force=True)
    return out


def test_a_profile_comes_out(made: Path, models: tuple[Path, Path]) -> None:
    profile = Profile.load(made)
    target, draft = (fingerprint(open_checkpoint(path)) for path in models)
    profile.check(target, draft)
    assert (profile.kind, profile.names) == ("draft", {"target": "target", "source": "draft"})
    maps = profile.maps
    assert (maps.base, maps.rank, maps.taps, maps.target_embedding) == (1, 64, (0, 1, 2), True)
    assert [p.share for p in profile.curve] == list(CURVE_SHARES) and profile.share in CURVE_SHARES
    assert set(profile.thresholds) == {*SIGNALS, "kl"}
    check_thresholds(profile.thresholds, 4)
    assert profile.facts["steps"] == 3 and profile.facts["files"] == 6 and profile.facts["train_tokens"] > 4000
    held = profile.facts["held_tokens"] // TEXT.length
    assert profile.facts["selected_on"] == held  # so few that all of them served both ends, and it is said
    assert [p.name for p in made.parent.iterdir()] == ["pair.profile"]  # the state is gone
    (kind,) = profile.facts["texts"]
    assert kind == "prose" and profile.facts["texts"][kind]["holds"] is False


def test_drafts_are_closer_after_fitting(made: Path, pair: ModelPair, models: tuple[Path, Path], text: Path) -> None:
    held = read_windows([text], open_checkpoint(models[0]).tokenizer(), TEXT).held.long()
    features, outputs = _examples(pair, held)

    def error(maps: Maps) -> float:
        return float((maps(features) - outputs).norm() / outputs.norm())

    fitted = Profile.load(made).maps.to(CPU, torch.float32)
    mean = replace(fitted, up=torch.zeros_like(fitted.up), up_bias=outputs.mean(0))  # the best that ignores the tokens
    unfitted = replace(fitted, down=torch.randn_like(fitted.down) * fitted.down.std())
    assert error(fitted) < 0.95 * error(mean) < 0.95 * error(unfitted)


def test_the_target_alone(models: tuple[Path, Path], text: Path, tmp_path: Path) -> None:
    settings = FitSettings(base=2, rank=24, distill=False, quality=0.5)
    profile = calibrate(str(models[0]), None, [text], tmp_path / "a", settings, TEXT, CPU, quiet=True)
    assert profile.kind == "self" and profile.maps.base == 2 and profile.source_cost == 0.5
    assert profile.facts["steps"] == 0 and profile.source == profile.target
    Profile.load(tmp_path / "a").check(fingerprint(open_checkpoint(models[0])), None)


def test_a_profile_is_measured_anew_with_its_own_maps(
    made: Path, models: tuple[Path, Path], text: Path, tmp_path: Path
) -> None:
    settings, out = FitSettings(maps=str(made)), tmp_path / "again"
    again = calibrate(str(models[0]), str(models[1]), [text], out, settings, TEXT, CPU, quiet=True, force=True)
    before, loaded = Profile.load(made), Profile.load(out)
    torch.testing.assert_close(loaded.maps.up, before.maps.up, rtol=1e-2, atol=1e-5)
    assert [p.kl for p in again.curve] == pytest.approx([p.kl for p in before.curve], rel=0.02)
    assert again.facts["maps"]["steps"] == 3 and "selected_on" not in again.facts
    with pytest.raises(BadRequest, match="drafts by 'draft', and no --draft-model is given"):
        calibrate(str(models[0]), None, [text], out, settings, TEXT, CPU, quiet=True)


def test_maps_of_a_profile_are_trained_on(
    made: Path, models: tuple[Path, Path], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("there is no first fit")

    monkeypatch.setattr(Ridge, "add", fail)
    settings, out, names = FitSettings(start=str(made), steps=4), tmp_path / "more", list(map(str, models))
    more = calibrate(names[0], names[1], [text], out, settings, TEXT, CPU, quiet=True, force=True)
    before = Profile.load(made)
    measured = FitSettings(maps=str(made))
    again = calibrate(names[0], names[1], [text], tmp_path / "b", measured, TEXT, CPU, quiet=True, force=True)
    assert more.facts["steps"] == 4 and more.maps.rank == before.maps.rank == 64
    assert more.facts["ridge_kl"] == pytest.approx(before.facts["distilled_kl"], rel=0.05)  # where the other one ended
    assert more.curve[2].kl <= 1.02 * again.curve[2].kl  # the best maps are kept, those that were given among them
    with pytest.raises(BadRequest, match=r"to be trained on \(start\) cannot be kept"):
        FitSettings(start=str(made), maps=str(made))


def test_ctrl_c_and_again(
    made: Path, models: tuple[Path, Path], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = map(str, models)
    out = tmp_path / "pair.profile"
    calls = 0

    class Stopped(run.CalibrationState):
        def save_point(self, values: Any) -> None:
            nonlocal calls
            calls += 1
            self.stop_requested = calls == 9
            super().save_point(values)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(run, "CalibrationState", Stopped)
        calibrate(target, draft, [text], out, SETTINGS, TEXT, CPU, quiet=True)
    assert [p.name for p in tmp_path.iterdir()] == ["pair.profile.state"]
    with pytest.raises(BadRequest, match="state of another calibration: rank was 64, is 8"):
        calibrate(target, draft, [text], out, replace(SETTINGS, rank=8), TEXT, CPU, quiet=True)
    with pytest.raises(BadRequest, match=r"agreement of 0\.\d\d with exact prefill.* not saved") as refused:
        calibrate(target, draft, [text], out, SETTINGS, TEXT, CPU, quiet=True)
    assert "--force" in refused.value.hint and [p.name for p in tmp_path.iterdir()] == ["pair.profile.state"]
    calibrate(target, draft, [text], out, SETTINGS, TEXT, CPU, quiet=True, force=True)
    assert [p.name for p in tmp_path.iterdir()] == ["pair.profile"]
    ours, straight = Profile.load(out), Profile.load(made)
    assert ours.share == straight.share
    torch.testing.assert_close(ours.maps.up, straight.maps.up, atol=2e-3, rtol=2e-2)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
)
def test_memory_ends(
    error: Exception, models: tuple[Path, Path], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(Ridge, "add", fail)
    with pytest.raises(BadRequest, match="4 windows of 316 tokens at a time and maps of rank 64") as told:
        calibrate(str(models[0]), None, [text], tmp_path / "a", SETTINGS, TEXT, CPU, quiet=True)
    assert "--batch" in told.value.hint and "--rank" in told.value.hint


def test_other_errors_are_not_taken_for_it(
    models: tuple[Path, Path], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr(Ridge, "add", fail)
    with pytest.raises(RuntimeError, match="something else"):
        calibrate(str(models[0]), None, [text], tmp_path / "a", SETTINGS, TEXT, CPU, quiet=True)
