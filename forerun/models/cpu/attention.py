"""Attention through the C kernels: float32 K/V read from their pages, no copies, no masks.

A token's result is the same bits in any batch, chunk or draft tree: each query is summed over its own keys in their
order. Tokens that see the same pages (branches of one prompt, rows of a draft) read them together. Knows `TokenBatch`
and nothing of requests.
"""

from __future__ import annotations

import ctypes
import functools
from copy import copy
from typing import Self

import numpy as np
import torch
from torch import Tensor

from forerun.core import KV, TokenBatch
from forerun.models.attention import AttentionBackend
from forerun.models.config import ModelConfig
from forerun.models.cpu.block_linear import GATES, BlockLinear, address
from forerun.models.cpu.library import Batch, Cache, LayerShape, LayerWeights, library
from forerun.models.decoder import Layer
from forerun.models.linear import Norm

_ZEROS: list[np.ndarray] = []
MAX_HEAD_DIM, MAX_GROUP, HEAD_DIM_MULTIPLE = 256, 32, 16  # what attention.c is compiled for
FLOAT_BYTES = 4


class PagedCpuAttention(AttentionBackend):
    """The contract of attention, and all layers of a forward in one call where nothing has to be seen in between.

    `share_prefix`: tokens of several sequences read the pages they have in common together; it changes no bit.
    """

    share_prefix = kernels_write = True
    _drafts = False  # whether long pieces may be computed in bfloat16, where the CPU does that at once

    def __init__(self, config: ModelConfig, device: torch.device, max_context: int) -> None:
        super().__init__(config, device, max_context)
        kernels = library()
        assert kernels is not None and self.problem(config) == ""
        self._kernels = kernels
        self._fused: FusedLayers | None = None
        self._scratch = torch.empty(0, dtype=torch.uint8)  # a late thread may still write to it: it stays
        self._weights_scratch = torch.empty(0, dtype=torch.uint8)

    @staticmethod
    def problem(config: ModelConfig) -> str:
        """Why this shape cannot be computed; empty where it can."""
        group = config.num_heads // config.num_kv_heads
        if config.head_dim > MAX_HEAD_DIM or config.head_dim % HEAD_DIM_MULTIPLE or group > MAX_GROUP:
            return f"heads of {config.head_dim} in groups of {group}"
        return ""

    def narrowed(self, window: int, wide: int) -> Self:
        other = super().narrowed(window, wide)
        other._fused = None  # it holds the layers' windows
        other._scratch = torch.empty(0, dtype=torch.uint8)
        return other

    def for_drafts(self) -> Self:
        other = copy(self)
        other._drafts, other._fused = True, None
        other._scratch = torch.empty(0, dtype=torch.uint8)
        return other

    def plan(self, batch: TokenBatch) -> None:
        tokens, tables, c = batch.num_tokens, batch.block_tables.contiguous(), self.config
        held: list[np.ndarray] = []  # beside the batch: the kernels read their memory
        rows_at = starts_at = entries_at = _zeros_at(1 << tokens.bit_length())
        if batch.tree is not None:
            held += _paths(batch)
            starts_at, entries_at = (array.ctypes.data for array in held)
        if batch.num_seqs > 1:
            held.append(np.arange(batch.num_seqs, dtype=np.int32).repeat(np.diff(batch.cu_seqlens)))
            rows_at = held[-1].ctypes.data
        self._held = (batch, tables, held)
        self._batch = Batch(
            *(tokens, c.num_heads, c.num_kv_heads, c.head_dim, batch.page_size, tables.shape[1]),
            *(int(self.share_prefix), batch.positions.data_ptr(), batch.slot_mapping.data_ptr()),
            *(batch.kv_lens.data_ptr(), rows_at, tables.data_ptr(), starts_at, entries_at),
        )
        self._rough = self._kernels.fr_attend_draft_scratch(ctypes.addressof(self._batch)) if self._drafts else 0
        self._scratch_at: int | None = None  # of this batch; layers that run at once have their own

    def store(self, qkv: Tensor, layer: int, kv: tuple[Tensor, Tensor], norms: tuple[Norm, Norm] | None) -> Tensor:
        c = self.config
        qkv = qkv.contiguous()
        q = torch.empty(qkv.shape[0], c.num_heads, c.head_dim)
        (q_norm, eps), (k_norm, _) = norms or ((None, 0.0), (None, 0.0))
        self._kernels.fr_store(
            *(ctypes.addressof(self._batch), qkv.data_ptr(), q.data_ptr(), _cache(kv)),
            *(self._rope(layer).data_ptr(), address(q_norm), address(k_norm), eps),
        )
        return q

    def write_rows(
        self,
        made: Tensor,
        layer: int,
        kv: tuple[Tensor, Tensor],
        positions: Tensor,
        slots: Tensor,
        k_norm: Norm | None = None,
    ) -> None:
        c = self.config
        if kv[0].dtype != torch.float32:
            super().write_rows(made, layer, kv, positions, slots, k_norm)
            return
        made, (norm, eps) = made.contiguous(), k_norm or (None, 0.0)
        batch = Batch(len(made), 0, c.num_kv_heads, c.head_dim, 0, 0, 0, positions.data_ptr(), slots.data_ptr())
        self._written = (batch, made, positions, slots)  # the kernels read their memory
        self._kernels.fr_store(
            *(ctypes.addressof(batch), made.data_ptr(), None, _cache(kv)),
            *(self._rope(layer).data_ptr(), None, address(norm), eps),
        )

    def attend(self, q: Tensor, layer: int, kv: tuple[Tensor, Tensor]) -> Tensor:
        q = q.contiguous()
        if self._scratch_at is None:
            size = self._rough or FLOAT_BYTES * self._kernels.fr_attend_scratch(ctypes.addressof(self._batch))
            if self._scratch.numel() < size:
                self._scratch = torch.empty(size, dtype=torch.uint8)
            self._scratch_at = self._scratch.data_ptr()
        out = torch.empty(q.shape[0], q.shape[1] * q.shape[2])
        attend = self._kernels.fr_attend_draft if self._rough else self._kernels.fr_attend
        attend(
            *(ctypes.addressof(self._batch), q.data_ptr(), _cache(kv), self.config.windows[layer] or 0),
            *(self.config.scale, self._scratch_at, out.data_ptr()),
        )
        return out

    def entry_weights(self, q: Tensor, layer: int, kv: tuple[Tensor, Tensor]) -> Tensor | None:
        size = self._kernels.fr_tail_weights_scratch(ctypes.addressof(self._batch))
        if not size:
            return None
        if self._weights_scratch.numel() < size:
            self._weights_scratch = torch.empty(size, dtype=torch.uint8)
        q, out = q.contiguous(), torch.zeros(self._held[0].seq_lens[0])
        self._kernels.fr_tail_weights(
            *(ctypes.addressof(self._batch), q.data_ptr(), _cache(kv), self.config.windows[layer] or 0),
            *(self.config.scale, self._weights_scratch.data_ptr(), out.data_ptr()),
        )
        return out

    def run_layers(self, x: Tensor, layers: list[Layer], kv: KV, which: range) -> Tensor | None:
        """The planned batch through these layers in one call; None where the layers are not of packed blocks alone."""
        fused = self.fused(layers, kv)
        return None if fused is None else fused(x, self._batch, which)

    def fused(self, layers: list[Layer], kv: KV) -> FusedLayers | None:
        """These layers as one call reads them; None where they are not of packed blocks alone."""
        if self._fused is None or not self._fused.serves(layers, kv):
            if not FusedLayers.possible(layers, kv):
                return None
            ropes = [self._rope(i) for i in range(len(layers))]
            self._fused = FusedLayers(self.config, layers, kv, ropes, self._drafts)
        return self._fused

    def _rope(self, layer: int) -> Tensor:
        return self.ropes[self.config.layer_ropes[layer]].table


