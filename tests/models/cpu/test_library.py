"""The C library: compiled once, cached, and done without where it cannot be had; nothing half-written is loaded."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from forerun import LLM
from forerun.models.cpu import library as module
from forerun.models.cpu.library import library
from tests import tiny


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a compiler makes of the sources."""
    return module._compile(tmp_path_factory.mktemp("compiled"))


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder without a library, and none in memory; no compiler out of a wheel."""
    monkeypatch.setenv("FORERUN_HOME", str(tmp_path))
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    library.cache_clear()
    yield tmp_path / "kernels"
    library.cache_clear()


def compiler(folder: Path, script: str) -> str:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def writing(content: Path) -> str:
    """A compiler that takes its time and writes `content` to what follows -o."""
    return f'while [ "$1" != -o ]; do shift; done; sleep 0.2; cp "{content}" "$2"'


@pytest.fixture
def quick(empty: Path, tmp_path: Path, compiled: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that has the library already, and counts its runs; the cache folder."""
    monkeypatch.setenv("CC", compiler(tmp_path, f'echo >> "{tmp_path}/runs"; {writing(compiled)}'))
    return empty


def runs(folder: Path) -> int:
    return len((folder.parent / "runs").read_text().splitlines())


def one_warning(caplog: pytest.LogCaptureFixture, *parts: str) -> None:
    (message,) = caplog.messages
    assert "int8" in message and "\n" not in message
    for part in parts:
        assert part in message, message


def test_compiled_once(quick: Path) -> None:
    assert library() is not None
    (made,) = quick.iterdir()
    library.cache_clear()
    assert library() is not None and list(quick.iterdir()) == [made] and runs(quick) == 1


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo no such option >&2; echo at all >&2; exit 1", "no such option at all"),
        ("exit 0", "it made no library"),
        (f"{writing(Path('/dev/null'))}", "it made no library"),
        ("printf '\\377\\376' >&2; exit 1", "compiler: "),
    ],
    ids=["fails", "makes nothing", "makes an empty file", "writes no text"],
)
def test_a_compiler_that_fails(
    script: str,
    why: str,
    empty: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("CC", compiler(tmp_path, script))
    assert library() is None and not list(empty.glob("*"))
    one_warning(caplog, why)


def test_a_compiler_that_hangs_is_ended_with_its_children(
    empty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", compiler(tmp_path, f"sleep 600 & echo $! > {tmp_path}/child; wait"))
    monkeypatch.setattr(module, "COMPILE_S", 1.0)
    assert library() is None and not list(empty.glob("*"))
    one_warning(caplog, "longer than 1 s")
    child = int((tmp_path / "child").read_text())
    end = time.monotonic() + 10
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end, "the child still runs"
        time.sleep(0.01)


@pytest.mark.parametrize("named", [None, "no-such-compiler --fast"])
def test_without_a_compiler(
    named: str | None, empty: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(empty))
    monkeypatch.setenv("CC", named or "")
    assert library() is None and not list(empty.glob("*"))
    one_warning(caplog, "no-such-compiler: " if named else "pip install ziglang")


def test_a_compiler_whose_name_cannot_be_read(
    empty: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", '"gcc')
    assert library() is None
    one_warning(caplog, "No closing quotation")


def test_a_compiler_with_arguments(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", f"sh {os.environ['CC']}")
    assert library() is not None


def test_a_folder_that_cannot_be_made(
    quick: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FORERUN_HOME", str(tmp_path / "file"))
    assert library() is None
    one_warning(caplog, "cannot write to", "Not a directory")


@pytest.mark.parametrize(("step", "number"), [("mkdtemp", errno.EROFS), ("replace", errno.ENOSPC)])
def test_a_folder_that_is_full_or_read_only(
    step: str, number: int, quick: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(module.tempfile if step == "mkdtemp" else module.os, step, refuse)
    assert library() is None and not list(quick.glob("*"))
    one_warning(caplog, "cannot write to", os.strerror(number))


@pytest.mark.parametrize("change", ["cut short", "one byte", "empty", "no library"])
def test_a_damaged_library_is_compiled_anew(change: str, quick: Path) -> None:
    assert library() is not None
    (path,) = quick.iterdir()
    whole = path.read_bytes()
    middle = len(whole) // 2
    damaged = {
        "cut short": whole[:middle],
        "one byte": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
        "empty": b"",
        "no library": b"not a library",
    }[change]
    replaced = path.with_suffix(".new")  # a new file: this process has the other one mapped
    replaced.write_bytes(damaged)
    os.replace(replaced, path)
    library.cache_clear()
    assert library() is not None and path.read_bytes() == whole and runs(quick) == 2


def test_another_version_or_cpu_has_a_library_of_its_own(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert library() is not None
    monkeypatch.setattr(module, "_cpu", lambda: "avx2 and little else")
    library.cache_clear()
    assert library() is not None and runs(quick) == 2
    monkeypatch.setattr(module, "ABI", module.ABI + 1)
    library.cache_clear()
    assert library() is not None and runs(quick) == 3 == len(list(quick.iterdir()))


@pytest.mark.parametrize(("cpu", "machine"), [("sse4_2", "x86_64"), ("avx2", "riscv64")])
def test_a_cpu_that_the_kernels_are_not_for(
    cpu: str, machine: str, quick: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_cpu", lambda: cpu)
    monkeypatch.setattr(module.platform, "machine", lambda: machine)
    assert library() is None
    one_warning(caplog, "AVX2" if machine == "x86_64" else "riscv64")


def test_every_64_bit_arm_cpu_has_what_the_kernels_need(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_cpu", lambda: "fp asimd")
    monkeypatch.setattr(module.platform, "machine", lambda: "aarch64")
    assert library() is not None and runs(quick) == 1


def test_macos_is_done_without(quick: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(module.sys, "platform", "darwin")
    monkeypatch.setattr(module.platform, "machine", lambda: "arm64")
    assert library() is None
    one_warning(caplog, "darwin on arm64")


def test_a_library_without_the_functions_is_not_used(
    empty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "no.c").write_text("int nothing;")
    subprocess.run(["cc", "-shared", "-o", tmp_path / "no.so", tmp_path / "no.c"], check=True)
    monkeypatch.setenv("CC", compiler(tmp_path, writing(tmp_path / "no.so")))
    assert library() is None
    one_warning(caplog, "cannot be loaded")


def test_processes_that_compile_at_once_leave_one_whole_library(quick: Path) -> None:
    code = "import sys; from forerun.models.cpu.library import library; sys.exit(library() is None)"
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    (made,) = quick.iterdir()
    assert module._whole(made)


def test_what_a_killed_process_left_is_removed(quick: Path) -> None:
    old, new = quick / "tmp-old", quick / "tmp-new"
    for folder in (old, new):
        folder.mkdir(parents=True)
        (folder / "kernels.so").write_bytes(b"half")
    os.utime(old, (0, 0))
    assert library() is not None and not old.exists() and new.exists()  # another process may be at work there


def test_without_kernels_a_model_is_computed_in_int8(
    empty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny.write_folder(tmp_path / "model", "llama")  # float32: no blocks at all
    with LLM(folder, quantization="file", quiet=True) as llm:
        assert llm.precision.name == "int8"
    assert "own blocks" in caplog.text
