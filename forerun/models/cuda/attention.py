"""The paged attention backend on CUDA, behind the same contract as the reference.

Everything goes to the paged kernel, but for a single prompt of which little or nothing has K/V yet: torch's own
attention takes it where equal bits are not asked for, or where the prompt is so long that they would cost more than 5%
(`fresh.py`). Pages that several sequences start with are read for all of them at once where that pays
(`share_prefix`). `plan` reads host-side lengths and tables only, so nothing here waits for the device.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from forerun.core import TokenBatch
from forerun.models.attention import AttentionBackend
from forerun.models.config import ModelConfig
from forerun.models.cuda.fresh import FreshPrompt, prepare, rooms
from forerun.models.cuda.fused import rope_and_store
from forerun.models.cuda.lanes import prompt_shape
from forerun.models.cuda.paged import QueryPlan, paged_attention, plan_queries
from forerun.models.cuda.shared import MIN_LAUNCH_SAVING_BYTES, SharedPlan, plan_shared
from forerun.models.execution.batch_split import MAX_DECODE_TOKENS
from forerun.models.linear import Norm

MIN_FRESH_TOKENS = 4096  # of a prompt from which torch's attention saves more than 5% of its time, by default


class PagedAttention(AttentionBackend):
    """`batch_invariant`: whether a token's bits may depend on what else runs and how a prompt is cut. None: only in
    large batches and long prompts, where the promise would cost more than 5%."""

    share_prefix = True

    def __init__(
        self, config: ModelConfig, device: torch.device, max_context: int, batch_invariant: bool | None = False
    ) -> None:
        super().__init__(config, device, max_context)
        self.batch_invariant = batch_invariant
        self._block = 0  # rows of a block, where windows are those of a draft

    def narrowed(self, window: int, wide: int) -> Self:
        """What sees a whole prompt at once sees at least so far back, and up to twice as far (`fresh.blocks`)."""
        other = super().narrowed(window, wide)
        other._block = window if other.config is not self.config else 0
        return other

    def prepare_prompts(self, kv: tuple[Tensor, Tensor], most: int, least: int = 0) -> None:
        least = least or MIN_FRESH_TOKENS  # of prompts that the model's own answers start from
        if most >= least and not self.batch_invariant:
            prepare(
                (self.config.num_heads, *kv[0].shape[1:]), self.config.scale, kv[0], rooms(least, most), self._block
            )

    def plan(self, batch: TokenBatch) -> None:
        if batch.host is not None and batch.host.prompt:
            plan = plan_queries(batch.cu_seqlens, max(batch.seq_lens), self.device, prompt=True)
            self.use(batch, plan, prompt=True)
            self._fresh = None if self.batch_invariant else FreshPrompt.of(batch, MIN_FRESH_TOKENS, self._block)
            return
        starts = batch.tree_start
        first = None if starts is None else torch.tensor(starts, dtype=torch.int32, device=self.device)
        shared = None
        if self.share_prefix and batch.host is not None:
            groups = plan_shared(batch.host, self.config, MIN_LAUNCH_SAVING_BYTES)
            shared = None if groups is None else SharedPlan.send(groups, self.device)
        self.use(batch, plan_queries(batch.cu_seqlens, max(batch.seq_lens), self.device), first, shared)
        self._fresh = FreshPrompt.of(batch, MAX_DECODE_TOKENS + 1, self._block)

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
        c, batch, fresh = self.config, self._batch, self._fresh
        shape = (qkv.shape[0], c.num_heads, c.head_dim)
        q = qkv.new_empty(shape) if fresh is None else fresh.room(shape, qkv)
        table = self.ropes[c.layer_ropes[layer]].table
        q_norm, k_norm = (norms[0][0], norms[1][0]) if norms else (None, None)
        return rope_and_store(qkv, table, batch.positions, batch.slot_mapping, *kv, q, q_norm, k_norm, c.norm_eps)

    def attend(self, q: Tensor, layer: int, kv: tuple[Tensor, Tensor]) -> Tensor:
        batch, window, fresh = self._batch, self.config.windows[layer], self._fresh
        seen = window or batch.seq_lens[0]  # entries back; by two blocks twice as many
        whole = batch.seq_lens[0] <= (2 * seen if self._block else seen)
        if fresh is not None and (whole or self._block):
            return fresh.attend(q, kv, self.config.scale, 0 if whole else self._block).reshape(q.shape[0], -1)
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
