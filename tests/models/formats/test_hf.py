"""Safetensors folders: tensors equal transformers' own, shards, every configuration layout, and damaged folders."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from forerun.errors import CorruptModel, ModelNotFound
from forerun.models.formats.checkpoint import expected_shapes, open_checkpoint
from tests import tiny


def copy(folder: Path, out: Path, **config: Any) -> Path:
    """A copy of a model folder with keys of its config.json changed (None removes one)."""
    shutil.copytree(folder, out)
    values = json.loads((out / "config.json").read_text()) | config
    (out / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    return out


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_parameter_is_reached(family: str, tiny_folder: Callable[[str], Path]) -> None:
    """As many numbers as transformers loads, and the same ones (Gemma's norms plus one)."""
    checkpoint = open_checkpoint(tiny_folder(family))
    model = AutoModelForCausalLM.from_pretrained(tiny_folder(family))
    names = expected_shapes(checkpoint.config)
    assert sum(checkpoint.tensor(name).numel() for name in names) == sum(p.numel() for p in model.parameters())
    norm = model.model.layers[1].input_layernorm.weight + (1.0 if family == "gemma3" else 0.0)
    torch.testing.assert_close(checkpoint.tensor("layers.1.attn_norm"), norm.detach())
    assert torch.equal(checkpoint.tensor("layers.3.down"), model.model.layers[3].mlp.down_proj.weight)
    ids = torch.tensor([3, 1, 500])
    assert torch.equal(checkpoint.rows("embed", ids), model.model.embed_tokens.weight[ids])


def test_gemma3_norms_are_told_apart(tiny_folder: Callable[[str], Path]) -> None:
    checkpoint = open_checkpoint(tiny_folder("gemma3"))
    layer = AutoModelForCausalLM.from_pretrained(tiny_folder("gemma3")).model.layers[2]
    for ours, theirs in {
        "post_attn_norm": layer.post_attention_layernorm,
        "mlp_norm": layer.pre_feedforward_layernorm,
        "post_mlp_norm": layer.post_feedforward_layernorm,
        "q_norm": layer.self_attn.q_norm,
    }.items():
        torch.testing.assert_close(checkpoint.tensor(f"layers.2.{ours}"), theirs.weight.detach() + 1.0)


def test_shards(tmp_path: Path, tiny_folder: Callable[[str], Path]) -> None:
    sharded = tiny.write_folder(tmp_path / "sharded", "llama", max_shard_size="200KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    one, many = open_checkpoint(tiny_folder("llama")), open_checkpoint(sharded)
    for name in expected_shapes(one.config):
        assert torch.equal(one.tensor(name), many.tensor(name))
    victim = sorted(sharded.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(CorruptModel, match=f"{victim.name}.*missing"):
        open_checkpoint(sharded)


def test_release_keeps_the_data_readable(tiny_folder: Callable[[str], Path]) -> None:
    checkpoint = open_checkpoint(tiny_folder("llama"))
    before = checkpoint.tensor("layers.0.q")
    checkpoint.release()
    assert torch.equal(before, checkpoint.tensor("layers.0.q"))


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_text_part_of_a_model_that_sees(prefix: str, tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    plain = open_checkpoint(tiny_folder("gemma3"))
    seeing = copy(tiny_folder("gemma3"), tmp_path / "seeing")
    text = json.loads((seeing / "config.json").read_text())
    root = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    (seeing / "config.json").write_text(json.dumps(root))
    tensors = load_file(seeing / "model.safetensors")
    renamed = {prefix + name.removeprefix("model."): value for name, value in tensors.items()}
    save_file(renamed | {"vision_tower.x": torch.zeros(3)}, seeing / "model.safetensors")
    checkpoint = open_checkpoint(seeing)
    assert checkpoint.config == plain.config
    for name in expected_shapes(plain.config):
        assert torch.equal(checkpoint.tensor(name), plain.tensor(name))


@pytest.mark.parametrize("cut", [4, 100, 5000, -1])
def test_truncated_weights(cut: int, tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copy(tiny_folder("llama"), tmp_path / "cut")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(CorruptModel, match="model.safetensors is truncated or damaged"):
        open_checkpoint(folder)


def test_missing_and_misshapen_tensors(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copy(tiny_folder("llama"), tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(tensors | {name: torch.zeros(3, 64)}, folder / "model.safetensors")
    with pytest.raises(CorruptModel, match=r"up_proj.weight' has shape \[3, 64\], expected \[128, 64\]"):
        open_checkpoint(folder)
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CorruptModel, match="up_proj.weight' is missing"):
        open_checkpoint(folder)


def test_no_weights(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copy(tiny_folder("llama"), tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelNotFound, match="no .safetensors file; it has .bin weights"):
        open_checkpoint(folder)


def test_damaged_config(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copy(tiny_folder("llama"), tmp_path / "m")
    (folder / "config.json").write_text('{"architectures": ["Llama')
    with pytest.raises(CorruptModel, match="config.json is not valid JSON"):
        open_checkpoint(folder)


def test_missing_tokenizer(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copy(tiny_folder("llama"), tmp_path / "m")
    checkpoint = open_checkpoint(folder)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(CorruptModel, match="tokenizer.json cannot be read"):
        checkpoint.tokenizer()
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelNotFound, match="no tokenizer.json"):
        checkpoint.tokenizer()