@functools.cache
def _zeros_at(count: int) -> int:
    """Where so many zeros of 32 bits are, for as long as the process lives."""
    _ZEROS.append(np.zeros(count, dtype=np.int32))
    return int(_ZEROS[-1].ctypes.data)


def _paths(batch: TokenBatch) -> tuple[np.ndarray, np.ndarray]:
    """Where each token's path through a draft tree begins among all entries on paths, and these."""
    assert batch.tree is not None and batch.tree_start is not None
    paths: list[int] = []
    starts, tree = np.zeros(batch.num_tokens + 1, dtype=np.int32), batch.tree.numpy()
    for s, start in enumerate(batch.tree_start):
        for t in range(batch.cu_seqlens[s], batch.cu_seqlens[s + 1]):
            paths += (np.flatnonzero(tree[t]) + start).tolist()
            starts[t + 1] = len(paths)
    return starts, np.array(paths, dtype=np.int32)


def _cache(kv: tuple[Tensor, Tensor]) -> Cache:
    return Cache(kv[0].data_ptr(), kv[1].data_ptr(), kv[0].stride(0), kv[0].stride(1))


class FusedLayers:
    """A decoder's layers as the kernels read them: addresses of weights, norms, tables and caches."""

    def __init__(
        self, config: ModelConfig, layers: list[Layer], kv: KV, ropes: list[Tensor], rough: bool = False
    ) -> None:
        """`rough`: attention of long pieces as for drafts, where the CPU can."""
        kernels = library()
        assert kernels is not None
        self._kernels, self._layers, self._first = kernels, layers, kv[0][0].data_ptr()
        self._held = (ropes, kv)
        self._scratch = torch.empty(0, dtype=torch.uint8)  # kept: fresh pages would cost as much as a layer
        eps = layers[0].attn_norm[1]
        self._shape = LayerShape(config.hidden_size, eps, config.scale, GATES[config.activation], rough)
        self._weights = (LayerWeights * len(layers))()
        for i, (w, layer) in enumerate(zip(self._weights, layers, strict=True)):
            for name in ("qkv", "o", "gate_up", "down"):
                linear = getattr(layer, name)
                setattr(w, name, linear.matrix)
            w.attn_norm, w.mlp_norm = address(layer.attn_norm[0]), address(layer.mlp_norm[0])
            if layer.qk_norms is not None:
                w.q_norm, w.k_norm = (address(norm[0]) for norm in layer.qk_norms)
            w.rope, w.kv, w.window = ropes[i].data_ptr(), _cache(kv[i]), config.windows[i] or 0
        self.shape_at, self.layers_at = ctypes.addressof(self._shape), ctypes.addressof(self._weights)

    @staticmethod
    def possible(layers: list[Layer], kv: KV) -> bool:
        blocks = (isinstance(linear, BlockLinear) for w in layers for linear in (w.qkv, w.o, w.gate_up, w.down))
        return kv[0][0].dtype == torch.float32 and layers[0].post_attn_norm is None and all(blocks)

    def serves(self, layers: list[Layer], kv: KV) -> bool:
        return layers is self._layers and kv[0][0].data_ptr() == self._first

    def __call__(self, x: Tensor, batch: Batch, which: range) -> Tensor:
        scratch, x = self.scratch(batch), x.clone()
        self._kernels.fr_layers(
            *(self.shape_at, self.layers_at, which.start, which.stop, ctypes.addressof(batch), x.data_ptr(), scratch),
        )
        return x

    def scratch(self, batch: Batch) -> int:
        """The address of as much memory as this batch needs."""
        size = self._kernels.fr_layers_scratch(self.shape_at, self.layers_at, ctypes.addressof(batch))
        if self._scratch.numel() < size:
            self._scratch = torch.empty(size, dtype=torch.uint8)
        return self._scratch.data_ptr()
