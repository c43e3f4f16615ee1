"""Attention of drafted prompts inside vLLM: K/V is staged in a pool of ours and mirrored in vLLM's cache.

Rows whose entries lie in blocks that vLLM has allocated attend through vLLM's own backend, each run of consecutive rows
as a sequence of its own length over the same block table. Others (the tail, for which there are no blocks yet) attend
over the staging pool through the reference backend. Knows nothing of requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata

from forerun.cache.pool import PagePool, slots_of
from forerun.core import TokenBatch
from forerun.core.batch import send
from forerun.models.attention import SdpaAttention
from forerun.models.config import ModelConfig
from forerun.models.linear import Norm
from forerun.prefill.state import PrefillState


@dataclass(eq=False)
class PromptBlocks:
    """The blocks of vLLM's cache that a prompt being drafted has: for its entries before `end`."""

    state: PrefillState
    blocks: np.ndarray  # [n] int32
    size: int  # entries of a block
    end: int
    base: int = 0  # layers below it are never drafted
    computed: int | None = None  # entries before it are computed exactly here; None: the prompt is drafted
    synced: int = 0  # entries before it have in vLLM's cache what the staging pool has

    def slots(self, entries: np.ndarray) -> np.ndarray:
        """[n] int64: where entries before `end` lie in vLLM's cache."""
        return self.blocks[entries // self.size].astype(np.int64) * self.size + entries % self.size


class VllmAttention(SdpaAttention):
    """`pool`: where K/V is staged. `modules`: vLLM's attention block of each layer. `builder` makes the metadata of
    vLLM's backend. `prompt`: whose rows run now."""

    def __init__(self, config: ModelConfig, pool: PagePool, max_context: int, modules: list[Any], builder: Any) -> None:
        super().__init__(config, pool.kv[0][0].device, max_context, same_bits=False)
        self._pool, self._modules, self._builder = pool, modules, builder
        self.prompt: PromptBlocks | None = None
        self._metadata: Any = None

    def plan(self, batch: TokenBatch) -> None:
        self._batch, self._metadata, self._own_slots = batch, None, None
        prompt = self.prompt
        assert prompt is not None and batch.num_seqs == 1 and batch.host is not None
        entries = batch.host.positions  # of a prompt they are its positions
        if prompt.end and entries[-1] < prompt.end:
            self._own_slots = send(prompt.slots(entries), self.device)
            if batch.host.kv_lens[-1] == entries[-1] + 1:  # else the rows only write
                self._metadata = self._build(entries, prompt)
        if self._metadata is None:
            super().plan(batch)

    def _build(self, entries: np.ndarray, prompt: PromptBlocks) -> Any:
        """A sequence for each run of consecutive entries."""
        starts = np.flatnonzero(np.diff(entries, prepend=-2) != 1)
        ends = np.append(starts[1:], len(entries))
        cu = torch.from_numpy(np.append(starts, len(entries)).astype(np.int32))
        lens = torch.from_numpy((entries[ends - 1] + 1).astype(np.int32))
        table = torch.from_numpy(prompt.blocks).expand(len(starts), -1).contiguous()
        assert self._own_slots is not None
        return self._builder.build(
            0,
            CommonAttentionMetadata(
                query_start_loc=cu.to(self.device),
                query_start_loc_cpu=cu,
                seq_lens=lens.to(self.device),
                seq_lens_cpu_upper_bound=lens,
                num_reqs=len(starts),
                num_actual_tokens=len(entries),
                max_query_len=int((ends - starts).max()),
                max_seq_len=int(lens[-1]),
                block_table_tensor=table.to(self.device),
                slot_mapping=self._own_slots,
                causal=True,
                positions=self._batch.positions,
            ),
        )

    def store(self, qkv: Tensor, layer: int, kv: tuple[Tensor, Tensor], norms: tuple[Norm, Norm] | None) -> Tensor:
        module, c, rows = self._modules[layer], self.config, qkv.shape[0]
        q, k, v = (part.contiguous() for part in qkv.split([c.q_size, c.kv_size, c.kv_size], -1))
        if norms is not None:
            q = module.q_norm(q.view(-1, c.head_dim)).view(rows, -1)
            k = module.k_norm(k.view(-1, c.head_dim)).view(rows, -1)
        q, k = module.rotary_emb(self._batch.positions, q, k)
        k, v = k.view(rows, c.num_kv_heads, c.head_dim), v.view(rows, c.num_kv_heads, c.head_dim)
        kv[0].index_copy_(0, self._batch.slot_mapping, k)
        kv[1].index_copy_(0, self._batch.slot_mapping, v)
        if self._own_slots is not None:
            self._write(layer, k, v, self._own_slots)
        return q.view(rows, c.num_heads, c.head_dim)

    def attend(self, q: Tensor, layer: int, kv: tuple[Tensor, Tensor]) -> Tensor:
        if self._metadata is None:
            return super().attend(q, layer, kv)
        assert self.prompt is not None
        if layer >= self.prompt.base:  # below it nothing but `store` writes
            self.sync(self.prompt.state.read)
        own, out = self._modules[layer].attn, torch.empty_like(q)
        none = q.new_empty(0)  # K and V are in the cache already
        own.impl.forward(own, q, none, none, own.kv_cache, self._metadata, output=out)
        return out.view(q.shape[0], -1)

    def sync(self, end: int) -> None:
        """Give vLLM's cache what sources have written to the staging pool, for entries before `end`."""
        prompt = self.prompt
        assert prompt is not None
        first, end = prompt.synced, min(end, prompt.end)
        if first >= end:
            return
        staged = send(slots_of(prompt.state.pages, first, end, self._pool.page_size), self.device)
        slots = send(prompt.slots(np.arange(first, end)), self.device)
        for layer, (k, v) in enumerate(self._pool.kv):
            self._write(layer, k.index_select(0, staged), v.index_select(0, staged), slots)
        prompt.synced = end

    def _write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        own = self._modules[layer].attn
        own.impl.do_kv_cache_update(own, k, v, own.kv_cache, slots)
