"""The C library: compiled once, cached, and done without where it cannot be had; nothing half-written is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from forerun import LLM
from forerun.models.cpu import library as module
from forerun.models.cpu.library import library
from tests import tiny


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder without a library, and none in memory."""
    monkeypatch.setenv("FORERUN_HOME", str(tmp_path))
    library.cache_clear()
    yield tmp_path / "kernels"
    library.cache_clear()


def compiler(folder: Path, script: str) -> str:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_compiled_once(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert library() is not None
    (made,) = empty.iterdir()
    library.cache_clear()
    monkeypatch.setattr(module, "_compile", None)  # not called again
    assert library() is not None and list(empty.iterdir()) == [made]


@pytest.mark.parametrize("script", ["exit 1", "exit 0", "sleep 60"])
def test_a_compiler_that_fails_or_hangs(
    script: str, empty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", compiler(tmp_path, script))
    monkeypatch.setattr(module, "COMPILE_S", 0.5)
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    assert library() is None
    assert not list(empty.glob("*")) and len(caplog.messages) == 1 and "int8" in caplog.messages[0]


def test_a_damaged_library_is_not_used(empty: Path, caplog: pytest.LogCaptureFixture) -> None:
    empty.mkdir(parents=True)
    (empty / f"{module.build_key()}.so").write_bytes(b"not a library")
    assert library() is None and "cannot be loaded" in caplog.text


def test_without_kernels_a_model_is_computed_in_int8(
    empty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny.write_folder(tmp_path / "model", "llama")  # float32: no blocks at all
    with LLM(folder, quantization="file", quiet=True) as llm:
        assert llm.precision.name == "int8"
    assert "own blocks" in caplog.text
