"""Opens a model by what its path is: a `.gguf` file or a folder of safetensors. Knows neither format."""

from __future__ import annotations

from pathlib import Path

from forerun.errors import ModelNotFound
from forerun.models.formats.checkpoint import Checkpoint, reading

_HINT = "give a .gguf file, or a folder with config.json, tokenizer.json and .safetensors files"


def open_checkpoint(path: Path) -> Checkpoint:
    """The model at `path`, opened but not read: tensors are read when asked for."""
    if path.is_dir():
        from forerun.models.formats.hf import FolderCheckpoint

        ggufs = sorted(path.glob("*.gguf"))
        if not (path / "config.json").exists() and len(ggufs) == 1:
            return open_checkpoint(ggufs[0])
        with reading(f"{path.resolve().name}: its configuration"):
            return FolderCheckpoint(path)
    if not path.exists():
        raise ModelNotFound(f"no model at {path}", _HINT)
    if path.suffix != ".gguf":
        raise ModelNotFound(f"{path.name} is neither a folder nor a .gguf file", _HINT)
    from forerun.models.formats.gguf_checkpoint import GGUFCheckpoint

    with reading(f"{path.name}: its metadata"):
        return GGUFCheckpoint(path)
