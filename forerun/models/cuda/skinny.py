"""Matrix products of 1 to 64 rows of activations with [N, K] weights, at the speed of reading the weights.

Rows are padded to 16 for the tensor cores, so 1 and 16 rows run the same instructions in the same order: a row's result
does not depend on how many rows there are up to 16, and 16 cost about what 1 costs. The RMS norm before the product,
bias, gated activation and residual sum after it are part of the kernel. Where N is too small to fill the chip, K is
split: every split writes its partial sums, and the last to arrive adds them in order (no float atomics: repeatable).
Knows no model: the caller names the pieces. Larger batches belong to cuBLAS.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from forerun.models.cuda.launch import cdiv, launch, next_power_of_2, options, scratch

MAX_ROWS = 64


@dataclass(frozen=True)
class Tile:
    """How one weight matrix is cut: `block_n` outputs (of gate and of up where gated) and `split` pieces of K."""

    block_n: int
    block_k: int
    split: int = 1
    warps: int = 4
    stages: int = 4
    swap: bool = False  # weights as the left operand: a 64-row block then runs on wgmma
    ahead: int = 0  # blocks of K fetched into L2 before waiting for the kernel before (only with PDL)


# (N, K, gated) -> tile, the fastest of a sweep on one H200 (docs/log.md): weights on the left, so that wgmma reads them
# from shared memory, beat every other cut of every shape.
TILES: dict[tuple[int, int, bool], Tile] = {
    # Qwen2.5-1.5B: qkv, o, gate+up, down, head
    (2048, 1536, False): Tile(64, 128, split=6, swap=True, ahead=2),
    (1536, 1536, False): Tile(64, 128, split=6, swap=True, ahead=2),
    (17920, 1536, True): Tile(64, 64, swap=True, ahead=4),
    (1536, 8960, False): Tile(64, 128, split=10, swap=True, ahead=4),
    (151936, 1536, False): Tile(128, 128, stages=3, swap=True),
    # Llama-3.1-8B: qkv, o, gate+up, down, head
    (6144, 4096, False): Tile(64, 128, split=6, swap=True, ahead=4),
    (4096, 4096, False): Tile(64, 128, split=4, swap=True, ahead=4),
    (28672, 4096, True): Tile(64, 64, swap=True, ahead=4),
    (4096, 14336, False): Tile(64, 128, split=4, swap=True, ahead=4),
    (128256, 4096, False): Tile(128, 128, stages=3, swap=True),
}


def choose_tile(n: int, k: int, gated: bool) -> Tile:
    """The measured tile of a known shape; otherwise enough programs for two on each of 132 multiprocessors."""
    known = TILES.get((n, k, gated))
    if known is not None:
        return known
    block_n = 64
    block_k = 128 if k % 128 == 0 and not gated else 64
    programs = cdiv(n // 2 if gated else n, block_n)
    blocks = cdiv(k, block_k)
    split = max(1, min(8, 264 // programs, blocks // 2))
    return Tile(block_n, block_k, split=split, swap=True, ahead=min(4, cdiv(blocks, split)))


@triton.jit
def _prefetch(w, first_row, k_start, N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, SPAN: tl.constexpr):
    """Ask L2 for SPAN weights of each of BN rows, one bulk request a row; nothing waits for them.

    The request is a per-warp instruction: one thread issues each row's, the rows dealt out over four warps.
    """
    size: tl.constexpr = SPAN * w.dtype.element_ty.primitive_bitwidth // 8
    k = tl.minimum(k_start, K - SPAN)
    for row in tl.static_range(BN):
        start = w + tl.minimum(first_row + row, N - 1).to(tl.int64) * K + k
        tl.inline_asm_elementwise(
            """{
            .reg .pred mine;
            .reg .u32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 mine, thread, $2;
            @mine cp.async.bulk.prefetch.L2.global [$1], $3;
            mov.u32 $0, 0;
            }""",
            "=r,l,r,r",
            [start.to(tl.int64), row % 4 * 32, size],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def activate(gate, ACT: tl.constexpr):
    # gelu_tanh: gate * (1 + tanh(z)) / 2 is gate * sigmoid(2z)
    inner = gate if ACT == "silu" else 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + tl.exp(-inner))


@triton.jit
def _multiply(x, w_tile, acc, SWAP: tl.constexpr):
    """acc += x @ w_tile.T, the accumulator transposed under SWAP."""
    if SWAP:
        acc = tl.dot(w_tile, tl.trans(x), acc, input_precision="ieee")
    else:
        acc = tl.dot(x, tl.trans(w_tile), acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["M"])
def _skinny(
    x, w, bias, norm_weight, residual, out, partial, squares, counter, M, x_stride, out_stride, eps,
    N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
    ACT: tl.constexpr, SWAP: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    gated: tl.constexpr = ACT is not None
    sums: tl.constexpr = 2 if gated else 1  # accumulators per output
    pid_n = tl.program_id(0)
    pid_k = tl.program_id(1)
    cols = pid_n * BN + tl.arange(0, BN)
    w_rows = tl.minimum(cols, N - 1)  # past the end: read the last row again, never stored
    rows = tl.arange(0, BM)
    row_ok = rows < M
    per_split: tl.constexpr = ((K + BK - 1) // BK + SPLIT - 1) // SPLIT
    k_start = pid_k * per_split * BK
    k_end = tl.minimum(k_start + per_split * BK, K)

    if PDL:
        gdc_launch_dependents()
        if AHEAD > 0:
            _prefetch(w, pid_n * BN, k_start, N, K, BN, AHEAD * BK)
            if gated:
                _prefetch(w + N * K, pid_n * BN, k_start, N, K, BN, AHEAD * BK)
        gdc_wait()

    high: tl.constexpr = BN if SWAP else BM
    wide: tl.constexpr = BM if SWAP else BN
    acc = tl.zeros((high, wide), tl.float32)
    acc_up = tl.zeros((high, wide), tl.float32)
    square = tl.zeros((BM, BK), tl.float32)
    w_ptrs = w + w_rows.to(tl.int64)[:, None] * K
    for k0 in range(k_start, k_end, BK):
        k = k0 + tl.arange(0, BK)
        x_mask = row_ok[:, None] if K % BK == 0 else row_ok[:, None] & (k < K)[None, :]
        x_tile = tl.load(x + rows[:, None] * x_stride + k[None, :], mask=x_mask, other=0.0)
        if norm_weight is not None:
            # the row's scale factors out of the product and is applied at the end
            x_tile = x_tile.to(tl.float32)
            square += x_tile * x_tile
            if K % BK == 0:
                x_tile = x_tile * tl.load(norm_weight + k).to(tl.float32)[None, :]
            else:
                x_tile = x_tile * tl.load(norm_weight + k, mask=k < K, other=0.0).to(tl.float32)[None, :]
        x_tile = x_tile.to(w.dtype.element_ty)
        if K % BK == 0:
            acc = _multiply(x_tile, tl.load(w_ptrs + k[None, :]), acc, SWAP)
            if gated:
                acc_up = _multiply(x_tile, tl.load(w_ptrs + N * K + k[None, :]), acc_up, SWAP)
        else:
            acc = _multiply(x_tile, tl.load(w_ptrs + k[None, :], mask=(k < K)[None, :], other=0.0), acc, SWAP)
            if gated:
                up = tl.load(w_ptrs + N * K + k[None, :], mask=(k < K)[None, :], other=0.0)
                acc_up = _multiply(x_tile, up, acc_up, SWAP)
    if SWAP:
        acc = tl.trans(acc)
        acc_up = tl.trans(acc_up)
    square_sum = tl.sum(square, axis=1)  # [BM]

    if SPLIT > 1:
        tiles = tl.num_programs(0)
        cell = rows[:, None] * BN + tl.arange(0, BN)[None, :]  # a tile's partial sums lie together
        mine = (pid_n * SPLIT + pid_k) * sums * BM * BN
        tl.store(partial + mine + cell, acc, mask=row_ok[:, None])
        if gated:
            tl.store(partial + mine + BM * BN + cell, acc_up, mask=row_ok[:, None])
        if norm_weight is not None:
            tl.store(squares + (pid_k * tiles + pid_n) * BM + rows, square_sum, mask=row_ok)
        tl.debug_barrier()  # every thread's stores before the one thread's release
        if tl.atomic_add(counter + pid_n, 1, sem="acq_rel") < SPLIT - 1:
            return
        tl.store(counter + pid_n, 0)
        acc = tl.zeros((BM, BN), tl.float32)
        acc_up = tl.zeros((BM, BN), tl.float32)
        square_sum = tl.zeros((BM,), tl.float32)
        for part in tl.static_range(SPLIT):
            theirs = (pid_n * SPLIT + part) * sums * BM * BN
            acc += tl.load(partial + theirs + cell, mask=row_ok[:, None], other=0.0, cache_modifier=".cg")
            if gated:
                there = partial + theirs + BM * BN + cell
                acc_up += tl.load(there, mask=row_ok[:, None], other=0.0, cache_modifier=".cg")
            if norm_weight is not None:
                there = squares + (part * tiles + pid_n) * BM + rows
                square_sum += tl.load(there, mask=row_ok, other=0.0, cache_modifier=".cg")

    if norm_weight is not None:
        scale = tl.rsqrt(square_sum / K + eps)[:, None]
        acc *= scale
        acc_up *= scale
    col_ok = cols < N
    if bias is not None:
        acc += tl.load(bias + cols, mask=col_ok, other=0.0).to(tl.float32)[None, :]
        if gated:
            acc_up += tl.load(bias + N + cols, mask=col_ok, other=0.0).to(tl.float32)[None, :]
    if gated:
        acc = activate(acc, ACT) * acc_up
    cells = rows[:, None] * out_stride + cols[None, :]
    ok = row_ok[:, None] & col_ok[None, :]
    if residual is not None:
        acc += tl.load(residual + cells, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + cells, acc.to(out.dtype.element_ty), mask=ok)


def _for_rows(tile: Tile, bm: int) -> Tile:
    """The same cut of N and K with smaller steps along K: 32 or 64 rows leave less room for them."""
    steps = max(1, tile.block_k // 128)
    if bm == 16:
        return tile
    return replace(tile, block_k=tile.block_k // steps, ahead=tile.ahead * steps, stages=min(3, tile.stages))


def _can_prefetch(w: torch.Tensor, tile: Tile) -> bool:
    """Bulk requests start and end at multiples of 16 bytes, within the row."""
    span = tile.ahead * tile.block_k
    return span <= w.shape[1] and span * w.itemsize % 16 == 0 and w.shape[1] * w.itemsize % 16 == 0


def skinny_linear(
    x: torch.Tensor,  # [M, K]
    w: torch.Tensor,  # [N, K], or [2 * I, K] (gate above up) with an activation
    bias: torch.Tensor | None = None,
    *,
    norm_weight: torch.Tensor | None = None,  # [K]
    eps: float = 1e-6,
    residual: torch.Tensor | None = None,  # [M, N], may be `out`
    activation: str | None = None,
    out: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """act(rmsnorm(x) @ w.T + bias) + residual; with an activation, act(gate) * up of the fused gate/up weights.

    Sums are float32. The output has the residual's dtype, or the weights' where there is none, unless `out` is given.
    """
    rows, k = x.shape
    if rows > MAX_ROWS:
        raise ValueError(f"{rows} rows of activations, skinny products take at most {MAX_ROWS}")
    if not w.is_contiguous() or w.shape[1] != k:
        raise ValueError(f"weights {tuple(w.shape)} must be contiguous and have {k} columns")
    if activation not in (None, "silu", "gelu_tanh"):
        raise ValueError(f"activation {activation!r}, known are silu and gelu_tanh")
    gated = activation is not None
    n = w.shape[0] // 2 if gated else w.shape[0]
    bm = max(16, next_power_of_2(rows))
    tile = _for_rows(tile or choose_tile(w.shape[0], k, gated), bm)
    if out is None:
        out = torch.empty(rows, n, dtype=w.dtype if residual is None else residual.dtype, device=x.device)
    if x.stride(1) != 1 or out.stride(1) != 1 or (residual is not None and residual.stride() != out.stride()):
        raise ValueError("rows must be contiguous, and the residual's rows lie as the output's")
    tiles = cdiv(n, tile.block_n)
    cells = tile.split * tiles * bm
    split = tile.split > 1
    partial = scratch("partial", cells * tile.block_n * (2 if gated else 1), torch.float32, x.device) if split else None
    squares = scratch("squares", cells, torch.float32, x.device) if split else None
    counter = scratch("counter", tiles, torch.int32, x.device) if split else None
    ahead = tile.ahead if _can_prefetch(w, tile) else 0
    launch(
        _skinny, (tiles, tile.split),
        x, w, bias, norm_weight, residual, out, partial, squares, counter, rows, x.stride(0), out.stride(0), eps,
        N=n, K=k, BM=bm, BN=tile.block_n, BK=tile.block_k, SPLIT=tile.split, ACT=activation, SWAP=tile.swap,
        AHEAD=ahead, **options(tile.warps, tile.stages),
    )  # fmt: skip
    return out
