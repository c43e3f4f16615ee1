"""States: saved when due or on Ctrl-C, and accepted with the same inputs only."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import pytest
import torch

from forerun.errors import BadRequest
from forerun.prefill.calibration import resume
from forerun.prefill.calibration.resume import CalibrationState

INPUTS = {"rank": 8, "taps": [0, 1], "target": "abc"}


def test_a_state_comes_back(tmp_path: Path) -> None:
    saved = CalibrationState(tmp_path / "a.profile", INPUTS)
    assert saved.values == {} and not saved.path.exists()
    saved._start -= 100.0
    saved.save({"sums": torch.arange(3), "done": 2})
    again = CalibrationState(tmp_path / "a.profile", dict(INPUTS))
    assert torch.equal(again.values["sums"], torch.arange(3)) and again.values["done"] == 2
    assert again.seconds >= 100.0  # those of earlier runs count
    again.remove()
    assert list(tmp_path.iterdir()) == []


def test_saving_waits_for_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = CalibrationState(tmp_path / "a.profile", INPUTS)
    saved.save_point(lambda: {"n": 1})
    assert not saved.path.exists()
    monkeypatch.setattr(resume, "SAVE_INTERVAL_S", 0.0)
    saved.save_point(lambda: {"n": 2})
    assert CalibrationState(tmp_path / "a.profile", INPUTS).values == {"n": 2}
    saved._save_s = 1e9  # a state so large that saving it would be most of the work
    saved.save_point(lambda: {"n": 3})
    assert CalibrationState(tmp_path / "a.profile", INPUTS).values == {"n": 2}


def test_other_arguments_are_refused_by_name(tmp_path: Path) -> None:
    CalibrationState(tmp_path / "a.profile", INPUTS).save({})
    with pytest.raises(BadRequest) as error:
        CalibrationState(tmp_path / "a.profile", INPUTS | {"rank": 16})
    assert "rank was 8, is 16" in str(error.value) and "taps" not in str(error.value)
    assert "same arguments" in error.value.hint and "a.profile.state" in error.value.hint


@pytest.mark.parametrize("room", [0, 5_000, 50_000])
def test_a_full_disk(tmp_path: Path, room: int) -> None:
    saved = CalibrationState(tmp_path / "a.profile", INPUTS)
    saved.save({"n": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        with pytest.raises(BadRequest, match=r"cannot write the state .*a\.profile\.state: File too large") as error:
            saved.save({"sums": torch.zeros(20_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "--out" in error.value.hint
    assert CalibrationState(tmp_path / "a.profile", INPUTS).values == {"n": 1}  # the last whole one
    assert [p.name for p in tmp_path.iterdir()] == ["a.profile.state"]


@pytest.mark.parametrize("data", [b"", b"no state at all", b"PK\x03\x04 half of one"])
def test_a_damaged_state(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.profile.state").write_bytes(data)
    with pytest.raises(BadRequest, match="not the state of a calibration") as error:
        CalibrationState(tmp_path / "a.profile", INPUTS)
    assert "delete" in error.value.hint


def test_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CalibrationState(tmp_path / "a.profile", INPUTS).save({})
    monkeypatch.setattr(resume, "STATE_VERSION", 3)
    with pytest.raises(BadRequest, match="version 2, this is 3"):
        CalibrationState(tmp_path / "a.profile", INPUTS)


def test_ctrl_c_waits_until_the_state_is_whole(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    saved = CalibrationState(tmp_path / "a.profile", INPUTS)
    done = 0
    with pytest.raises(KeyboardInterrupt), saved.defer_interrupt():
        for done in range(5):
            if done == 2:
                os.kill(os.getpid(), signal.SIGINT)
            saved.save_point(lambda: {"done": done})  # noqa: B023
    assert done == 2 and CalibrationState(tmp_path / "a.profile", INPUTS).values == {"done": 2}
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_does_not_wait(tmp_path: Path) -> None:
    saved = CalibrationState(tmp_path / "a.profile", INPUTS)
    with pytest.raises(KeyboardInterrupt), saved.defer_interrupt():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
    assert not saved.path.exists()


def test_a_state_beyond_the_limit_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = CalibrationState(tmp_path / "a", {})
    monkeypatch.setattr(resume, "MAX_STATE_BYTES", 100)
    state.save({"sums": {"xx": torch.zeros(5, 5)}})
    assert state.path.exists()
    before = state.path.read_bytes()
    state.save({"sums": {"xx": torch.zeros(5, 6)}})
    assert state.path.read_bytes() == before  # the last one that fits
    state.remove()
    assert not list(tmp_path.iterdir())
