"""Attention: one contract for all backends, and the reference backend on torch SDPA.

A backend turns a layer's fused q/k/v into attention output and writes K/V to the cache on the way. It knows the rules
of `TokenBatch` (slots, tables, who sees what) and nothing of requests, pages' owners or models. The reference runs one
sequence after the other: obvious, on any device, and what every faster backend is tested against.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.core import TokenBatch
from forerun.models.config import ModelConfig
from forerun.models.linear import Norm, rms_norm
from forerun.models.rope import RopeTable, rotate

KV = list[tuple[Tensor, Tensor]]  # per layer (K, V), each [num_slots, Hkv, D]; K is stored rotated


class AttentionBackend(ABC):
    """`plan` once per forward, then `store` and `attend` once per layer."""

    def __init__(self, config: ModelConfig, device: torch.device, max_context: int) -> None:
        self.config = config
        self.device = device
        kinds = {config.layer_rope(i) for i in range(config.num_layers)}
        self.ropes = {rope: RopeTable(rope, config.head_dim, max_context, device) for rope in kinds}

    @abstractmethod
    def plan(self, batch: TokenBatch) -> None:
        """Work out what all layers share for this batch."""

    @abstractmethod
    def store(self, qkv: Tensor, layer: int, kv: tuple[Tensor, Tensor], norms: tuple[Norm, Norm] | None) -> Tensor:
        """Norm and rotate q and k, write k and v to their slots, return q: [T, (Hq + 2 Hkv) D] -> [T, Hq, D]."""

    @abstractmethod
    def attend(self, q: Tensor, layer: int, kv: tuple[Tensor, Tensor]) -> Tensor:
        """[T, Hq, D] -> [T, Hq * D]."""


TILE = 128  # new tokens that attend in one call, so that a long prefill does not compute all it may not see
MANY = 128  # new tokens from which query heads are left apart
ROWS = 4  # rows come in multiples of this
SLACK = 512  # slots that a cache must have beyond its pages, because keys are read in whole blocks


def block_keys(context: int, same_bits: bool = True) -> int:
    """Keys to attend over for a context: the kernel's blocks of 512, the last one of 128 where that is enough.

    Without `same_bits` just a little more than the context, which is less work and rounds differently in each batch.
    """
    if not same_bits:
        return -(-context // 64) * 64
    rest = context % 512
    return context - rest + (0 if rest == 0 else 128 if rest <= 128 else 512)


@dataclass
class _Tile:
    """Some new tokens of one sequence, and the keys they attend over."""

    tokens: slice  # of the batch
    keys: list[slice]  # slots, in order: one slice for each run of pages that follow each other
    masks: dict[int | None, Tensor]  # per window: additive mask [rows, keys]
    apart: bool  # a row is a token of one head; otherwise the heads that share a KV head are rows too


class SdpaAttention(AttentionBackend):
    """The reference: torch's scaled_dot_product_attention per sequence, on views of the cache where pages are one run.

    With `same_bits` a token's result is the same bits in any batch, chunk or draft. The matrix kernels underneath
    choose the order of their sums by the shapes they are given, so shapes are kept to a few: keys come in blocks of 512
    (a last one may be 128), rows in multiples of four. Eight-bit weights need this: a difference in the last bit can
    flip a rounding and grow from layer to layer.
    """

    def __init__(self, config: ModelConfig, device: torch.device, max_context: int, same_bits: bool = True) -> None:
        super().__init__(config, device, max_context)
        self.same_bits = same_bits

    def plan(self, batch: TokenBatch) -> None:
        self._rotations = {rope: table.at(batch.positions) for rope, table in self.ropes.items()}
        self._slots: slice | Tensor = batch.slots
        if batch.run_start is not None:
            self._slots = slice(batch.run_start, batch.run_start + batch.num_tokens)
        windows = {self.config.window(i) for i in range(self.config.num_layers)}
        self._tiles = [
            self._tile(batch, s, slice(lo, min(lo + TILE, batch.starts[s + 1])), windows)
            for s in range(batch.num_seqs)
            for lo in range(batch.starts[s], batch.starts[s + 1], TILE)
        ]

    def _tile(self, batch: TokenBatch, s: int, tokens: slice, windows: set[int | None]) -> _Tile:
        context = batch.contexts[s] if batch.tree is not None else int(batch.seen[tokens].max())
        keys, count = block_keys(context, self.same_bits), tokens.stop - tokens.start
        apart = count >= MANY
        masks = {}
        for window in windows:
            mask = _mask(batch, s, tokens, context, keys, window)  # [count, keys]
            if not apart:
                mask = mask.repeat_interleave(self.config.num_heads // self.config.num_kv_heads, 0)
            masks[window] = F.pad(mask, (0, 0, 0, -mask.shape[0] % ROWS))
        return _Tile(tokens, _key_slots(batch.tables[s], context, keys, batch.page_size), masks, apart)

    def store(self, qkv: Tensor, layer: int, kv: tuple[Tensor, Tensor], norms: tuple[Norm, Norm] | None) -> Tensor:
        c = self.config
        heads = qkv.view(qkv.shape[0], -1, c.head_dim)  # [T, Hq + 2 Hkv, D]
        qk, v = heads[:, : c.num_heads + c.num_kv_heads], heads[:, c.num_heads + c.num_kv_heads :]
        if norms is not None:
            q, k = qk[:, : c.num_heads], qk[:, c.num_heads :]
            qk = torch.cat((rms_norm(q, norms[0]), rms_norm(k, norms[1])), dim=1)
        qk = rotate(qk, *self._rotations[c.layer_rope(layer)])
        k = qk[:, c.num_heads :]
        if isinstance(self._slots, slice):
            kv[0][self._slots] = k
            kv[1][self._slots] = v
        else:
            kv[0].index_copy_(0, self._slots, k)
            kv[1].index_copy_(0, self._slots, v)
        return qk[:, : c.num_heads]

    def attend(self, q: Tensor, layer: int, kv: tuple[Tensor, Tensor]) -> Tensor:
        window = self.config.window(layer)
        out = [self._attend_tile(q[tile.tokens], tile, tile.masks[window], kv) for tile in self._tiles]
        return out[0] if len(out) == 1 else torch.cat(out)

    def _attend_tile(self, q: Tensor, tile: _Tile, mask: Tensor, kv: tuple[Tensor, Tensor]) -> Tensor:
        k, v = (_gather(cache, tile.keys).transpose(0, 1)[None] for cache in kv)  # [1, Hkv, keys, D]
        mask = mask if mask.dtype == q.dtype else mask.to(q.dtype)
        count, heads, dim = q.shape
        if tile.apart:
            q = F.pad(q.transpose(0, 1)[None], (0, 0, 0, mask.shape[0] - count))  # [1, Hq, rows, D]
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.config.scale, enable_gqa=True)
            return out[0, :, :count].transpose(0, 1).reshape(count, -1)  # [count, Hq * D]
        # the query heads that share a KV head become rows of one head, so that its K and V are read once
        group = heads // k.shape[1]
        if count == 1:  # the common case, with fewer steps
            q = F.pad(q.view(1, -1, group, dim), (0, 0, 0, mask.shape[0] - group))
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.config.scale)
            return out[:, :, :group].reshape(1, -1)
        q = q.view(count, -1, group, dim).transpose(0, 1).reshape(1, -1, count * group, dim)
        q = F.pad(q, (0, 0, 0, mask.shape[0] - count * group))  # [1, Hkv, rows, D]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.config.scale)
        out = out[0, :, : count * group].reshape(-1, count, group, dim)
        return out.transpose(0, 1).reshape(count, -1)


def _key_slots(table: Tensor, context: int, keys: int, page_size: int) -> list[slice]:
    """Slots of a context's entries, and as many more as the block needs, whatever they hold."""
    pages = table[: -(-context // page_size)].tolist()
    cuts = [i for i in range(1, len(pages)) if pages[i] != pages[i - 1] + 1]
    runs = [
        slice(pages[lo] * page_size, (pages[hi - 1] + 1) * page_size)
        for lo, hi in zip([0, *cuts], [*cuts, len(pages)], strict=True)
    ]
    runs[-1] = slice(runs[-1].start, runs[-1].stop + keys - len(pages) * page_size)
    return runs


def _gather(cache: Tensor, runs: list[slice]) -> Tensor:
    """[keys, Hkv, D]: a view where all pages are one run, as they mostly are, else a copy."""
    return cache[runs[0]] if len(runs) == 1 else torch.cat([cache[run] for run in runs])


def _mask(batch: TokenBatch, s: int, tokens: slice, context: int, keys: int, window: int | None) -> Tensor:
    """Additive mask [new tokens, keys]."""
    seen = batch.seen[tokens].to(torch.int64)[:, None]  # [count, 1]
    entry = torch.arange(keys, device=seen.device)
    visible = entry < seen
    if batch.tree is not None and batch.tree_start is not None:
        start = batch.tree_start[s]
        width = min(batch.tree.shape[1], context - start)
        visible[:, start : start + width] |= batch.tree[tokens, :width]
    if window is not None:
        visible &= entry > batch.positions[tokens][:, None] - window
    return torch.zeros(visible.shape, device=seen.device).masked_fill_(~visible, float("-inf"))
