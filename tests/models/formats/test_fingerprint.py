"""Fingerprints: the same for the same weights whatever the file, another for any other weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun.models.formats.fingerprint import fingerprint
from forerun.models.formats.load import open_checkpoint
from tests import tiny


def mark(path: Path) -> str:
    return fingerprint(open_checkpoint(path))


def copy(folder: Path, into: Path) -> Path:
    return Path(shutil.copytree(folder, into / "copy"))


def test_it_is_short_and_always_the_same(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    found = mark(tiny_folder("qwen2"))
    assert len(found) == 32 and set(found) <= set("0123456789abcdef")
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
    ],
)
def test_one_changed_weight(
    tensor: str, at: tuple[int, ...], tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = copy(tiny_folder("qwen2"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    changed = tensors[tensor].clone()
    changed[at] += 0.001
    save_file(tensors | {tensor: changed}, folder / "model.safetensors", metadata={"format": "pt"})
    assert mark(folder) != mark(tiny_folder("qwen2"))


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
