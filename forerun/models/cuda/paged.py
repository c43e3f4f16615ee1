"""Attention over a paged KV cache: any tokens of any sequences, each seeing what `TokenBatch` says it sees.

One kernel for all regimes. A tile holds (query token, head) pairs that share a KV head, so keys and values are read
once for all of them. Sequences with few new tokens (decode, verification) are also cut along the keys: block b of a
sequence belongs to lane b % LANES, every lane leaves a partial softmax, and a second kernel joins the lanes in a fixed
order. Tiles and lanes depend on the model only, never on the batch or the context, so a token's result is the same bits
alone, in a batch, and as one of several drafted tokens. Blocks that a group of sequences shares may have been run for
all of them before (shared.py); a lane then goes on from what that left, with the same bits. Many new tokens (prefill)
mostly have work enough in their queries and are not cut; those of a lone sequence that have not (a short chunk, rows
scattered over a long prompt) get smaller tiles and are cut into as few lanes as fill the chip (lanes.py). Their bits
depend on how many rows the plan has room for. Knows no model and allocates no cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from forerun.models.cuda.lanes import DECODE_SHAPE, Shape, choose_shape, join_few, join_many, lanes_for
from forerun.models.cuda.launch import cdiv, launch, next_power_of_2, options, wait_for_previous
from forerun.models.cuda.shared import SharedPlan, absorb, attend_shared
from forerun.models.execution.batch_split import MAX_DECODE_TOKENS

LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class QueryPlan:
    """Where each sequence's new tokens lie, and what the grid must cover (a captured graph keeps its grid).

    A plan without `few` runs every sequence as one with many new tokens, however few there are when it is replayed.
    """

    cu_q: torch.Tensor  # [S + 1] int32 on the device: first new token of each sequence, then their end
    cells: torch.Tensor  # [S] int32 on the device: first token of each sequence among those whose keys are cut
    num_cells: int  # how many tokens those are, at most
    few: int  # most new tokens among sequences with at most MAX_DECODE_TOKENS; 0: there are none
    many: int  # most new tokens among sequences with more than MAX_DECODE_TOKENS; 0: there are none
    max_context: int  # no token sees an entry at or past this
    few_shape: Shape = DECODE_SHAPE  # tiles and lanes of sequences with few new tokens


def plan_queries(
    cu_seqlens: Sequence[int], max_context: int, device: torch.device | str, prompt: bool = False
) -> QueryPlan:
    """`prompt`: no sequence counts as one with few new tokens."""
    counts = [end - start for start, end in zip(cu_seqlens, cu_seqlens[1:], strict=False)]
    most = 0 if prompt else MAX_DECODE_TOKENS
    few = max((count for count in counts if count <= most), default=0)
    many = max((count for count in counts if count > most), default=0)
    cut = [count if count <= most else 0 for count in counts]
    cells = [0, *itertools.accumulate(cut)]
    both = torch.tensor([*cu_seqlens, *cells], dtype=torch.int32).to(device, non_blocking=True)
    return QueryPlan(both[: len(cu_seqlens)], both[len(cu_seqlens) : -1], cells[-1], few, many, max_context)


@triton.jit(do_not_specialize=["table_stride", "page_stride", "tree_width", "lanes", "least"])
def _attend(
    q, k_cache, v_cache, block_tables, cu_q, cells_at, kv_lens, tree, tree_start, shared, out, part, part_ml, scale,
    table_stride, page_stride, tree_width, lanes, least,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, LANES: tl.constexpr, WINDOW: tl.constexpr, WIDTH: tl.constexpr,
    MOST: tl.constexpr, TILES_AT: tl.constexpr, SHARED: tl.constexpr, UNMASKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    cut: tl.constexpr = LANES > 1
    tile = tl.num_programs(TILES_AT) - 1 - tl.program_id(TILES_AT)  # the last tile sees most: start it first
    kv_head = tl.program_id(1 - TILES_AT) // lanes
    lane = tl.program_id(1 - TILES_AT) % lanes
    s = tl.program_id(2)
    start = tl.load(cu_q + s)
    count = tl.load(cu_q + s + 1) - start
    if (count < least) | (count > MOST) | (tile * ROWS >= count * GROUP):
        return

    pair = tile * ROWS + tl.arange(0, ROWS)
    real = pair < count * GROUP
    token = (start + pair // GROUP).to(tl.int64)
    head = kv_head * GROUP + pair % GROUP
    d = tl.arange(0, DP)
    d_ok = d < D
    q_cells = (token * (GROUP * KV_HEADS) + head)[:, None] * D + d[None, :]
    q_tile = tl.load(q + q_cells, mask=real[:, None] & d_ok[None, :], other=0.0)  # [ROWS, DP]
    limit = tl.load(kv_lens + token, mask=real, other=0)
    high = tl.max(limit, axis=0)  # entries that any row of the tile may see end here
    place = limit - 1  # a token's own place: how many entries it would see without a window, less one
    first = 0
    if WIDTH > 0:
        first = tl.load(tree_start + s)
        column = tl.arange(0, WIDTH)
        bit_ok = real[:, None] & (column < tree_width)[None, :]
        bits = tl.load(tree + token[:, None] * tree_width + column[None, :], mask=bit_ok, other=0) != 0
        bits = bits & ((first + column)[None, :] >= limit[:, None])
        place += tl.sum(bits.to(tl.int32), axis=1)
        high = tl.maximum(high, tl.max(tl.max(tl.where(bits, (first + column + 1)[None, :], 0), axis=1), axis=0))
    low = 0
    if WINDOW > 0:
        low = tl.maximum(tl.min(tl.where(real, place, high), axis=0) - WINDOW + 1, 0)

    best = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DP), tl.float32)
    block_low = low // KEYS
    block_end = (high + KEYS - 1) // KEYS
    if SHARED:
        block_low = tl.load(shared + s)  # the first block that has not been run for the whole group
    block_first = block_low + (lane + LANES - block_low % LANES) % LANES  # the lane's first block that any row sees
    if SHARED:
        if (lane < block_low) & (block_first >= block_end):
            return  # what the group left in this lane is all there is
        begun = real & (lane < block_low)
        cell = ((tl.load(cells_at + s) + pair // GROUP).to(tl.int64) * (GROUP * KV_HEADS) + head) * lanes + lane
        best = tl.load(part_ml + cell * 2, mask=begun, other=float("-inf"))
        total = tl.load(part_ml + cell * 2 + 1, mask=begun, other=0.0)
        acc = tl.load(part + cell[:, None] * D + d[None, :], mask=begun[:, None] & d_ok[None, :], other=0.0)
    table = block_tables + s * table_stride
    if UNMASKED:  # blocks that every row sees whole need no mask; the same bits, in less time. Not lanes of few tokens
        block_whole = tl.min(tl.where(real, limit, high), axis=0) // KEYS
        for block in range(block_first, block_whole, LANES):
            entry = block * KEYS + tl.arange(0, KEYS)
            page = tl.load(table + entry // PAGE * page_stride).to(tl.int64)
            cells = ((page * PAGE + entry % PAGE) * KV_HEADS + kv_head)[:, None] * D + d[None, :]
            if D == DP:
                k_tile = tl.load(k_cache + cells)  # [KEYS, DP]
                v_tile = tl.load(v_cache + cells)
            else:
                k_tile = tl.load(k_cache + cells, mask=d_ok[None, :], other=0.0)
                v_tile = tl.load(v_cache + cells, mask=d_ok[None, :], other=0.0)
            score = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
            best, total, acc = absorb(score, v_tile, best, total, acc, scale)
        block_first += (tl.maximum(block_whole - block_first, 0) + LANES - 1) // LANES * LANES
    for block in range(block_first, block_end, LANES):
        entry = block * KEYS + tl.arange(0, KEYS)
        there = (entry >= low) & (entry < high)
        page = tl.load(table + entry // PAGE * page_stride, mask=there, other=0).to(tl.int64)
        cells = ((page * PAGE + entry % PAGE) * KV_HEADS + kv_head)[:, None] * D + d[None, :]
        cell_ok = there[:, None] & d_ok[None, :]
        k_tile = tl.load(k_cache + cells, mask=cell_ok, other=0.0)  # [KEYS, DP]
        v_tile = tl.load(v_cache + cells, mask=cell_ok, other=0.0)
        score = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
        visible = entry[None, :] < limit[:, None]
        if WINDOW > 0:
            visible = visible & (entry[None, :] > (place - WINDOW)[:, None])
        if WIDTH > 0:
            off = entry - first
            off_ok = real[:, None] & ((off >= 0) & (off < tree_width))[None, :]
            kin = tl.load(tree + token[:, None] * tree_width + off[None, :], mask=off_ok, other=0) != 0
            visible = visible | (kin & (entry[None, :] >= limit[:, None]))
        score = tl.where(visible, score, float("-inf"))
        best, total, acc = absorb(score, v_tile, best, total, acc, scale)

    if cut:  # its cells are computed here, again where blocks are shared: kept in registers they slow the loop
        cell = ((tl.load(cells_at + s) + pair // GROUP).to(tl.int64) * (GROUP * KV_HEADS) + head) * lanes + lane
        tl.store(part_ml + cell * 2, best, mask=real)
        tl.store(part_ml + cell * 2 + 1, total, mask=real)
        saw = real & (best > float("-inf"))
        tl.store(part + cell[:, None] * D + d[None, :], acc, mask=saw[:, None] & d_ok[None, :])
    else:
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out + q_cells, acc.to(out.dtype.element_ty), mask=real[:, None] & d_ok[None, :])


def _parts(cells: int, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for partial softmaxes: weighted sums of values; highest scores and sums of exponentials."""
    part = torch.empty((cells, q.shape[2]), dtype=torch.float32, device=q.device)
    return part, torch.empty((cells, 2), dtype=torch.float32, device=q.device)


