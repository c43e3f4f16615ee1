"""Copies of keys and values for attention kernels that want them in one piece where pages do not follow each other.

There is room for one sequence at a time, since more would not stay in the processor's cache. A copy keeps what the next
one has in common with it, so sequences that come in the order of their prefixes have those copied once per layer. Slot
by slot as in the pool: kernels would read it head by head 4% faster, but making it so takes twice as long. Knows slots;
nothing of masks, queries or requests.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor


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
