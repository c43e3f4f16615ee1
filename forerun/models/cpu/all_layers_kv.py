"""K/V of all layers at once by the C kernels: mapped rows are rotated and written token by token, in one call.

By torch's operators, layer by layer, that took a fifth of all that mapping takes. Knows addresses of caches and tables.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from forerun.core import KV
from forerun.models.cpu.library import Batch, Cache, library
from forerun.models.decoder import AllLayersKV, Decoder


class CpuAllLayersKV(AllLayersKV):
    """Of caches in float32."""

    def __init__(self, decoder: Decoder, kv: KV) -> None:
        super().__init__(decoder, kv)
        kernels, rows = library(), [(k.stride(0), k.stride(1)) for k, _ in kv]
        assert kernels is not None and all(k.dtype == torch.float32 for k, _ in kv)
        self._kernels = kernels
        tables = [self._ropes[rope].table for rope in self._config.layer_ropes]
        self._held = tables  # addresses are good for as long as these and the caches are
        self._caches = (Cache * len(kv))(
            *(Cache(k.data_ptr(), v.data_ptr(), *strides) for (k, v), strides in zip(kv, rows, strict=True))
        )
        self._tables = (ctypes.c_void_p * len(kv))(*(table.data_ptr() for table in tables))

    def write(self, mapped: Tensor, first: int, slots: Tensor, runs: list[range]) -> None:
        tokens, layers, _, heads, dim = mapped.shape
        base, mapped, slots = runs[0].start, mapped.float().contiguous(), slots.contiguous()
        positions = torch.arange(first, first + tokens)
        batch = Batch(tokens, 0, heads, dim, 0, 0, 0, positions.data_ptr(), slots.data_ptr())
        self._kernels.fr_store_made(
            *(ctypes.addressof(batch), mapped.data_ptr(), layers),
            *(ctypes.addressof(self._caches) + base * ctypes.sizeof(Cache),),
            *(ctypes.addressof(self._tables) + base * ctypes.sizeof(ctypes.c_void_p),),
        )
