"""`forerun models`: what it prints about models that are here, and that removing asks the store."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from forerun.cli import main
from forerun.commands.models import parameters
from forerun.decode.control.controller import Controller
from forerun.decode.control.cost import CostCurve
from forerun.decode.control.cost_cache import CostCache
from forerun.errors import BadProfile
from forerun.models.fetch import store
from forerun.models.formats.checkpoint import expected_shapes, open_checkpoint
from forerun.models.packed_cache import PackedKey, PackedWriter
from forerun.prefill.open_profile import open_profile
from tests.prefill.test_engine_prefill import random_profile


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


def keep(home: Path, name: str, files: tuple[Path, ...]) -> PackedKey:
    key = PackedKey(name, "int8", "cpu", "code")
    writer = PackedWriter(key, name, files)
    writer.add("levels", torch.zeros(3_000_000, dtype=torch.int8))
    writer.commit()
    CostCache([name], files).store(Controller(CostCurve({1: 1.0}), {}))
    return key


def test_rm_removes_what_was_computed_from_the_model(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, other = home / "models" / f"{store.DEFAULT_MODEL}.gguf", home / "other.gguf"
    model.parent.mkdir()
    for path in (model, other):
        path.write_bytes(b"GGUF")
    gone, stays = keep(home, "gone", (model,)), keep(home, "stays", (other,))
    assert len(list((home / "costs").iterdir())) == 2
    assert run("rm", store.DEFAULT_MODEL) == 0
    assert "3 MB of packed weights" in capsys.readouterr().out
    assert not model.exists() and not gone.path.exists() and stays.path.exists()
    assert len(list((home / "costs").iterdir())) == 1


def test_cache_lists_verifies_and_clears(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("cache") == 0 and "0 MB of packed weights" in capsys.readouterr().out
    keys = [keep(home, name, ()) for name in ("one", "two")]
    (home / "kernels").mkdir()
    (home / "kernels" / "a.so").write_bytes(b"x" * 2_000_000)
    assert run("cache") == 0
    out = capsys.readouterr().out
    assert "one" in out and "two" in out and "6 MB of packed weights" in out and "at most 8.00 GB" in out
    assert "2 MB of kernels" in out
    data = bytearray(keys[0].path.read_bytes())
    data[1_500_000] ^= 1
    keys[0].path.write_bytes(data)
    assert run("cache", "--verify") == 0
    out = capsys.readouterr().out
    assert "removed" in out and "(one)" in out and "1 of 2 files are whole" in out
    assert not keys[0].path.exists() and keys[1].path.exists()
    assert run("cache", "--clear") == 0
    assert "removed 5 MB" in capsys.readouterr().out
    assert not keys[1].path.exists() and not any((home / "costs").iterdir()) and not any((home / "kernels").iterdir())


@pytest.mark.parametrize("option", ["--clear", "--verify"])
def test_a_cache_that_cannot_be_changed(
    option: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def remove(entries: object) -> int:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("forerun.models.packed_cache.remove", remove)
    assert run("cache", option) == 1
    assert f"cannot change {home}: Read-only file system" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_export_writes_the_same_model_and_its_profile(
    family: str, tiny_gguf: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """float32 loses nothing of a quantised file; the profile goes with the folder and no longer with the file."""
    path, folder = tiny_gguf(family, "Q8_0"), tmp_path / "out"
    random_profile("self", path).save(tmp_path / "own")
    assert run("export", str(path), str(folder), "--dtype", "float32", "--prefill-profile", str(tmp_path / "own")) == 0
    assert "forerun.profile" in capsys.readouterr().out
    old, new = open_checkpoint(path), open_checkpoint(folder)
    assert new.config == old.config
    assert all(torch.equal(old.tensor(name), new.tensor(name)) for name in expected_shapes(old.config))
    talk = [{"role": "user", "content": "Hello"}]
    assert new.tokenizer().apply_chat_template(talk) == old.tokenizer().apply_chat_template(talk)
    assert set(new.tokenizer().eos_ids) == set(old.tokenizer().eos_ids)
    assert open_profile(folder / "forerun.profile", new) is not None
    with pytest.raises(BadProfile):
        open_profile(folder / "forerun.profile", old)


def test_export_refuses_what_it_cannot_write(
    tiny_folder: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llama = str(tiny_folder("llama"))
    for arguments, text in (
        ((llama, str(tmp_path / "a"), "--dtype", "int8"), "--dtype is 'int8'"),
        ((llama, llama), "is there already"),
        ((str(tiny_folder("gemma3")), str(tmp_path / "b")), "cannot be written"),
    ):
        assert run("export", *arguments) == 1
        assert text in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
