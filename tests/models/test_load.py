"""What a path is decides the loader; what is missing is named."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from forerun.errors import ForerunError, ModelNotFound
from forerun.models.load import open_checkpoint


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