def paged_attention(
    q: torch.Tensor,  # [T, Hq, D]
    k_cache: torch.Tensor,  # [num_slots, Hkv, D]
    v_cache: torch.Tensor,  # [num_slots, Hkv, D]
    block_tables: torch.Tensor,  # [S, P] int32, any strides
    kv_lens: torch.Tensor,  # [T] int32
    plan: QueryPlan,
    scale: float,
    *,
    page_size: int = 16,
    window: int | None = None,
    tree: torch.Tensor | None = None,  # [T, W] bool or uint8
    tree_start: torch.Tensor | None = None,  # [S] int32 on the device
    shared: SharedPlan | None = None,
    out: torch.Tensor | None = None,
    many_shape: Shape | None = None,  # None: what the plan's numbers suggest
) -> torch.Tensor:  # [T, Hq, D]
    """Token t sees entry e of its sequence when e < kv_lens[t], or when its tree row has it.

    Under a window, of the entries below kv_lens[t] only those above place - window are seen, where a token's place is
    the number of entries it would see without a window, less one (its depth in the tree counts). Every entry below the
    furthest that is seen must have been written. A token that sees nothing gets zeros. All that varies between replays
    of a graph is read on the device. `shared` blocks are read once for a group, but where there is a window, which
    leaves little of them in sight. Only a lone sequence's many new tokens may have lanes.
    """
    (_, heads, dim), kv_heads, seqs = q.shape, k_cache.shape[1], plan.cu_q.numel() - 1
    out = torch.empty_like(q) if out is None else out
    tree = tree.view(torch.uint8) if tree is not None and tree.dtype == torch.bool else tree
    many_shape = many_shape or choose_shape(max(1, plan.many), heads, kv_heads, dim, seqs, plan.max_context)
    assert shared is None or plan.few_shape == DECODE_SHAPE, "shared blocks are those of the default tile"
    assert seqs == 1 or many_shape.lanes == 1, "several sequences would need a table of cells"
    width = 0 if tree is None else tree.shape[1]
    least = MAX_DECODE_TOKENS + 1 if plan.few else 1  # of many new tokens
    for count, shape, few in ((plan.few, plan.few_shape, True), (plan.many, many_shape, False)):
        if not count:
            continue
        lanes = shape.lanes or lanes_for(kv_heads)
        launched = min(lanes, cdiv(plan.max_context, shape.keys)) if few else lanes
        parts = _parts((plan.num_cells if few else count) * heads * launched, q) if lanes > 1 else None
        groups = shared if few and not window else None
        if groups is not None and parts is not None:
            attend_shared(q, (k_cache, v_cache), block_tables, groups, parts, scale * LOG2_E, page_size, lanes,
                          launched, shape.warps)  # fmt: skip
        grid = (cdiv(count * (heads // kv_heads), shape.rows), kv_heads * launched, seqs)
        by_tile = not few and lanes > 1  # all programs of the tiles that see most start first
        launch(
            _attend, (grid[1], grid[0], seqs) if by_tile else grid,
            q, k_cache, v_cache, block_tables, plan.cu_q, plan.cells, kv_lens, tree, tree_start,
            groups.blocks if groups is not None else None, out, *(parts or (None, None)), scale * LOG2_E,
            block_tables.stride(0), block_tables.stride(1), width, launched, 1 if few else least,
            GROUP=heads // kv_heads, KV_HEADS=kv_heads, D=dim, DP=max(16, next_power_of_2(dim)), PAGE=page_size,
            ROWS=shape.rows, KEYS=shape.keys, LANES=lanes, WINDOW=window or 0, WIDTH=next_power_of_2(width),
            MOST=MAX_DECODE_TOKENS if few else 1 << 30, TILES_AT=int(by_tile), SHARED=groups is not None,
            UNMASKED=not window and (lanes == 1 or not few), **options(shape.warps, shape.stages),
        )  # fmt: skip
        if parts is not None and few:
            join_few(parts, plan.cu_q, plan.cells, out, count, MAX_DECODE_TOKENS, lanes, launched)
        elif parts is not None:
            join_many(parts, plan.cu_q, out, count, least, lanes)
    return out
