"""A GGUF file as a `Checkpoint`: canonical names over the mapped file, dequantised when asked for.

Undoes the row interleaving of some architectures on the stored bytes, before dequantising, where it is cheapest.
Does not know block formats (dequant.py) or metadata keys (gguf_config.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from forerun.models.formats.checkpoint import check_shapes, checked, expected_shapes, reading
from forerun.models.formats.dequant import dequantise
from forerun.models.formats.gguf import GGUFFile
from forerun.models.formats.gguf_config import INTERLEAVED, gguf_name, read_config

if TYPE_CHECKING:
    from forerun.text.tokenizer import Tokenizer

_OWN_FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16}


class GGUFCheckpoint:
    """See `Checkpoint`; every tensor's presence and shape is checked when the file is opened."""

    def __init__(self, path: Path) -> None:
        self.file = GGUFFile(path)
        self.source = path.name
        self.files: tuple[Path, ...] = (path,)
        shapes = {info.name: info.shape for info in self.file.tensors.values()}
        freqs = "rope_freqs.weight"
        table = dequantise(self.file.raw(freqs), self.file.tensors[freqs].type) if freqs in shapes else None
        self.config = read_config(self.file.metadata, shapes, self.source, table)
        check_shapes(shapes, {name: gguf_name(name) for name in expected_shapes(self.config)}, self.config, self.source)
        matrices = [info.type for info in self.file.tensors.values() if len(info.shape) > 1]
        self.quantised = any(kind.startswith("Q") for kind in matrices)

    def tensor(self, name: str) -> torch.Tensor:
        info = self.file.tensors[gguf_name(name)]
        raw = self._half_split(name, self.file.raw(info.name))
        if info.type in _OWN_FLOATS:
            value = raw.clone().view(_OWN_FLOATS[info.type]).view(info.shape)
        else:
            value = dequantise(raw, info.type).view(info.shape)
        return checked(value, info.name, self.source)

    def rows(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        info = self.file.tensors[gguf_name(name)]
        order = self._order(name)
        wanted = ids if order is None else order[ids]
        return dequantise(self.file.raw(info.name)[wanted], info.type)  # [len(ids), in]

    def stored(self, name: str) -> tuple[str, torch.Tensor]:
        info = self.file.tensors[gguf_name(name)]
        return info.type, self._half_split(name, self.file.raw(info.name))

    def _half_split(self, name: str, raw: torch.Tensor) -> torch.Tensor:
        """Rows in the half-split rotary order; a bias is one row of numbers, so it is viewed as rows of one."""
        order = self._order(name)
        if order is None:
            return raw
        return raw.view(order.numel(), -1)[order] if raw.shape[0] == 1 else raw[order]

    def _order(self, name: str) -> torch.Tensor | None:
        """For each half-split row the stored row it comes from, or None where rows are stored as they are."""
        config, part = self.config, name.rpartition(".")[2]
        if config.family not in INTERLEAVED or part not in ("q", "k", "q_bias", "k_bias"):
            return None
        heads = config.num_heads if part.startswith("q") else config.num_kv_heads
        stored = torch.arange(heads * config.head_dim).view(heads, config.head_dim // 2, 2)
        return stored.transpose(1, 2).reshape(-1)

    def tokenizer(self) -> Tokenizer:
        from forerun.models.formats.gguf_tokenizer import tokenizer_from_gguf

        with reading(f"{self.source}: its tokenizer"):
            return tokenizer_from_gguf(self.file.metadata, self.config, self.source)

    def release(self) -> None:
        self.file.release()
