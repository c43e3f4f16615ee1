"""The paged attention backend on CUDA, behind the same contract as the reference.

Everything goes to the paged kernel, but for a single prompt of which little or nothing has K/V yet: torch's own
attention takes it where equal bits are not asked for, or where the prompt is so long that they would cost more than 5%
(`FreshPrompt`). Pages that several sequences start with are read for all of them at once where that pays
(`share_prefix`). `plan` reads host-side lengths and tables only, so nothing here waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.core import EXTRA_KV_SLOTS, TokenBatch
from forerun.models.attention import AttentionBackend
from forerun.models.config import ModelConfig
from forerun.models.cuda.fused import rope_and_store
from forerun.models.cuda.lanes import prompt_shape
from forerun.models.cuda.paged import QueryPlan, paged_attention, plan_queries
from forerun.models.cuda.shared import MIN_LAUNCH_SAVING_BYTES, SharedPlan, plan_shared
from forerun.models.execution.batch_split import MAX_DECODE_TOKENS
from forerun.models.linear import Norm

MIN_FRESH_TOKENS = 4096  # of a prompt from which torch's attention saves more than 5% of its time, by default
# Of a prompt's entries, up to which those that have K/V already get rows, too: a sixteenth more pairs at the most, for
# 0.6 of the paged kernel's time a pair (docs/log.md)
MAX_KNOWN_SHARE = 0.25
# Rows come in multiples of it, because cuDNN prepares a kernel for every number of rows it meets. Entries as far beyond
# a sequence's end can be read: the cache has as many slots more than its pages
ROW_MULTIPLE = EXTRA_KV_SLOTS


@dataclass(frozen=True)
class FreshPrompt:
    """A prompt that torch's attention takes, from its first entry on: it knows no causal mask that begins later, so the
    entries before `first` get rows that mean nothing, and so do those beyond the prompt's end."""

    first: int
    rows: int  # of all of it
    slots: slice | Tensor  # [rows] of its entries: a tensor where pages do not lie side by side

    @classmethod
    def of(cls, batch: TokenBatch, least: int) -> FreshPrompt | None:
        """The batch as a lone prompt of at least so many new tokens; None where it is something else."""
        if batch.num_seqs != 1 or batch.num_tokens < least or batch.tree is not None or batch.host is None:
            return None
        tokens, size = batch.seq_lens[0], batch.page_size
        first, rows = tokens - batch.num_tokens, -(-tokens // ROW_MULTIPLE) * ROW_MULTIPLE
        if first > MAX_KNOWN_SHARE * tokens or (np.diff(batch.host.kv_lens) != 1).any():
            return None
        pages = batch.host.pages[0][: -(-tokens // size)]
        if (np.diff(pages) == 1).all():
            return cls(first, rows, slice(int(pages[0]) * size, int(pages[0]) * size + rows))
        table = batch.block_tables[0, : len(pages)].to(torch.int64)
        slots = (table[:, None] * size + torch.arange(size, device=table.device)).flatten()
        return cls(first, rows, F.pad(slots, (0, max(0, rows - len(slots))))[:rows])

    def read(self, cache: Tensor) -> Tensor:
        """[rows, Hkv, D]"""
        return cache[self.slots] if isinstance(self.slots, slice) else cache.index_select(0, self.slots)

    def whole(self, q: Tensor) -> Tensor:
        """[rows, Hq, D], where `q` are those of new tokens, as `room` made them."""
        return q.as_strided((self.rows, *q.shape[1:]), q.stride(), q.storage_offset() - self.first * q.stride(0))


class PagedAttention(AttentionBackend):
    """`batch_invariant`: whether a token's bits may depend on what else runs and how a prompt is cut. None: only in
    large batches and long prompts, where the promise would cost more than 5%."""

    share_prefix = True

    def __init__(
        self, config: ModelConfig, device: torch.device, max_context: int, batch_invariant: bool | None = False
    ) -> None:
        super().__init__(config, device, max_context)
        self.batch_invariant = batch_invariant

    def plan(self, batch: TokenBatch) -> None:
        if batch.host is not None and batch.host.prompt:
            plan = plan_queries(batch.cu_seqlens, max(batch.seq_lens), self.device, prompt=True)
            self.use(batch, plan, prompt=True)
            self._fresh = None if self.batch_invariant else FreshPrompt.of(batch, MIN_FRESH_TOKENS)
            return
        starts = batch.tree_start
        first = None if starts is None else torch.tensor(starts, dtype=torch.int32, device=self.device)
        shared = None
        if self.share_prefix and batch.host is not None:
            groups = plan_shared(batch.host, self.config, MIN_LAUNCH_SAVING_BYTES)
            shared = None if groups is None else SharedPlan.send(groups, self.device)
        self.use(batch, plan_queries(batch.cu_seqlens, max(batch.seq_lens), self.device), first, shared)
        self._fresh = FreshPrompt.of(batch, MAX_DECODE_TOKENS + 1)

    def use(
        self,
        batch: TokenBatch,
        queries: QueryPlan,
        tree_start: Tensor | None = None,
        shared: SharedPlan | None = None,
        prompt: bool = False,
    ) -> None:
        """Plan from buffers whose contents may change between replays of a captured graph. `prompt`: in tiles of one
        shape, however many rows there are."""
        self._batch, self._queries, self._tree_start, self._fresh = batch, queries, tree_start, None
        self._shared, self._shape = shared, prompt_shape(self.config.head_dim) if prompt else None

    def store(self, qkv: Tensor, layer: int, kv: tuple[Tensor, Tensor], norms: tuple[Norm, Norm] | None) -> Tensor:
        c, batch = self.config, self._batch
        count, fresh = qkv.shape[0], self._fresh
        first, rows = (0, count) if fresh is None else (fresh.first, fresh.rows)
        q = torch.empty(rows, c.num_heads, c.head_dim, dtype=qkv.dtype, device=qkv.device)[first : first + count]
        table = self.ropes[c.layer_ropes[layer]].table
        q_norm, k_norm = (norms[0][0], norms[1][0]) if norms else (None, None)
        return rope_and_store(qkv, table, batch.positions, batch.slot_mapping, *kv, q, q_norm, k_norm, c.norm_eps)

    def attend(self, q: Tensor, layer: int, kv: tuple[Tensor, Tensor]) -> Tensor:
        batch, window = self._batch, self.config.windows[layer]
        if self._fresh is not None and (window is None or batch.seq_lens[0] <= window):
            return self._flash(q, kv, self._fresh)
        out = paged_attention(
            q,
            kv[0],
            kv[1],
            batch.block_tables,
            batch.kv_lens,
            self._queries,
            self.config.scale,
            page_size=batch.page_size,
            window=window,
            tree=batch.tree,
            tree_start=self._tree_start,
            shared=self._shared,
            many_shape=self._shape,
        )
        return out.view(q.shape[0], -1)

    def _flash(self, q: Tensor, kv: tuple[Tensor, Tensor], fresh: FreshPrompt) -> Tensor:
        given = (fresh.whole(q), *(fresh.read(cache) for cache in kv))
        whole, k, v = (x.transpose(0, 1)[None] for x in given)  # [1, H, rows, D]
        out = F.scaled_dot_product_attention(whole, k, v, is_causal=True, scale=self.config.scale, enable_gqa=True)
        return out[0].transpose(0, 1)[fresh.first : fresh.first + q.shape[0]].reshape(q.shape[0], -1)
