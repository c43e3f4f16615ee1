"""GGUF files of tiny models hold the same tensors and configuration as the safetensors folders they came from."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from forerun.errors import CorruptModel
from forerun.models.formats.checkpoint import expected_shapes, open_checkpoint
from forerun.models.formats.gguf import GGUFFile
from tests.tiny import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_folder(family: str, tiny_folder: Callable[[str], Path], tiny_gguf: Callable[..., Path]) -> None:
    folder, file = open_checkpoint(tiny_folder(family)), open_checkpoint(tiny_gguf(family))
    names = expected_shapes(folder.config)
    assert names == expected_shapes(file.config)
    for name in names:
        torch.testing.assert_close(file.tensor(name), folder.tensor(name), rtol=0, atol=0, msg=name)
    assert not file.quantised


@pytest.mark.parametrize("family", FAMILIES)
def test_same_configuration(family: str, tiny_folder: Callable[[str], Path], tiny_gguf: Callable[..., Path]) -> None:
    folder, file = open_checkpoint(tiny_folder(family)).config, open_checkpoint(tiny_gguf(family)).config
    # What GGUF has no key for: its family name for Mistral, Gemma's query scale; end tokens are found by name too
    family_name = "llama" if family == "mistral" else family
    want = dataclasses.replace(folder, family=family_name, eos_ids=(2, 0), query_scale=0.0)
    assert dataclasses.replace(file, query_scale=0.0) == want


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0"])
def test_rows_equal_the_tensor(kind: str, tiny_gguf: Callable[..., Path]) -> None:
    checkpoint = open_checkpoint(tiny_gguf("llama", kind))
    ids = torch.tensor([5, 0, 63, 5])
    for name in ("embed", "layers.2.q", "layers.1.o"):
        assert torch.equal(checkpoint.rows(name, ids), checkpoint.tensor(name)[ids].float())
    assert checkpoint.quantised == kind.startswith("Q")
    dtype = {"F16": torch.float16, "BF16": torch.bfloat16}.get(kind, torch.float32)
    assert checkpoint.tensor("layers.0.up").dtype == dtype


def test_quantised_is_close(tiny_folder: Callable[[str], Path], tiny_gguf: Callable[..., Path]) -> None:
    folder, file = open_checkpoint(tiny_folder("llama")), open_checkpoint(tiny_gguf("llama", "Q8_0"))
    for name in expected_shapes(folder.config):
        want = folder.tensor(name)
        assert (file.tensor(name) - want).abs().max() <= want.abs().max() / 127


def test_release_keeps_the_data_readable(tiny_gguf: Callable[..., Path]) -> None:
    checkpoint = open_checkpoint(tiny_gguf("qwen2"))
    before = checkpoint.tensor("layers.0.q_bias")
    checkpoint.release()
    assert torch.equal(before, checkpoint.tensor("layers.0.q_bias")) and before.abs().sum() > 0


def test_tensors_are_copies(tiny_gguf: Callable[..., Path]) -> None:
    checkpoint = open_checkpoint(tiny_gguf("qwen2"))
    checkpoint.tensor("final_norm").zero_()
    assert checkpoint.tensor("final_norm").abs().sum() > 0


def rename(path: Path, old: bytes, new: bytes, out: Path) -> Path:
    """A copy of a file with a name in its tensor table changed to one of the same length."""
    data = path.read_bytes()
    assert data.count(old) == 1 and len(old) == len(new)
    out.write_bytes(data.replace(old, new))
    return out


def test_missing_tensor(tiny_gguf: Callable[..., Path], tmp_path: Path) -> None:
    broken = rename(tiny_gguf("qwen2"), b"blk.2.ffn_up.weight", b"blk.2.ffn_xx.weight", tmp_path / "m.gguf")
    with pytest.raises(CorruptModel, match="blk.2.ffn_up.weight.*missing"):
        open_checkpoint(broken)


def test_wrong_shape(tiny_gguf: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    data = bytearray(tiny_gguf("qwen2").read_bytes())
    at = data.index(b"blk.1.ffn_up.weight") + len(b"blk.1.ffn_up.weight") + 4  # name, rank, then the dimensions
    assert int.from_bytes(data[at : at + 8], "little") == 64
    data[at : at + 8] = (32).to_bytes(8, "little")
    path.write_bytes(data)
    assert GGUFFile(path).tensors["blk.1.ffn_up.weight"].shape == (128, 32)
    with pytest.raises(CorruptModel, match=r"\[128, 32\], expected \[128, 64\]"):
        open_checkpoint(path)
