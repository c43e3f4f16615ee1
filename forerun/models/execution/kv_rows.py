"""Rows of K and V outside the attention call: copies for it, and rows of all layers written or read at once.

Copies are for attention kernels that want keys in one piece where pages do not follow each other. There is room for one
sequence at a time, since more would not stay in the processor's cache. A copy keeps what the next one has in common
with it, so sequences that come in the order of their prefixes have those copied once per layer. Slot by slot as in the
pool: kernels would read it head by head 4% faster, but making it so takes twice as long.

K/V of all layers has one contract and two ways: torch, layer by layer (here), and on CUDA in bf16 one launch for all
layers, because there the host's time for each launch is what costs. Knows slots and layers; nothing of masks, queries
or requests.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forerun.core import KV
from forerun.models.rope import rotate

if TYPE_CHECKING:
    from forerun.models.decoder import Decoder


@dataclass
class KeyRuns:
    """The keys of some tokens: slots in order, one slice for each run of pages that follow each other."""

    runs: list[slice]
    count: int
    context: int  # keys that any of the tokens sees; those behind fill the last block
    reused: int = 0  # first keys that are those copied before
    _memory: Tensor | None = None
    _steps: list[tuple[slice, Tensor, Tensor]] = field(default_factory=list)  # slots, and where their K and V go

    @property
    def scattered(self) -> bool:
        return len(self.runs) > 1

    def reuse(self, last: KeyRuns) -> None:
        """Copy no keys that the copy made before has already."""
        common = 0
        for a, b in zip(last.runs, self.runs, strict=False):
            if a.start == b.start:
                common += min(a.stop, b.stop) - a.start
            if a != b:
                break
        self.reused = min(common, last.context, self.context)

    def copy(self, kv: tuple[Tensor, Tensor], memory: Tensor) -> None:
        """Into memory [2 (K and V), keys, Hkv, D]; the same in every layer, so the places are worked out once."""
        if self._memory is not memory:
            self._memory, self._steps = memory, []
            for first, run in self._fresh():
                end = first + run.stop - run.start
                self._steps.append((run, memory[0, first:end], memory[1, first:end]))
        for run, k, v in self._steps:
            k.copy_(kv[0][run])
            v.copy_(kv[1][run])

    def _fresh(self) -> Iterable[tuple[int, slice]]:
        """Runs of slots to copy, each with the key it begins at."""
        at = 0
        for run in self.runs:
            lo, hi = max(self.reused - at, 0), min(self.context - at, run.stop - run.start)
            if lo < hi:
                yield at + lo, slice(run.start + lo, run.start + hi)
            at += run.stop - run.start


def link_copies(order: Iterable[KeyRuns]) -> None:
    """Keys that will be read in this order: let each copy keep what it has in common with the one before."""
    for last, keys in itertools.pairwise(keys for keys in order if keys.scattered):
        keys.reuse(last)


class KVCopies:
    """Reads keys from a cache: where they lie if that is one run, as it mostly is, else as a copy."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None  # [2 (K and V), keys, Hkv, D]

    def forget(self) -> None:
        self._memory = None

    def read(self, keys: KeyRuns, kv: tuple[Tensor, Tensor], most: int) -> tuple[Tensor, Tensor]:
        """K and V [1, Hkv, keys, D]; `most` keys are read between one plan and the next."""
        if not keys.scattered:
            return kv[0][None, keys.runs[0]].transpose(1, 2), kv[1][None, keys.runs[0]].transpose(1, 2)
        memory = self._memory
        if memory is None or memory.shape[1] < most or memory.dtype != kv[0].dtype:
            with torch.inference_mode(False):  # so that later calls may write to it in either mode
                # zeros: what is masked must be a number too
                memory = self._memory = kv[0].new_zeros(2, most, *kv[0].shape[1:])
        keys.copy(kv, memory)
        k, v = memory[:, None, : keys.count].transpose(2, 3).unbind()
        return k, v


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
