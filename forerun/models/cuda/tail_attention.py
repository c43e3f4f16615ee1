"""How much the last tokens of a sequence look at each of its entries: attention weights of all layers, added up.

Two kernels, each over all layers and heads at once. The first leaves the log-sum-exp of every query's scores, its keys
cut into splits that fill the chip; the second runs over blocks of keys and adds up the weights that all queries of a
KV head give them. Every sum has a fixed order, so the same input gives the same bits. Nothing of the size of the
weights is ever written. Keys are found through the pages, layers by their addresses. Knows no request and no chooser.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from forerun.core import KV, TokenBatch
from forerun.models.config import ModelConfig
from forerun.models.cuda.launch import cdiv, launch, next_power_of_2
from forerun.models.cuda.paged import LOG2_E
from forerun.models.decoder import Decoder

MAX_TILE_PAIRS = 64  # (query, head) pairs of a tile
BLOCK_KEYS = 128  # half as many where heads are wider than 128
TARGET_PROGRAMS = 1024  # of the first kernel: several for each multiprocessor of a large chip
MAX_SPLITS = 16
UNLIMITED = 1 << 30  # the window of layers that have none
WARPS, STAGES = 4, 2


def queries_of(decoder: Decoder, batch: TokenBatch, kv: KV) -> torch.Tensor:
    """Rotated queries of all layers but the last, [layers - 1, T, Hq, D], of a planned batch; leaves its K/V.

    The last layer's output is not needed, so it only writes its K/V.
    """
    kept: list[torch.Tensor] = []  # alive until all are there: a graph must not use their memory for anything else

    def watch(layer: int, x: torch.Tensor, q: torch.Tensor | None, a: torch.Tensor | None) -> None:
        if q is not None:
            kept.append(q)

    last = decoder.config.num_layers - 1
    x = decoder.run_layers(decoder.embed(batch.tokens), batch, kv, range(last), watch=watch)
    decoder.write_kv(x, last, kv)
    return torch.stack(kept)


@triton.jit
def _key_tile(
    keys, kv_head, table, entry, there,
    KV_HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Keys of some entries in one KV head, [len(entry), DP]."""
    d = tl.arange(0, DP)
    page = tl.load(table + entry // PAGE, mask=there, other=0).to(tl.int64)
    cells = ((page * PAGE + entry % PAGE) * KV_HEADS + kv_head)[:, None] * D + d[None, :]
    return tl.load(keys + cells, mask=there[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _query_tile(
    q, layer, kv_head, pair, real, layer_stride,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Queries of some (query, head) pairs that share a KV head, [len(pair), DP]."""
    d = tl.arange(0, DP)
    cells = (pair // GROUP * (GROUP * KV_HEADS) + kv_head * GROUP + pair % GROUP)[:, None] * D + d[None, :]
    return tl.load(q + layer * layer_stride + cells, mask=real[:, None] & (d < D)[None, :], other=0.0)


@triton.jit(do_not_specialize=["queries", "first"])
def _sum_exponentials(
    q, keys_at, windows, table, sums, scale, queries, first, layer_stride,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Base-2 log-sum-exp of a tile's scores over every SPLITS-th block of keys; minus infinity where it saw none."""
    tile = tl.program_id(0)
    layer = (tl.program_id(1) // KV_HEADS).to(tl.int64)
    kv_head = tl.program_id(1) % KV_HEADS
    split = tl.program_id(2)
    # unless it is told, the compiler would read two bytes at a time
    keys = tl.multiple_of(tl.load(keys_at + layer).to(tl.pointer_type(q.dtype.element_ty)), 16)
    pairs = queries * GROUP
    pair = tile * ROWS + tl.arange(0, ROWS)
    real = pair < pairs
    q_tile = _query_tile(q, layer, kv_head, pair, real, layer_stride, GROUP, KV_HEADS, D, DP)
    window = tl.load(windows + layer)
    own = first + pair // GROUP  # the entry of each query: the last that it sees
    high = first + (tl.minimum(tile * ROWS + ROWS, pairs) - 1) // GROUP + 1
    low = tl.maximum(first + tile * ROWS // GROUP + 1 - window, 0)
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for block in range(low // KEYS + split, tl.cdiv(high, KEYS), SPLITS):
        entry = block * KEYS + tl.arange(0, KEYS)
        there = (entry >= low) & (entry < high)
        k_tile = _key_tile(keys, kv_head, table, entry, there, KV_HEADS, D, DP, PAGE)
        score = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale  # [ROWS, KEYS]
        visible = (entry[None, :] <= own[:, None]) & (entry[None, :] > (own - window)[:, None])
        score = tl.where(visible, score, float("-inf"))
        now = tl.maximum(best, tl.max(score, axis=1))
        base = tl.where(now == float("-inf"), 0.0, now)  # a row that has seen nothing yet: no inf - inf
        total = total * tl.exp2(best - base) + tl.sum(tl.exp2(score - base[:, None]), axis=1)
        best = now
    cells = (tl.program_id(1) * SPLITS + split) * pairs + pair
    tl.store(sums + cells, best + tl.log2(tl.where(total == 0.0, 1.0, total)), mask=real)


@triton.jit(do_not_specialize=["queries", "first"])
def _add_weights(
    q, keys_at, windows, table, sums, out, scale, queries, first, layer_stride,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """What all queries of a layer's KV head give a block of keys. Keys are the rows of the product here: sums over
    queries then stay within a warp."""
    layer = (tl.program_id(1) // KV_HEADS).to(tl.int64)
    kv_head = tl.program_id(1) % KV_HEADS
    keys = tl.multiple_of(tl.load(keys_at + layer).to(tl.pointer_type(q.dtype.element_ty)), 16)
    pairs, tokens = queries * GROUP, first + queries
    entry = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    there = entry < tokens
    k_tile = _key_tile(keys, kv_head, table, entry, there, KV_HEADS, D, DP, PAGE)
    window = tl.load(windows + layer)
    end = pairs
    if tl.program_id(0) * KEYS + KEYS <= first + 1 - window:
        end = 0  # before every query's window
    weight = tl.zeros((KEYS,), tl.float32)
    split = tl.arange(0, SPLITS)
    for start in range(0, end, ROWS):
        pair = start + tl.arange(0, ROWS)
        real = pair < pairs
        q_tile = _query_tile(q, layer, kv_head, pair, real, layer_stride, GROUP, KV_HEADS, D, DP)
        cells = (tl.program_id(1) * SPLITS + split)[:, None] * pairs + pair[None, :]
        parts = tl.load(sums + cells, mask=real[None, :], other=0.0)  # [SPLITS, ROWS]
        top = tl.max(parts, axis=0)  # finite: every query sees itself
        whole = top + tl.log2(tl.sum(tl.exp2(parts - top[None, :]), axis=0))
        score = tl.dot(k_tile, tl.trans(q_tile), input_precision="ieee") * scale  # [KEYS, ROWS]
        own = first + pair // GROUP
        visible = (entry[:, None] <= own[None, :]) & (entry[:, None] > (own - window)[None, :]) & real[None, :]
        weight += tl.sum(tl.where(visible, tl.exp2(score - whole[None, :]), 0.0), axis=1)
    tl.store(out + tl.program_id(1).to(tl.int64) * tokens + entry, weight, mask=there)


@dataclass(frozen=True)
class TailAttentionKernel:
    """Where the keys of one model's layers but the last lie, and how far each layer sees."""

    keys_at: torch.Tensor  # [layers - 1] int64 on the device: addresses of the key caches
    windows: torch.Tensor  # [layers - 1] int32 on the device
    caches: tuple[torch.Tensor, ...]  # [num_slots, Hkv, D] each; held, since addresses do not hold them
    scale: float
    page_size: int

    @classmethod
    def of(cls, config: ModelConfig, kv: KV, page_size: int) -> TailAttentionKernel:
        caches = tuple(keys for keys, _ in kv[:-1])
        assert caches and all(cache.is_contiguous() and cache.data_ptr() % 16 == 0 for cache in caches)
        device = caches[0].device
        keys_at = torch.tensor([cache.data_ptr() for cache in caches], dtype=torch.int64, device=device)
        seen = [window or UNLIMITED for window in config.windows[: len(caches)]]
        windows = torch.tensor(seen, dtype=torch.int32, device=device)
        return cls(keys_at, windows, caches, config.scale, page_size)

    def weights(self, q: torch.Tensor, table: torch.Tensor, first: int, queries: int) -> torch.Tensor:
        """[first + queries] float32: what queries at entries first, first + 1, ... give each entry up to the last of
        them, mean over queries, heads and layers. `q` [layers - 1, T, Hq, D] may have more rows than queries; `table`
        [P] int32 has the sequence's pages. Enqueues only."""
        layers, _, heads, dim = q.shape
        kv_heads, tokens = self.caches[0].shape[1], first + queries
        assert q.is_contiguous() and q.dtype == self.caches[0].dtype and layers == len(self.caches)
        group, pairs = heads // kv_heads, queries * (heads // kv_heads)
        rows = min(MAX_TILE_PAIRS, max(16, next_power_of_2(pairs)))
        keys, tiles, layer_heads = BLOCK_KEYS if dim <= 128 else BLOCK_KEYS // 2, cdiv(pairs, rows), layers * kv_heads
        splits = min(MAX_SPLITS, next_power_of_2(cdiv(TARGET_PROGRAMS, tiles * layer_heads)))
        sums = torch.empty(layer_heads * splits * pairs, dtype=torch.float32, device=q.device)
        out = torch.empty(layer_heads, tokens, dtype=torch.float32, device=q.device)
        # no programmatic dependent launch: what runs before is the end of a graph, and two launches gain little
        shape = {"GROUP": group, "KV_HEADS": kv_heads, "D": dim, "DP": max(16, next_power_of_2(dim)),
                 "PAGE": self.page_size, "ROWS": rows, "KEYS": keys, "SPLITS": splits, "num_warps": WARPS,
                 "num_stages": STAGES}  # fmt: skip
        where, scale = (q, self.keys_at, self.windows, table, sums), self.scale * LOG2_E
        launch(_sum_exponentials, (tiles, layer_heads, splits), *where, scale, queries, first, q.stride(0), **shape)
        grid = (cdiv(tokens, keys), layer_heads)
        launch(_add_weights, grid, *where, out, scale, queries, first, q.stride(0), **shape)
        return out.sum(0) / (queries * heads * layers)
