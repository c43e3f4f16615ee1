"""Prompts of which little or nothing has K/V yet, through torch's own attention: which they are, in how many rows, and
how far back they may see.

Torch runs cuDNN there, the fastest kernel on Hopper, with two limits. It knows no causal mask but the one that begins
at the first key: entries that have K/V already get rows of their own that mean nothing. And it builds a kernel for
every number of rows it meets, which takes the host 40 ms (H200), in each thread anew: rows come in few numbers
(`room_for`), and `prepare` builds them when a model is opened. `blocks` is for drafts: a token sees its own block and
the one before. Knows slots; neither models nor requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from forerun.core import TokenBatch
from forerun.models.cuda.launch import cdiv, launch, next_power_of_2, options, wait_for_previous

# Of a prompt's entries, up to which those that have K/V already get rows, too: a sixteenth more pairs at the most, for
# 0.6 of the paged kernel's time a pair (docs/log.md)
MAX_KNOWN_SHARE = 0.25
MIN_STEP = 256  # rows between two numbers of them; beyond 4,096 there are eight numbers to an octave
JOINED_ROWS = 64  # rows, of one head each, that a program joins
BLOCK_BATCHES = (4, 3, 2, 1)  # blocks of one call: as many are one kernel, however long a prompt is


def room_for(tokens: int) -> int:
    """Rows that a prompt of so many tokens gets: up to an eighth more, a sixteenth in the mean."""
    step = max(MIN_STEP, 1 << max(0, (tokens - 1).bit_length() - 4))
    return -(-tokens // step) * step


def rooms(least: int, most: int) -> list[int]:
    """All numbers of rows of prompts of at least and at most so many tokens."""
    return sorted({room_for(tokens) for tokens in (*range(least, most + 1, MIN_STEP), most)})


@dataclass(frozen=True)
class FreshPrompt:
    """Entries before `first` have K/V already; those beyond the prompt's end hold any finite numbers."""

    first: int
    rows: int  # of all of it
    slots: slice | Tensor  # [rows] of its entries: a tensor where pages do not lie side by side

    @classmethod
    def of(cls, batch: TokenBatch, least: int, block: int = 0) -> FreshPrompt | None:
        """The batch as a lone prompt of at least so many new tokens; None where it is something else. `block`: whole
        blocks of so many rows."""
        if batch.num_seqs != 1 or batch.num_tokens < least or batch.tree is not None or batch.host is None:
            return None
        tokens, size = batch.seq_lens[0], batch.page_size
        first, rows = tokens - batch.num_tokens, -(-tokens // block) * block if block else room_for(tokens)
        if first > MAX_KNOWN_SHARE * tokens or (np.diff(batch.host.kv_lens) != 1).any():
            return None
        pages = batch.host.pages[0][: -(-tokens // size)]
        if (np.diff(pages) == 1).all():
            return cls(first, rows, slice(int(pages[0]) * size, int(pages[0]) * size + rows))
        table = batch.block_tables[0, : len(pages)].to(torch.int64)
        slots = (table[:, None] * size + torch.arange(size, device=table.device)).flatten()
        return cls(first, rows, F.pad(slots, (0, max(0, rows - len(slots))))[:rows])

    def room(self, shape: tuple[int, int, int], like: Tensor) -> Tensor:
        """Room for queries [T, Hq, D] of this shape among the rows: `_whole` finds the others around them."""
        return like.new_empty(self.rows, *shape[1:])[self.first : self.first + shape[0]]

    def attend(self, q: Tensor, kv: tuple[Tensor, Tensor], scale: float, block: int = 0) -> Tensor:
        """[T, Hq, D], of queries in their `room`; `block`: no further back than the block of so many rows before."""
        rows, keys, values = self._whole(q), self._read(kv[0]), self._read(kv[1])
        out = blocks(rows, keys, values, scale, block) if block else causal(rows, keys, values, scale)
        return out[self.first : self.first + q.shape[0]]

    def _whole(self, q: Tensor) -> Tensor:
        """[rows, Hq, D]"""
        return q.as_strided((self.rows, *q.shape[1:]), q.stride(), q.storage_offset() - self.first * q.stride(0))

    def _read(self, cache: Tensor) -> Tensor:
        """[rows, Hkv, D]"""
        if not isinstance(self.slots, slice):
            return cache.index_select(0, self.slots)
        missing = self.slots.stop - len(cache)  # beyond the last page: as much as it takes
        return cache[self.slots] if missing <= 0 else F.pad(cache[self.slots.start :], (0, 0, 0, 0, 0, missing))


def causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """[rows, H, D] each -> [rows, Hq, D]; a row sees the keys up to its own."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, H, rows, D]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def blocks(q: Tensor, k: Tensor, v: Tensor, scale: float, size: int) -> Tensor:
    """The same where a row sees its own block of `size` rows and the one before it: two calls, joined by their sums of
    exponentials. Rows are a multiple of `size`."""
    out = torch.empty_like(q)
    parts = [x.view(-1, size, *x.shape[1:]).transpose(1, 2) for x in (q, k, v, out)]  # [blocks, H, size, D]
    lo, count = 0, len(parts[0])
    while lo < count:
        hi = lo + next(batch for batch in BLOCK_BATCHES if batch <= count - lo)
        rows, keys, values, to = (x[lo:hi] for x in parts)
        own, own_sums = _with_sums(rows, keys, values, scale, True)
        first = int(lo == 0)  # the first block has none before it
        if hi - lo > first:
            before = slice(lo - 1 + first, hi - 1)
            far, far_sums = _with_sums(rows[first:], parts[1][before], parts[2][before], scale, False)
            join(own[first:], far, own_sums[first:], far_sums, to[first:])
        to[:first].copy_(own[:first])
        lo = hi
    return out


@triton.jit(do_not_specialize=["rows", "count"])
def _join(
    own, far, own_sums, far_sums, out, rows, count,
    HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ROWS rows of [B, count, HEADS, D]; sums are [B, HEADS, count]."""
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    there = row < rows
    ok = there[:, None] & (d < D)[None, :]
    token = row // HEADS
    at = (token // count * HEADS + row % HEADS) * count + token % count
    apart = tl.load(far_sums + at, mask=there, other=0.0) - tl.load(own_sums + at, mask=there, other=0.0)
    share = 1.0 / (1.0 + tl.exp(-apart))
    cells = row[:, None] * D + d[None, :]
    near = tl.load(own + cells, mask=ok, other=0.0).to(tl.float32)
    distant = tl.load(far + cells, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + cells, (near + (distant - near) * share[:, None]).to(out.dtype.element_ty), mask=ok)


def join(own: Tensor, far: Tensor, own_sums: Tensor, far_sums: Tensor, out: Tensor) -> None:
    """Attention over two sets of keys, [B, H, T, D] each, as over both, into `out`. Sums are [B, H, T, 1], or flat."""
    batch, heads, count, dim = own.shape
    own, far, into = (x.transpose(1, 2) for x in (own, far, out))  # [B, T, H, D], as queries lie
    own, far = own.contiguous(), far.contiguous()
    assert into.is_contiguous() and own_sums.is_contiguous() and far_sums.is_contiguous()
    rows = batch * count * heads
    launch(
        _join, (cdiv(rows, JOINED_ROWS),),
        own, far, own_sums, far_sums, into, rows, count, HEADS=heads, D=dim, DP=next_power_of_2(dim), ROWS=JOINED_ROWS,
        **options(4),
    )  # fmt: skip


def _with_sums(q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool) -> tuple[Tensor, Tensor]:
    """[B, H, T, D] -> the same, and the logarithm of each row's sum of exponentials, [B, H, T] or [B, H, T, 1]."""
    if q.is_cuda:
        found = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, is_causal, False, scale=scale
        )
        return found[0], found[1]
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1).float() for x in (k, v))
    scores = q.float() @ k.transpose(-1, -2) * scale
    if is_causal:
        scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    return (scores.softmax(-1) @ v).to(q.dtype), scores.logsumexp(-1)


@torch.inference_mode()
def prepare(heads: tuple[int, int, int], scale: float, like: Tensor, rows: list[int], block: int = 0) -> None:
    """Have cuDNN build what prompts of so many rows need in this thread. `heads`: of queries, of K/V, and their size;
    `like`: of the dtype and device."""
    many, few, dim = heads
    for count in rows:
        q, k = (like.new_zeros(count, n, dim) for n in (many, few))
        causal(q, k, k, scale)
    for count in range(1, 2 * BLOCK_BATCHES[0] + 1 if block else 1):
        q, k = (like.new_zeros(count * block, n, dim) for n in (many, few))
        blocks(q, k, k, scale, block)
