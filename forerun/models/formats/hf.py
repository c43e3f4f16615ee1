"""A Hugging Face folder as a `Checkpoint`: safetensors (one file or shards), config.json and tokenizer.json.

Tensors are views of the mapped files in their own dtype. Does not know what the keys of config.json mean
(hf_config.py) nor how text becomes tokens (tokenizer.py).
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open

from forerun.errors import CorruptModel, ModelNotFound
from forerun.models.formats.checkpoint import check_shapes, checked, expected_shapes, reading
from forerun.models.formats.dequant import as_stored
from forerun.models.formats.hf_config import hf_name, read_config
from forerun.models.formats.pard import read_parallel
from forerun.text.tokenizer import Tokenizer

_INDEX = "model.safetensors.index.json"
_AGAIN = "fetch or copy the model's folder again"


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; damaged text is a clear error."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CorruptModel(f"{path.parent.name}: {path.name} is not valid JSON ({error})", _AGAIN) from error
    if not isinstance(value, dict):
        raise CorruptModel(f"{path.parent.name}: {path.name} holds a {type(value).__name__}, not an object", _AGAIN)
    return value


def _pooling(folder: Path, root: dict[str, Any]) -> Literal["", "mean", "last"]:
    """How the model of a sentence-transformers folder embeds texts; none where it needs more than its causal layers."""
    path = folder / "1_Pooling" / "config.json"
    causal = not root.get("use_bidirectional_attention") and root.get("is_causal", True)
    if not path.exists() or not causal or any(folder.glob("*_Dense")):
        return ""
    values = read_json(path)
    return "last" if values.get("pooling_mode_lasttoken") else "mean" if values.get("pooling_mode_mean_tokens") else ""


class FolderCheckpoint:
    """See `Checkpoint`; every tensor's presence and shape is checked when the folder is opened."""

    quantised = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.source = folder.resolve().name
        if not (folder / "config.json").exists():
            hint = "give a folder with config.json, tokenizer.json and .safetensors files"
            raise ModelNotFound(f"{folder} has no config.json", hint)
        generation = folder / "generation_config.json"
        root = read_json(folder / "config.json")
        self.generation = read_json(generation) if generation.exists() else {}  # the settings its makers recommend
        self.config = replace(read_config(root, self.generation, self.source), pooling=_pooling(folder, root))
        self.parallel = read_parallel(root, self.config.vocab_size, self.source)
        self._open: dict[Path, Any] = {}
        self.files = self._weight_files()
        self._where, shapes = self._scan(self.files)
        self._names = self._stored_names()
        check_shapes(shapes, self._names, self.config, self.source)

    def _weight_files(self) -> tuple[Path, ...]:
        """The weight files: those the index names, else every .safetensors file of the folder."""
        if (self.folder / _INDEX).exists():
            index = read_json(self.folder / _INDEX)
            files = [self.folder / name for name in sorted(set(index.get("weight_map", {}).values()))]
            for file in files:
                if not file.exists():
                    raise CorruptModel(f"{self.source}: shard {file.name} of {len(files)} is missing", _AGAIN)
        else:
            files = sorted(self.folder.glob("*.safetensors"))
        if not files:
            others = sorted({file.suffix for file in self.folder.glob("*") if file.suffix in (".bin", ".pt", ".pth")})
            found = f"; it has {', '.join(others)} weights, which are not read" if others else ""
            hint = "use a safetensors version of the model"
            raise ModelNotFound(f"{self.source} has no .safetensors file{found}", hint)
        return tuple(files)

    def _handle(self, file: Path) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(file, framework="pt")  # type: ignore[no-untyped-call]
            except (SafetensorError, OSError) as error:
                raise CorruptModel(f"{self.source}: {file.name} is truncated or damaged ({error})", _AGAIN) from error
        return self._open[file]

    def _scan(self, files: tuple[Path, ...]) -> tuple[dict[str, Path], dict[str, tuple[int, ...]]]:
        where, shapes = {}, {}
        for file in files:
            handle = self._handle(file)
            for name in handle.keys():  # noqa: SIM118 - a safetensors handle, not a dict
                where[name] = file
                shapes[name] = tuple(handle.get_slice(name).get_shape())
        return where, shapes

    def _stored_names(self) -> dict[str, str]:
        """Canonical to stored names; the prefix is what stands before the embedding's name."""
        ending = "embed_tokens.weight"
        prefixes = [name.removesuffix(ending) for name in self._where if name.endswith(ending)]
        prefix = prefixes[0] if prefixes else "model."
        heads = [name for name in self._where if name.endswith("lm_head.weight")]
        others = [name for name in expected_shapes(self.config) if name != "head"]
        names = {name: prefix + hf_name(name, self.config.family) for name in others}
        return names | {"head": heads[0] if heads else "lm_head.weight"}

    def _read(self, name: str) -> torch.Tensor:
        stored = self._names[name]
        try:
            return self._handle(self._where[stored]).get_tensor(stored)
        except SafetensorError as error:
            raise CorruptModel(f"{self.source}: tensor {stored!r} cannot be read ({error})", _AGAIN) from error

    def tensor(self, name: str, device: torch.device | None = None) -> torch.Tensor:
        value = checked(self._read(name).to(device or "cpu"), self._names[name], self.source)
        if self.config.family == "gemma3" and name.endswith("norm"):
            return value.float() + 1.0  # Gemma stores what is added to one
        return value

    def rows(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        return self._read(name)[ids].float()  # [len(ids), in]

    def stored(self, name: str) -> tuple[str, torch.Tensor]:
        return as_stored(self._read(name))

    def tokenizer(self) -> Tokenizer:
        with reading(f"{self.source}: its tokenizer"):
            return Tokenizer.from_folder(self.folder, eos_ids=self.config.eos_ids, bos_id=self.config.bos_id)

    def release(self) -> None:
        """Close the files: their mappings go once no tensor views them, and open again on the next read."""
        self._open.clear()
