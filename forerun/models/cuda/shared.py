"""Shared-prefix attention on CUDA: the queries of a group of sequences run over the pages they share together.

The first of two passes. It leaves for every (token, head) pair of the group and every lane the partial softmax that the
paged kernel would have after the shared blocks; the paged kernel goes on from there over each sequence's own blocks.
Blocks, lanes, their order and the tile's shape are those of the paged kernel, so a token gets the bits it gets without
sharing. Two tiles of a group run over each block that is loaded.

`plan_shared` decides on the host which sequences form groups: what reading shared keys once for a group saves is known
beforehand, and only batches where it pays are grouped.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from forerun.core import HostBatch
from forerun.models.config import ModelConfig
from forerun.models.cuda.launch import launch, next_power_of_2, options, wait_for_previous
from forerun.models.execution.batch_split import MAX_DECODE_TOKENS
from forerun.models.execution.shared_prefix import MIN_SHARED_KEYS, find_groups

BLOCK_KEYS = 64  # shared keys come in whole blocks, so that blocks are cut where they would be cut without sharing
TILE_PAIRS = 32  # pairs of a tile, of a single sequence as of a group
GROUP_TILES = 2  # tiles of a group that one program runs over each block it loads
TILE_FIELDS = 5  # of a tile: first member, members, first pair, row of the tables, shared blocks

# Bytes of K and V that a layer must be spared for the extra launch to pay: against captured graphs, against single
# launches whose gaps hide some of it, and against the launch of the whole decoder, which has no launches at all.
MIN_GRAPH_SAVING_BYTES, MIN_LAUNCH_SAVING_BYTES, MIN_STACK_SAVING_BYTES = 24 << 20, 96 << 20, 96 << 20
STAGES = 2  # blocks on their way; changes no bit


@dataclass(frozen=True)
class Groups:
    tiles: np.ndarray  # [N, TILE_FIELDS] int32
    members: np.ndarray  # [M, 2] int32: token of the batch, and its place among tokens whose keys are cut
    blocks: np.ndarray  # [S] int32: blocks of a sequence that its group's tiles run; 0: it is in no group
    spared: int  # bytes of a layer's K and V that are not read again

    def lay(self, out: np.ndarray, seqs: int, rows: int) -> None:
        """Blocks, members and tiles one after the other, in zeroed int32 memory for so many sequences and rows."""
        out[: len(self.blocks)] = self.blocks
        out[seqs : seqs + self.members.size] = self.members.ravel()
        first = seqs + 2 * rows
        out[first : first + self.tiles.size] = self.tiles.ravel()


def most_tiles(rows: int, heads_per_kv: int) -> int:
    """Programs per KV head and lane that any groups of so many tokens need; a group has two tokens at least."""
    return -(-rows * heads_per_kv // (TILE_PAIRS * GROUP_TILES)) + rows // 2


def plan_shared(batch: HostBatch, config: ModelConfig, least: int) -> Groups | None:
    """The groups of a batch, or None where they would spare a layer fewer than `least` bytes."""
    key_bytes = 4 * config.kv_size  # K and V, two bytes a number
    if all(config.windows) or batch.bits is not None:  # rows of trees would get other bits (docs/log.md)
        return None
    if len(batch.pages) < 2 or sum(batch.seq_lens) * key_bytes < least:
        return None
    firsts = Counter(int(pages[0]) for pages in batch.pages)
    if len(firsts) == len(batch.pages):
        return None
    counts = [end - start for start, end in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False)]
    usable = [
        int(batch.kv_lens[start : start + count].min()) // batch.page_size
        if 0 < count <= MAX_DECODE_TOKENS and firsts[int(pages[0])] > 1
        else 0
        for start, count, pages in zip(batch.cu_seqlens, counts, batch.pages, strict=False)
    ]
    rows = [row for row, pages in enumerate(usable) if pages * batch.page_size >= MIN_SHARED_KEYS]
    if len(rows) < 2:
        return None
    tables = np.zeros((len(rows), max(usable[row] for row in rows)), dtype=np.int32)
    for at, row in enumerate(rows):
        tables[at, : usable[row]] = batch.pages[row][: usable[row]]
    found = find_groups(tables, [usable[row] for row in rows], -(-MIN_SHARED_KEYS // batch.page_size))
    groups = [(sorted(rows[at] for at in part), pages * batch.page_size // BLOCK_KEYS) for part, pages in found]
    return _lay_out(groups, batch.cu_seqlens, counts, config.num_heads // config.num_kv_heads, key_bytes, least)


def _lay_out(
    groups: list[tuple[list[int], int]],
    cu_seqlens: list[int],
    counts: list[int],
    heads_per_kv: int,
    key_bytes: int,
    least: int,
) -> Groups | None:
    cells = np.cumsum([0, *(count if count <= MAX_DECODE_TOKENS else 0 for count in counts)])
    blocks = np.zeros(len(counts), dtype=np.int32)
    members: list[tuple[int, int]] = []
    tiles: list[tuple[int, int, int, int, int]] = []
    spared = 0
    for rows, shared in groups:
        first = len(members)
        members += [(cu_seqlens[row] + i, int(cells[row]) + i) for row in rows for i in range(counts[row])]
        size = len(members) - first
        cuts = range(0, size * heads_per_kv, TILE_PAIRS * GROUP_TILES)
        tiles += [(first, size, cut, rows[0], shared) for cut in cuts]
        blocks[rows] = shared
        alone = sum(-(-counts[row] * heads_per_kv // TILE_PAIRS) for row in rows)
        spared += (alone - len(cuts)) * shared * BLOCK_KEYS * key_bytes
    if not tiles or spared < least:
        return None
    return Groups(np.array(tiles, dtype=np.int32), np.array(members, dtype=np.int32), blocks, spared)


@dataclass(frozen=True)
class SharedPlan:
    """`Groups` on the device; a captured graph keeps the addresses and the number of tiles."""

    blocks: torch.Tensor  # [S] int32
    members: torch.Tensor  # [M, 2] int32
    tiles: torch.Tensor  # [N, TILE_FIELDS] int32

    @classmethod
    def of(cls, memory: torch.Tensor, seqs: int, rows: int) -> SharedPlan:
        """From int32 memory in which `Groups.lay` has laid blocks, members and tiles."""
        first = seqs + 2 * rows
        return cls(memory[:seqs], memory[seqs:first].view(rows, 2), memory[first:].view(-1, TILE_FIELDS))

    @classmethod
    def send(cls, groups: Groups, device: torch.device) -> SharedPlan:
        seqs, rows = len(groups.blocks), len(groups.members)
        memory = torch.zeros(seqs + groups.members.size + groups.tiles.size, dtype=torch.int32)
        groups.lay(memory.numpy(), seqs, rows)
        return cls.of(memory.to(device, non_blocking=True), seqs, rows)


@triton.jit
def absorb(score, v_tile, best, total, acc, scale):
    """One block of scores, not scaled yet, into a tile's running softmax: highest score, sum of exponentials, weighted
    sum of values. Sums of products are fused by name: left to the compiler, one kernel would fuse and another not."""
    now = tl.maximum(best, tl.max(score, axis=1) * scale)
    base = tl.where(now == float("-inf"), 0.0, now)  # a row that has seen nothing yet: no inf - inf
    prob = tl.exp2(tl.fma(score, scale, -base[:, None]))
    keep = tl.exp2(best - base)
    total = tl.fma(total, keep, tl.sum(prob, axis=1))
    acc = tl.dot(prob.to(v_tile.dtype), v_tile, acc * keep[:, None], input_precision="ieee")
    return now, total, acc


@triton.jit
def _place(members, first, size, pair, kv_head, lane, lanes, GROUP: tl.constexpr, KV_HEADS: tl.constexpr):
    """Of pairs of a group: whether there is one, where its query lies, and where its partial softmax goes."""
    real = pair < size * GROUP
    member = members + (first + pair // GROUP) * 2
    head = kv_head * GROUP + pair % GROUP
    query = tl.load(member, mask=real, other=0).to(tl.int64) * (GROUP * KV_HEADS) + head
    cell = (tl.load(member + 1, mask=real, other=0).to(tl.int64) * (GROUP * KV_HEADS) + head) * lanes + lane
    return real, query, cell


@triton.jit
def _leave(part, part_ml, cell, d, real, best, total, acc, D: tl.constexpr):
    tl.store(part_ml + cell * 2, best, mask=real)
    tl.store(part_ml + cell * 2 + 1, total, mask=real)
    tl.store(part + cell[:, None] * D + d[None, :], acc, mask=real[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=["table_stride", "page_stride", "lanes"])
def _attend_shared(
    q, k_cache, v_cache, block_tables, tiles, members, part, part_ml, scale, table_stride, page_stride, lanes,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, LANES: tl.constexpr, FIELDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    tile = tiles + tl.program_id(0) * FIELDS
    kv_head = tl.program_id(1) // lanes
    lane = tl.program_id(1) % lanes
    blocks = tl.load(tile + 4)
    if lane >= blocks:
        return
    first = tl.load(tile)
    size = tl.load(tile + 1)
    table = block_tables + tl.load(tile + 3) * table_stride
    d = tl.arange(0, DP)
    pair = tl.load(tile + 2) + tl.arange(0, ROWS)
    real_a, query_a, cell_a = _place(members, first, size, pair, kv_head, lane, lanes, GROUP, KV_HEADS)
    real_b, query_b, cell_b = _place(members, first, size, pair + ROWS, kv_head, lane, lanes, GROUP, KV_HEADS)
    d_ok = (d < D)[None, :]
    q_a = tl.load(q + query_a[:, None] * D + d[None, :], mask=real_a[:, None] & d_ok, other=0.0)  # [ROWS, DP]
    q_b = tl.load(q + query_b[:, None] * D + d[None, :], mask=real_b[:, None] & d_ok, other=0.0)

    best_a = tl.full((ROWS,), float("-inf"), tl.float32)
    best_b = tl.full((ROWS,), float("-inf"), tl.float32)
    total_a = tl.zeros((ROWS,), tl.float32)
    total_b = tl.zeros((ROWS,), tl.float32)
    acc_a = tl.zeros((ROWS, DP), tl.float32)
    acc_b = tl.zeros((ROWS, DP), tl.float32)
    for block in range(lane, blocks, LANES):
        entry = block * KEYS + tl.arange(0, KEYS)
        page = tl.load(table + entry // PAGE * page_stride).to(tl.int64)
        cells = ((page * PAGE + entry % PAGE) * KV_HEADS + kv_head)[:, None] * D + d[None, :]
        k_tile = tl.load(k_cache + cells, mask=d_ok, other=0.0)  # [KEYS, DP]
        v_tile = tl.load(v_cache + cells, mask=d_ok, other=0.0)
        score_a = tl.dot(q_a, tl.trans(k_tile), input_precision="ieee")
        score_b = tl.dot(q_b, tl.trans(k_tile), input_precision="ieee")
        best_a, total_a, acc_a = absorb(score_a, v_tile, best_a, total_a, acc_a, scale)
        best_b, total_b, acc_b = absorb(score_b, v_tile, best_b, total_b, acc_b, scale)
    _leave(part, part_ml, cell_a, d, real_a, best_a, total_a, acc_a, D)
    _leave(part, part_ml, cell_b, d, real_b, best_b, total_b, acc_b, D)


def attend_shared(
    q: torch.Tensor,  # [T, Hq, D]
    kv: tuple[torch.Tensor, torch.Tensor],  # [num_slots, Hkv, D] each
    block_tables: torch.Tensor,  # [S, P] int32, any strides
    plan: SharedPlan,
    parts: tuple[torch.Tensor, torch.Tensor],  # partial softmaxes [cells * Hq * lanes, D] and [.., 2], float32
    scale_log2: float,
    page_size: int,
    lanes: int,
    launched: int,  # lanes that `parts` has: others would have no block
    warps: int,
) -> None:
    heads, dim = q.shape[1], q.shape[2]
    kv_heads = kv[0].shape[1]
    launch(
        _attend_shared, (plan.tiles.shape[0], kv_heads * launched),
        q, *kv, block_tables, plan.tiles, plan.members, *parts, scale_log2, *block_tables.stride(), launched,
        GROUP=heads // kv_heads, KV_HEADS=kv_heads, D=dim, DP=max(16, next_power_of_2(dim)), PAGE=page_size,
        ROWS=TILE_PAIRS, KEYS=BLOCK_KEYS, LANES=lanes, FIELDS=TILE_FIELDS, **options(warps, STAGES),
    )  # fmt: skip


assert GROUP_TILES == 2, "the kernel runs tiles a and b"
