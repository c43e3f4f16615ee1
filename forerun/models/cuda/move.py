"""K/V of some slots copied to other slots, in all layers at once: an accepted branch of a tree becomes a straight line.

One launch; the slots are its parameters, so nothing is copied to the device first. Knows slots, not whose they are.
"""

from __future__ import annotations

import ctypes
import math
from pathlib import Path

import torch

from forerun.core import KV
from forerun.models.cuda import nvrtc

MAX_MOVED_SLOTS = 64  # slots of one launch
THREADS = 256


class _Params(ctypes.Structure):
    """`Params` in move.cu."""

    _fields_ = [
        ("caches", ctypes.c_void_p),
        ("pieces", ctypes.c_int),
        ("count", ctypes.c_int),
        ("source", ctypes.c_int * MAX_MOVED_SLOTS),
        ("target", ctypes.c_int * MAX_MOVED_SLOTS),
    ]


class Mover:
    """Moves K/V within the caches of one model; where no kernel can be compiled, cache by cache."""

    def __init__(self, kv: KV) -> None:
        self._caches = [cache for layer in kv for cache in layer]
        slot = self._caches[0][0].nbytes
        self._launch = None
        whole = slot % 16 == 0 and all(c.is_contiguous() and c[0].nbytes == slot for c in self._caches)
        if whole and nvrtc.available():
            self._launch = self._prepare(slot)

    def _prepare(self, slot: int) -> nvrtc.Launch | None:
        source = (Path(__file__).parent / "move.cu").read_text()
        each = math.gcd(slot // 16, 32)  # threads that copy one slot: all take the same turns, as they wait in each
        sizes = {"MOST": MAX_MOVED_SLOTS, "THREADS": THREADS, "EACH": each}
        addresses = [cache.data_ptr() for cache in self._caches]
        self._addresses = torch.tensor(addresses, dtype=torch.int64, device=self._caches[0].device)
        self._params = _Params(caches=self._addresses.data_ptr(), pieces=slot // 16)
        try:
            code = nvrtc.compile_source(source, tuple(f"-D{k}={v}" for k, v in sizes.items()))
            kernel = nvrtc.Kernel(code, "move", len(self._caches), THREADS, 0)
        except nvrtc.CompileError:
            return None
        return kernel.prepare(self._params)

    @torch.inference_mode()
    def move(self, source: list[int], target: list[int]) -> None:
        """Enqueue: what lies in slot source[i] will lie in target[i] too.

        A target may be the source of an earlier pair of the list, not of one more than MAX_MOVED_SLOTS behind it.
        """
        if len(source) != len(target):
            raise ValueError(f"{len(source)} sources, {len(target)} targets")
        for lo in range(0, len(source), MAX_MOVED_SLOTS):
            self._move(source[lo : lo + MAX_MOVED_SLOTS], target[lo : lo + MAX_MOVED_SLOTS])

    def _move(self, source: list[int], target: list[int]) -> None:
        if self._launch is not None:
            self._params.count = len(source)
            self._params.source[: len(source)] = source
            self._params.target[: len(target)] = target
            self._launch()
            return
        src, dst = (torch.tensor(slots, device=self._caches[0].device) for slots in (source, target))
        for cache in self._caches:
            cache[dst] = cache[src]
