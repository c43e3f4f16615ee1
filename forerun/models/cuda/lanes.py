"""How the paged kernels cut their work, and how what the cuts leave is joined: the shape of a tile, the lanes that keys
are dealt into, and the kernels that add the lanes' partial softmaxes up in a fixed order.

Where sequences have few new tokens, tiles and lanes depend on the model only, since bits are promised there. One
sequence with many gets smaller tiles and as many lanes as fill the chip, from numbers that a captured graph keeps: the
rows it has room for, the heads, the longest context.

Two kernels join: sequences with few new tokens have many lanes and find their cells in a table; a lone sequence with
many has few lanes, and its cells lie as its output does. Neither reads a cell that its lane has not written: lanes in
which a token sees nothing count for nothing, and a token that sees nothing gets zeros. Knows no cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton
import triton.language as tl

from forerun.models.config import ModelConfig
from forerun.models.cuda.launch import cdiv, launch, next_power_of_2, options, wait_for_previous
from forerun.models.cuda.shared import BLOCK_KEYS, TILE_PAIRS


@dataclass(frozen=True)
class Shape:
    """Rows (token, head pairs) and keys of a tile, and into how many lanes the keys of many new tokens are dealt."""

    rows: int
    keys: int
    warps: int
    stages: int
    lanes: int = 1  # a power of two; 0: as many as `lanes_for` says


# of sequences with few new tokens, whose bits are promised
DECODE_SHAPE = Shape(TILE_PAIRS, BLOCK_KEYS, 4, 2, lanes=0)
# of many sequences with one new token each, which fill the chip by themselves (docs/results.md): short contexts, long
BATCH_SHAPE, LONG_BATCH_SHAPE = Shape(TILE_PAIRS, BLOCK_KEYS, 2, 3), Shape(TILE_PAIRS, 128, 4, 3)
BATCH_PROGRAMS, SHORT_CONTEXT = 256, 1024  # programs from which keys need no cut; entries of a short context
# The fastest of sweeps on one H200 (docs/log.md): of rows that fill the chip, of those of one sequence that do not, and
# of heads wider than 128, whose tiles would not fit into shared memory otherwise.
PREFILL_SHAPE = Shape(128, 128, 8, 2)
SHORT_PREFILL_SHAPE = Shape(64, 64, 4, 3)
WIDE_HEAD_SHAPE = Shape(64, 64, 4, 2)

TARGET_PROGRAMS = 960  # about as many are best: of 944 rows 4 lanes, of 1,800 rows 2 or 4
MAX_LANES = 16  # partial softmaxes are written and read again, D + 2 numbers a lane for each token and head
MIN_LANE_BLOCKS = 4  # of a lane, in the longest context: fewer are not worth what the lane leaves
MAX_PAIRS = 16  # (token, head) pairs that one program joins where there are many
JOIN_PROGRAMS = 512  # programs; fewer join fewer pairs each, so that they do not wait for each other's lanes
MIN_PAIRS = 2


def lanes_for(kv_heads: int) -> int:
    """Lanes that fill the chip with one sequence of few new tokens: about 128 programs over all KV heads."""
    return max(8, min(64, next_power_of_2(128 // kv_heads)))


def batch_shape(seqs: int, c: ModelConfig, context: int) -> Shape:
    """Of so many sequences with one new token each, whose bits may depend on their number: few lanes, so that partial
    softmaxes are not written and joined where nothing waits for them."""
    lanes = 1 << max(1, BATCH_PROGRAMS // (seqs * c.num_kv_heads)).bit_length() - 1
    shape = BATCH_SHAPE if context <= SHORT_CONTEXT or c.head_dim > 128 else LONG_BATCH_SHAPE
    return replace(shape, lanes=lanes)


def prompt_shape(dim: int) -> Shape:
    """Of prompts whose bits depend on nothing else: the same for any number of rows."""
    return PREFILL_SHAPE if dim <= 128 else WIDE_HEAD_SHAPE


@lru_cache(maxsize=1024)
def choose_shape(rows: int, heads: int, kv_heads: int, dim: int, seqs: int, max_context: int) -> Shape:
    """Of sequences with many new tokens, at most `rows` each. Only a lone sequence is cut: it needs no cell table."""
    few, full = (SHORT_PREFILL_SHAPE, PREFILL_SHAPE) if dim <= 128 else (WIDE_HEAD_SHAPE, WIDE_HEAD_SHAPE)
    programs = cdiv(rows * (heads // kv_heads), few.rows) * kv_heads
    lanes = 2 ** max(0, round(math.log2(TARGET_PROGRAMS / programs)))
    if seqs > 1 or lanes == 1:
        return full
    worth = max(1, cdiv(max_context, few.keys) // MIN_LANE_BLOCKS)  # lanes with blocks enough
    return replace(few, lanes=min(lanes, MAX_LANES, 1 << worth.bit_length() - 1))


@triton.jit(do_not_specialize=["few", "lanes"])
def _join_few(
    part, part_ml, cu_q, cells_at, out, few, lanes,
    HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, LANES: tl.constexpr, MOST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per query token and head: sum of the lanes' partial softmaxes."""
    wait_for_previous(PDL)
    s = tl.program_id(0) // few
    index = tl.program_id(0) % few
    head = tl.program_id(1)
    start = tl.load(cu_q + s)
    count = tl.load(cu_q + s + 1) - start
    if (index >= count) | (count > MOST):
        return
    lane = tl.arange(0, LANES)  # all lanes, launched or not: the order of the sum must not depend on the grid
    d = tl.arange(0, DP)
    cell = ((tl.load(cells_at + s) + index).to(tl.int64) * HEADS + head) * lanes + lane
    best = tl.load(part_ml + cell * 2, mask=lane < lanes, other=float("-inf"))
    total = tl.load(part_ml + cell * 2 + 1, mask=lane < lanes, other=0.0)
    saw = best > float("-inf")
    top = tl.max(best, axis=0)
    weight = tl.where(saw, tl.exp2(best - top), 0.0)
    acc = tl.load(part + cell[:, None] * D + d[None, :], mask=saw[:, None] & (d < D)[None, :], other=0.0)
    whole = tl.sum(total * weight, axis=0)
    row = tl.sum(acc * weight[:, None], axis=0) / tl.where(whole == 0.0, 1.0, whole)
    cells = ((start + index).to(tl.int64) * HEADS + head) * D + d
    tl.store(out + cells, row.to(out.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=["least"])
def _join_many(
    part, part_ml, cu_q, out, least,
    HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, LANES: tl.constexpr, PAIRS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """PAIRS pairs of the only sequence, whose heads and tokens lie side by side in cells and output alike."""
    wait_for_previous(PDL)
    start = tl.load(cu_q)
    count = tl.load(cu_q + 1) - start
    if (count < least) | (tl.program_id(0) * PAIRS >= count * HEADS):
        return
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    real = pair < count * HEADS
    d = tl.arange(0, DP)
    d_ok = (d < D)[None, :]
    cell = pair.to(tl.int64) * LANES
    top = tl.full((PAIRS,), float("-inf"), tl.float32)
    for lane in tl.static_range(LANES):
        top = tl.maximum(top, tl.load(part_ml + (cell + lane) * 2, mask=real, other=float("-inf")))
    whole = tl.zeros((PAIRS,), tl.float32)
    acc = tl.zeros((PAIRS, DP), tl.float32)
    for lane in tl.static_range(LANES):
        best = tl.load(part_ml + (cell + lane) * 2, mask=real, other=float("-inf"))
        saw = best > float("-inf")
        weight = tl.where(saw, tl.exp2(best - top), 0.0)
        whole += tl.load(part_ml + (cell + lane) * 2 + 1, mask=saw, other=0.0) * weight
        own = tl.load(part + (cell + lane)[:, None] * D + d[None, :], mask=saw[:, None] & d_ok, other=0.0)
        acc += own * weight[:, None]
    row = acc / tl.where(whole == 0.0, 1.0, whole)[:, None]
    cells = (start.to(tl.int64) * HEADS + pair)[:, None] * D + d[None, :]
    tl.store(out + cells, row.to(out.dtype.element_ty), mask=real[:, None] & d_ok)


def join_few(
    parts: tuple[torch.Tensor, torch.Tensor],  # [cells * Hq * launched, D] and [.., 2], float32
    cu_q: torch.Tensor,  # [S + 1] int32
    cells: torch.Tensor,  # [S] int32: the first cell of each sequence
    out: torch.Tensor,  # [T, Hq, D]
    few: int,  # most new tokens of a sequence
    most: int,  # sequences with more have no cells
    lanes: int,
    launched: int,
) -> None:
    _, heads, dim = out.shape
    launch(
        _join_few, ((cu_q.numel() - 1) * few, heads), *parts, cu_q, cells, out, few, launched,
        HEADS=heads, D=dim, DP=max(16, next_power_of_2(dim)), LANES=lanes, MOST=most, **options(4),
    )  # fmt: skip


def join_many(
    parts: tuple[torch.Tensor, torch.Tensor],  # [many * Hq * lanes, D] and [.., 2], float32
    cu_q: torch.Tensor,  # [2] int32
    out: torch.Tensor,  # [T, Hq, D]
    many: int,  # most new tokens of the sequence
    least: int,  # a sequence with fewer has no cells
    lanes: int,
) -> None:
    _, heads, dim = out.shape
    pairs = max(MIN_PAIRS, min(MAX_PAIRS, next_power_of_2(many * heads // JOIN_PROGRAMS)))
    launch(
        _join_many, (cdiv(many * heads, pairs),), *parts, cu_q, out, least,
        HEADS=heads, D=dim, DP=max(16, next_power_of_2(dim)), LANES=lanes, PAIRS=pairs, **options(4),
    )  # fmt: skip
