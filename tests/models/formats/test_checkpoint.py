"""What a path is decides the loader; what is missing is named."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from forerun.errors import CorruptModel, ForerunError, ModelNotFound, UnsupportedModel
from forerun.models.formats.checkpoint import open_checkpoint
from forerun.models.formats.gguf import GGUFFile


def test_file_and_folders(tiny_folder: Callable[[str], Path], tiny_gguf: Callable[..., Path], tmp_path: Path) -> None:
    assert open_checkpoint(tiny_folder("qwen2")).config.family == "qwen2"
    assert open_checkpoint(tiny_gguf("qwen2")).source.endswith(".gguf")
    shutil.copy(tiny_gguf("qwen2"), tmp_path)
    assert open_checkpoint(tmp_path).config.family == "qwen2"  # a folder that holds one GGUF file


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no model at"):
        open_checkpoint(tmp_path / "absent.gguf")
    with pytest.raises(ModelNotFound, match="no config.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelNotFound, match="model.bin is neither") as caught:
        open_checkpoint(tmp_path / "model.bin")
    assert isinstance(caught.value, ForerunError) and ".gguf" in caught.value.hint


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("max_position_embeddings", 10**12),
        ("vocab_size", 10**30),
        ("rope_parameters", 5),
        ("rope_parameters", {"rope_theta": 0.0}),
        ("rms_norm_eps", {}),
        ("rms_norm_eps", -1.0),
        ("architectures", 1.5),
        ("head_dim", 15),
    ],
)
def test_absurd_configurations_are_refused(
    key: str, value: Any, tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "absurd"
    shutil.copytree(tiny_folder("llama"), folder)
    config = json.loads((folder / "config.json").read_text()) | {key: value}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises((CorruptModel, UnsupportedModel)):
        open_checkpoint(folder)


def test_numbers_that_are_none_are_found(
    tiny_folder: Callable[[str], Path], tiny_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    """A damaged scale makes a whole row infinite: said when the tensor is read, not in the answers."""
    file = tmp_path / "damaged.gguf"
    shutil.copy(tiny_gguf("llama", "Q8_0"), file)
    info = GGUFFile(file).tensors["blk.0.attn_q.weight"]
    data = bytearray(file.read_bytes())
    data[info.offset : info.offset + 2] = b"\x00\x7c"  # the first block's float16 scale: infinity
    file.write_bytes(data)
    with pytest.raises(CorruptModel, match="blk.0.attn_q.weight.*NaN"):
        open_checkpoint(file).tensor("layers.0.q")
    folder = tmp_path / "damaged"
    shutil.copytree(tiny_folder("llama"), folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = math.nan
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CorruptModel, match="model.norm.weight.*NaN"):
        open_checkpoint(folder).tensor("final_norm")
