"""K/V of many layers at once, for callers that hold it for all of them: written, read; and rows of passing tensors.

One contract with two ways: torch, layer by layer (here), and on CUDA in bf16 one launch for all layers, because there
the host's time for each launch is what costs. Knows slots and layers; not whose they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.core import KV
from forerun.models.decoder import Decoder
from forerun.models.rope import rotate


class RowPicker:
    """The same rows of many tensors that are shown one after the other."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows
        self._picked: list[Tensor] = []  # [some tensors, rows, ...] each

    def add(self, x: Tensor) -> None:
        """x [T, ...]: all are of one shape and dtype, and none is written to after it was shown."""
        self._picked.append(x.index_select(0, self._rows)[None])

    def flush(self) -> None:
        """Let go of whatever was shown."""

    def picked(self) -> Tensor:
        """[tensors, rows, ...], once all were shown."""
        self.flush()
        return torch.cat(self._picked)


class PickedRows(RowPicker):
    """Rows picked already, [tensors, rows, ...]: copied, since their memory may be used again."""

    def __init__(self, picked: Tensor) -> None:
        self._picked = [picked.clone()]


@dataclass(frozen=True)
class RecomputePass:
    """What some rows of a pass met on their way, in all layers but the last, and what follows its last row."""

    x: Tensor  # [layers - 1, rows, hidden] inputs
    q: Tensor  # [layers - 1, rows, Hq, D] rotated queries
    logits: Tensor  # [1, V] float32


class AllLayersKV:
    """All layers' caches of one decoder."""

    def __init__(self, decoder: Decoder, kv: KV) -> None:
        self._kv, self._config, self._ropes = kv, decoder.config, decoder.attention.ropes

    def prepare(self) -> None:
        """Compile what a device compiles at its first use, for mapped K/V and rows of the decoder's own dtype."""

    def write(self, mapped: Tensor, first: int, slots: Tensor, runs: list[range]) -> None:
        """K, not rotated yet, and V [T, layers, 2, Hkv, D] of entries first, first + 1, ... to slots [T].

        `runs` are the layers, from the first to the last one: in runs of equal angles, rotated in one go.
        """
        positions = torch.arange(first, first + len(mapped), device=mapped.device)
        angles = {rope: [a[:, None] for a in table.at(positions)] for rope, table in self._ropes.items()}
        base = runs[0].start
        for layers in runs:
            own = slice(layers.start - base, layers.stop - base)
            k = rotate(mapped[:, own, 0], *angles[self._config.layer_ropes[layers.start]])  # [T, some layers, Hkv, D]
            for j, i in enumerate(layers):
                keys, values = self._kv[i]
                keys.index_copy_(0, slots, k[:, j].to(keys.dtype))
                values.index_copy_(0, slots, mapped[:, own.start + j, 1].to(values.dtype))

    def read(self, base: int, slots: Tensor) -> Tensor:
        """K, rotated, and V of the layers from `base` on at slots [N]: [2, layers, N, Hkv, D]."""
        like = self._kv[base][0]
        out = like.new_empty(2, len(self._kv) - base, len(slots), *like.shape[1:])
        for i, layer in enumerate(self._kv[base:]):
            for j, cache in enumerate(layer):
                torch.index_select(cache, 0, slots, out=out[j, i])
        return out

    def row_picker(self, rows: Tensor) -> RowPicker:
        """For tensors [T, ...] of which rows [N] are wanted."""
        return RowPicker(rows)


def make_all_layers_kv(decoder: Decoder, kv: KV) -> AllLayersKV:
    if decoder.device.type == "cuda" and decoder.dtype == torch.bfloat16:
        from forerun.models.cuda.all_layers_kv import CudaAllLayersKV

        return CudaAllLayersKV(decoder, kv)
    return AllLayersKV(decoder, kv)
