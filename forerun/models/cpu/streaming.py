"""Layers that do not fit into memory: blocks of a mapped file, read in order at every step and dropped again.

The system reads the next layer while one is computed. Pages that it keeps in its own cache are not read from the disk
again; they count as free memory. Knows packed files and layers, not why they do not fit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.core import KV
from forerun.models.config import ModelConfig
from forerun.models.cpu.attention import PagedCpuAttention
from forerun.models.cpu.block_linear import BlockLinear, PackedBlocks
from forerun.models.decoder import Layer
from forerun.models.linear import Norm
from forerun.models.packed_cache import PackedFile

MATRICES = ("q", "k", "v", "o", "gate", "up", "down")


class StreamedLinear(BlockLinear):
    """Blocks in a mapped file that are dropped after each product."""

    def __init__(
        self, matrices: Sequence[PackedBlocks], bias: Tensor | None, file: PackedFile | None, names: Sequence[str]
    ) -> None:
        assert file is not None
        super().__init__(matrices, bias)
        self._file, self._names = file, names

    def __call__(self, x: Tensor, *, norm: Norm | None = None, add: Tensor | None = None) -> Tensor:
        y = super().__call__(x, norm=norm, add=add)
        self._file.release(*self._names)
        return y


class StreamedAttention(PagedCpuAttention):
    """The last layers of a forward one by one, each dropped when it has run; those before them in one call."""

    def __init__(
        self, config: ModelConfig, device: torch.device, max_context: int, file: PackedFile, streamed: int
    ) -> None:
        super().__init__(config, device, max_context)
        self._file, self._first_streamed = file, config.num_layers - streamed

    def run_layers(self, x: Tensor, layers: list[Layer], kv: KV, which: range) -> Tensor | None:
        first = min(max(which.start, self._first_streamed), which.stop)
        done = x if which.start == first else super().run_layers(x, layers, kv, range(which.start, first))
        for i in range(first, which.stop):
            if i + 1 < self.config.num_layers:
                self._file.prefetch(*_names(i + 1))
            if done is None:
                return None
            done = super().run_layers(done, layers, kv, range(i, i + 1))
            self._file.release(*_names(i))
        return done


def _names(layer: int) -> list[str]:
    return [f"layers.{layer}.{name}" for name in MATRICES]
