"""`forerun models`: what it prints about models that are here, and that removing asks the store."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from forerun.cli import main
from forerun.commands.models import parameters
from forerun.models.fetch import store
from forerun.models.formats.checkpoint import open_checkpoint


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(["models", *args])
    return left.value.code or 0  # type: ignore[return-value]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORERUN_HOME", str(tmp_path))
    return tmp_path


def test_list_names_every_known_model(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shas = {known.hub: known.sha256 for known in store.KNOWN.values()}
    monkeypatch.setattr(store.HubFile, "sha256", lambda self: "" if "gemma" in self.file else shas[self])
    (home / "models").mkdir()
    (home / "models" / f"{store.DEFAULT_MODEL}.gguf").write_bytes(b"GGUF")
    assert run("list") == 0
    lines = capsys.readouterr().out.splitlines()
    sources = {name: next(line.split()[3] for line in lines if line.startswith(f"{name} ")) for name in store.KNOWN}
    expected = ["here", "hub", "hub", "packages"]  # the hub has another file, or none, of the last one
    assert list(sources.values()) == expected


def test_rm_of_what_is_not_here_is_an_error(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("rm", store.DEFAULT_MODEL) == 1
    assert store.DEFAULT_MODEL in capsys.readouterr().err


def test_info_describes_the_file(tiny_folder: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny_folder("gemma3")
    assert run("info", str(folder)) == 0
    out = capsys.readouterr().out
    assert "gemma3" in out and "7 of width 64" in out and "8 in sliding layers" in out
    assert run("info", str(folder), "--json") == 0
    assert json.loads(capsys.readouterr().out)["config"]["num_layers"] == 7


def test_info_quality_compares_modes_with_float32(
    tiny_folder: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("info", str(tiny_folder("llama")), "--quality", "--tokens", "48", "--threads", "1", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["quality"]
    assert {(row["weights"], row["text"]) for row in rows} == {
        (weights, text) for weights in ("fp16", "int8") for text in ("prose", "code")
    }
    by_mode = {row["weights"]: row["kl"] for row in rows if row["text"] == "prose"}
    assert 0 <= by_mode["fp16"] < by_mode["int8"] < 1


def test_parameters_are_counted_from_the_shape(tiny_folder: Callable[[str], Path]) -> None:
    checkpoint = open_checkpoint(tiny_folder("llama"))
    layers = range(checkpoint.config.num_layers)
    names = [f"layers.{i}.{part}" for i in layers for part in ("q", "k", "v", "o", "gate", "up", "down")]
    assert parameters(checkpoint.config) == sum(checkpoint.tensor(name).numel() for name in [*names, "embed", "head"])
