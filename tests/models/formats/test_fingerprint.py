"""Fingerprints: the same for the same weights whatever the file, another for any other weights."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun.models.formats import fingerprint as module
from forerun.models.formats.checkpoint import Checkpoint, open_checkpoint
from forerun.models.formats.fingerprint import fingerprint, sampled_fingerprint
from tests import tiny


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "home", lambda: tmp_path / "home")


def mark(path: Path) -> str:
    return fingerprint(open_checkpoint(path))


def copy(folder: Path, into: Path) -> Path:
    return Path(shutil.copytree(folder, into / "copy"))


def test_it_is_short_and_always_the_same(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    found = mark(tiny_folder("qwen2"))
    assert len(found) == 64 and set(found) <= set("0123456789abcdef")
    assert found == mark(tiny_folder("qwen2")) == mark(copy(tiny_folder("qwen2"), tmp_path))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_format_does_not_count_but_the_quantisation_does(
    family: str, tiny_folder: Callable[[str], Path], tiny_gguf: Callable[..., Path]
) -> None:
    if family != "gemma3":  # tiny Gemma's softmax scale is one that GGUF cannot say
        assert mark(tiny_folder(family)) == mark(tiny_gguf(family, "F32"))
    assert len({mark(tiny_gguf(family, kind)) for kind in ("F32", "F16", "Q8_0")}) == 3


@pytest.mark.parametrize(
    ("tensor", "at"),
    [
        ("model.norm.weight", (5,)),
        ("model.layers.2.input_layernorm.weight", (63,)),
        ("model.layers.3.self_attn.k_proj.bias", (7,)),
        ("model.layers.1.mlp.down_proj.weight", (0, 17)),
        ("model.layers.0.self_attn.q_proj.weight", (63, 3)),
        ("model.embed_tokens.weight", (511, 0)),
        ("lm_head.weight", (0, 9)),
        # between the rows that a sampled fingerprint reads: one neuron, one token's embedding
        ("model.layers.2.mlp.up_proj.weight", (37, 5)),
        ("model.embed_tokens.weight", (100, 3)),
        ("lm_head.weight", (201, 9)),
    ],
)
def test_one_changed_weight(
    tensor: str, at: tuple[int, ...], tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = copy(tiny_folder("qwen2"), tmp_path)
    change(folder, tensor, at)
    assert mark(folder) != mark(tiny_folder("qwen2"))


def change(folder: Path, tensor: str, at: tuple[int, ...]) -> None:
    tensors = load_file(folder / "model.safetensors")
    changed = tensors[tensor].clone()
    changed[at] += 0.001
    save_file(tensors | {tensor: changed}, folder / "model.safetensors", metadata={"format": "pt"})


def test_samples_name_a_model_but_do_not_tell_edited_ones_apart(
    tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = copy(tiny_folder("qwen2"), tmp_path)
    change(folder, "model.embed_tokens.weight", (100, 3))
    old, new = (sampled_fingerprint(open_checkpoint(path)) for path in (tiny_folder("qwen2"), folder))
    assert old == new and len(old) == 32


def test_samples_are_read_once_until_weights_or_configuration_change(
    tiny_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hashed: list[str]
) -> None:
    read, original = [], module._hash_samples
    monkeypatch.setattr(module, "_hash_samples", lambda *given: read.append(1) or original(*given))
    folder = copy(tiny_folder("qwen2"), tmp_path)
    config = json.loads((folder / "config.json").read_text())

    def name() -> str:
        return sampled_fingerprint(open_checkpoint(folder))

    first, whole = name(), mark(folder)
    assert (name(), mark(folder)) == (first, whole) and (len(read), len(hashed)) == (1, 1)  # neither drops the other
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-4}))
    assert name() != first and len(read) == 2
    (folder / "config.json").write_text(json.dumps(config))
    assert name() == first and len(read) == 2
    change(folder, "model.norm.weight", (5,))
    assert name() != first and mark(folder) != whole and (len(read), len(hashed)) == (3, 2)


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models whose tensors were read and not found in the cache."""
    read: list[str] = []
    original = module._hash_tensors

    def count(checkpoint: Checkpoint, quiet: bool) -> str:
        read.append(checkpoint.source)
        return original(checkpoint, quiet)

    monkeypatch.setattr(module, "_hash_tensors", count)
    return read


def test_tensors_are_read_once_until_a_file_changes(
    tiny_folder: Callable[[str], Path], tmp_path: Path, hashed: list[str]
) -> None:
    folder = copy(tiny_folder("llama"), tmp_path)
    first = mark(folder)
    assert mark(folder) == first and len(hashed) == 1
    file = folder / "model.safetensors"
    times = (file.stat().st_atime_ns, file.stat().st_mtime_ns)
    change(folder, "model.embed_tokens.weight", (100, 3))
    os.utime(file, ns=times)  # same path, size and time of change: the inode's own time still differs
    second = mark(folder)
    assert second != first and len(hashed) == 2 and mark(folder) == second


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"files": [], "weights": "0"}', b"\xff\xfe"])
def test_a_damaged_cache_is_ignored(
    damage: bytes, tiny_folder: Callable[[str], Path], tmp_path: Path, hashed: list[str]
) -> None:
    folder = copy(tiny_folder("llama"), tmp_path)
    first = mark(folder)
    [entry] = (tmp_path / "home" / "fingerprints").glob("*.json")
    entry.write_bytes(damage)
    assert mark(folder) == first and len(hashed) == 2
    assert mark(folder) == first and len(hashed) == 2  # written anew


def test_a_folder_that_cannot_be_written_costs_another_reading(
    tiny_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hashed: list[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(module, "home", lambda: tmp_path / "file")
    assert mark(tiny_folder("llama")) == mark(tiny_folder("llama")) and len(hashed) == 2


def test_a_fine_tune_is_another_model(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copy(tiny_folder("llama"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if "v_proj" in name]:  # adapters often change no more than this
        tensors[name] = tensors[name] + 1e-4 * torch.randn_like(tensors[name])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert mark(folder) != mark(tiny_folder("llama"))


@pytest.mark.parametrize(
    ("change", "counts"),
    [
        ({"rms_norm_eps": 1e-4}, True),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}}, True),
        ({"max_position_embeddings": 512}, False),
        ({"eos_token_id": 1}, False),
    ],
)
def test_the_configuration_counts_as_far_as_it_changes_numbers(
    change: dict[str, object], counts: bool, tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = copy(tiny_folder("qwen2"), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    assert (mark(folder) != mark(tiny_folder("qwen2"))) is counts
