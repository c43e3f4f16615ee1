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


LEAST_ROWS = 8  # matrix kernels sum in another order for fewer rows than this
MANY_TOKENS = 32  # new tokens from which query heads are left apart


@dataclass
class _Span:
    """One sequence's part of a batch."""

    tokens: slice  # of the batch
    entries: slice | Tensor  # slots of its pages' entries, in order: a slice where its pages are one run
    masks: dict[int | None, Tensor | None]  # per window: additive mask [rows, entries]; None: causal from the start
    count: int  # new tokens
    rows: int  # rows that attention runs for each KV head: tokens x heads that share it, or tokens where there are many


class SdpaAttention(AttentionBackend):
    """The reference: torch's scaled_dot_product_attention per sequence, on views of the cache where pages are one run.

    A token's result is the same bits in any batch, chunk or draft: keys are always whole pages (the kernels' sums are in
    blocks, and a ragged end would change their order), and there are never fewer than LEAST_ROWS rows. Eight-bit weights
    need this: a difference in the last bit can flip a rounding and grow.
    """

    def plan(self, batch: TokenBatch) -> None:
        self._rotations = {rope: table.at(batch.positions) for rope, table in self.ropes.items()}
        self._slots: slice | Tensor = batch.slots
        if batch.run_start is not None:
            self._slots = slice(batch.run_start, batch.run_start + batch.num_tokens)
        windows = {self.config.window(i) for i in range(self.config.num_layers)}
        self._spans = [self._span(batch, s, windows) for s in range(batch.num_seqs)]

    def _span(self, batch: TokenBatch, s: int, windows: set[int | None]) -> _Span:
        tokens = slice(batch.starts[s], batch.starts[s + 1])
        count, group = tokens.stop - tokens.start, self.config.num_heads // self.config.num_kv_heads
        rows = count if count >= MANY_TOKENS else max(count * group, LEAST_ROWS)
        fresh = batch.contexts[s] == count >= MANY_TOKENS and batch.tree is None and int(batch.seen[tokens.start]) == 1
        masks: dict[int | None, Tensor | None] = {}
        for window in windows:
            if fresh and (window is None or count <= window):
                masks[window] = None
                continue
            mask = _mask(batch, s, tokens, window)  # [count, entries]
            if count < MANY_TOKENS:
                mask = F.pad(mask.repeat_interleave(group, 0), (0, 0, 0, rows - count * group))
            masks[window] = mask
        return _Span(tokens, _entries(batch.tables[s], batch.contexts[s], batch.page_size), masks, count, rows)

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
        out = [self._attend_one(q[span.tokens], span, span.masks[window], kv) for span in self._spans]
        return out[0] if len(out) == 1 else torch.cat(out)

    def _attend_one(self, q: Tensor, span: _Span, mask: Tensor | None, kv: tuple[Tensor, Tensor]) -> Tensor:
        k, v = kv[0][span.entries].transpose(0, 1)[None], kv[1][span.entries].transpose(0, 1)[None]  # [1, Hkv, E, D]
        mask = mask if mask is None or mask.dtype == q.dtype else mask.to(q.dtype)
        count, heads, dim = q.shape
        if count >= MANY_TOKENS:
            q = q.transpose(0, 1)[None]  # [1, Hq, count, D]
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.config.scale, enable_gqa=True
            )
            return out[0].transpose(0, 1).reshape(count, -1)  # [count, Hq * D]
        # the query heads that share a KV head become rows of one head, so that its K and V are read once
        group = heads // k.shape[1]
        q = q.view(count, -1, group, dim).transpose(0, 1).reshape(1, -1, count * group, dim)
        if span.rows > count * group:
            q = F.pad(q, (0, 0, 0, span.rows - count * group))  # [1, Hkv, rows, D]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.config.scale)
        out = out[0, :, : count * group].reshape(-1, count, group, dim)
        return out.transpose(0, 1).reshape(count, -1)


def _entries(table: Tensor, context: int, page_size: int) -> slice | Tensor:
    """Slots of all entries of the pages that hold a context, the last page whole."""
    pages = table[: -(-context // page_size)].to(torch.int64)
    if pages.numel() == 1 or bool((pages.diff() == 1).all()):
        first = int(pages[0]) * page_size
        return slice(first, first + pages.numel() * page_size)
    offsets = torch.arange(page_size, device=table.device)
    return (pages[:, None] * page_size + offsets).flatten()


def _mask(batch: TokenBatch, s: int, tokens: slice, window: int | None) -> Tensor:
    """Additive mask [new tokens, entries of whole pages]."""
    context = batch.contexts[s]
    seen = batch.seen[tokens].to(torch.int64)[:, None]  # [count, 1]
    entry = torch.arange(-(-context // batch.page_size) * batch.page_size, device=seen.device)
    visible = entry < seen
    if batch.tree is not None and batch.tree_start is not None:
        start = batch.tree_start[s]
        width = min(batch.tree.shape[1], context - start)
        visible[:, start : start + width] |= batch.tree[tokens, :width]
    if window is not None:
        visible &= entry > batch.positions[tokens][:, None] - window
    return torch.zeros(visible.shape, device=seen.device).masked_fill_(~visible, float("-inf"))
