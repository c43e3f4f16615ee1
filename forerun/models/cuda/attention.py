"""The paged attention backend on CUDA, behind the same contract as the reference.

A single fresh prompt whose pages lie side by side goes to torch's flash attention, everything else to the paged kernel;
pages that several sequences start with are read for all of them at once where that pays (`share_prefix`). `plan` reads
host-side lengths and tables only, so nothing here waits for the device.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.core import TokenBatch
from forerun.models.attention import AttentionBackend
from forerun.models.cuda.fused import rope_and_store
from forerun.models.cuda.paged import QueryPlan, paged_attention, plan_queries
from forerun.models.cuda.shared import MIN_LAUNCH_SAVING_BYTES, SharedPlan, plan_shared
from forerun.models.execution.batch_split import MAX_DECODE_TOKENS
from forerun.models.linear import Norm


class PagedAttention(AttentionBackend):
    share_prefix = True

    def plan(self, batch: TokenBatch) -> None:
        starts = batch.tree_start
        first = None if starts is None else torch.tensor(starts, dtype=torch.int32, device=self.device)
        shared = None
        if self.share_prefix and batch.host is not None:
            groups = plan_shared(batch.host, self.config, MIN_LAUNCH_SAVING_BYTES)
            shared = None if groups is None else SharedPlan.send(groups, self.device)
        self.use(batch, plan_queries(batch.cu_seqlens, max(batch.seq_lens), self.device), first, shared)
        self._fresh = self._fresh_slots(batch)

    def use(
        self,
        batch: TokenBatch,
        queries: QueryPlan,
        tree_start: Tensor | None = None,
        shared: SharedPlan | None = None,
    ) -> None:
        """Plan from buffers whose contents may change between replays of a captured graph."""
        self._batch, self._queries, self._tree_start, self._fresh = batch, queries, tree_start, None
        self._shared = shared

    def _fresh_slots(self, batch: TokenBatch) -> slice | None:
        """The slots of a lone prompt that is prefilled from its first token on contiguous pages."""
        if (
            batch.num_seqs != 1
            or batch.seq_lens[0] != batch.num_tokens
            or batch.num_tokens <= MAX_DECODE_TOKENS
            or batch.tree is not None
        ):
            return None
        first = batch.run_start
        return None if first is None else slice(first, first + batch.num_tokens)

    def store(self, qkv: Tensor, layer: int, kv: tuple[Tensor, Tensor], norms: tuple[Norm, Norm] | None) -> Tensor:
        c, batch = self.config, self._batch
        q = torch.empty(qkv.shape[0], c.num_heads, c.head_dim, dtype=qkv.dtype, device=qkv.device)
        table = self.ropes[c.layer_ropes[layer]].table
        q_norm, k_norm = (norms[0][0], norms[1][0]) if norms else (None, None)
        return rope_and_store(qkv, table, batch.positions, batch.slot_mapping, *kv, q, q_norm, k_norm, c.norm_eps)

    def attend(self, q: Tensor, layer: int, kv: tuple[Tensor, Tensor]) -> Tensor:
        batch, window = self._batch, self.config.windows[layer]
        if self._fresh is not None and (window is None or batch.num_tokens <= window):
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
        )
        return out.view(q.shape[0], -1)

    def _flash(self, q: Tensor, kv: tuple[Tensor, Tensor], slots: slice) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, kv[0][slots], kv[1][slots]))  # [1, H, T, D]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.config.scale, enable_gqa=True)
        return out[0].transpose(0, 1).reshape(q.shape[2], -1)
