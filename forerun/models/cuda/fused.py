"""Elementwise and per-row kernels between the matrix products: norms, rotary and KV write, gated activation; and the
linear that chooses between them and `skinny`.

For few rows the norms and the activation live inside `skinny`, which reads weights at memory speed; these serve large
batches, where cuBLAS multiplies. All arithmetic is float32, rounded once when stored. Knows no model; the cache's
layout is [num_slots, Hkv, D].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from forerun.models.cuda.launch import cdiv, launch, next_power_of_2, options, wait_for_previous
from forerun.models.cuda.skinny import activate, skinny_linear
from forerun.models.linear import Linear, Norm

HEADS_AT_ONCE = 8
ACT_BLOCK = 1024
MAX_SKINNY_ROWS = 24  # from 32 rows on cuBLAS is faster (docs/log.md: whole steps of both shapes on one H200)


@triton.jit
def _rms_norm(
    x, weight, residual, out, x_stride, eps,
    N: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A row: out = norm(x) * weight + residual, which may be None."""
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    ok = col < N
    h = tl.load(x + row * x_stride + col, mask=ok, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(h * h, axis=0) / N + eps)
    y = h * scale * tl.load(weight + col, mask=ok, other=0.0).to(tl.float32)
    if residual is not None:
        y += tl.load(residual + row * N + col, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + row * N + col, y.to(out.dtype.element_ty), mask=ok)


def rms_norm(
    x: Tensor,  # [T, N]
    weight: Tensor,  # [N]
    eps: float,
    residual: Tensor | None = None,  # [T, N]
) -> Tensor:
    """norm(x) * weight, plus the residual where given (a norm after attention or mlp). The weight's dtype, or the
    residual's."""
    out = torch.empty(x.shape, dtype=weight.dtype if residual is None else residual.dtype, device=x.device)
    rows, n = x.shape
    if x.stride(1) != 1 or (residual is not None and not residual.is_contiguous()):
        raise ValueError("norms take rows that are contiguous")
    if rows:
        block = next_power_of_2(n)
        warps = max(1, min(8, block // 512))
        launch(
            _rms_norm, (rows,),
            x, weight, residual, out, x.stride(0), eps, N=n, BLOCK=block, **options(warps)
        )  # fmt: skip
    return out


@triton.jit
def _act_mul(gate_up, out, stride, N: tl.constexpr, ACT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + row * stride + col, mask=col < N, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + N + col, mask=col < N, other=0.0).to(tl.float32)
    tl.store(out + row * N + col, (activate(gate, ACT) * up).to(out.dtype.element_ty), mask=col < N)


def act_mul(gate_up: Tensor, activation: str) -> Tensor:  # [T, 2 * I] -> [T, I]
    """act(gate) * up, gate in the first half of a row."""
    if activation not in ("silu", "gelu_tanh"):
        raise ValueError(f"activation {activation!r}, known are silu and gelu_tanh")
    rows, n = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, n, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        launch(
            _act_mul, (rows, cdiv(n, ACT_BLOCK)),
            gate_up, out, gate_up.stride(0), N=n, ACT=activation, BLOCK=ACT_BLOCK, **options(4)
        )  # fmt: skip
    return out


@triton.jit
def _rope_and_store(
    qkv, cos_sin, positions, slot_mapping, k_cache, v_cache, q_out, q_norm, k_norm, eps, qkv_stride,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, AT_ONCE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: AT_ONCE heads of one token, whichever of q, k and v they are."""
    wait_for_previous(PDL)
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    half = tl.arange(0, HALF)
    half_ok = half < D // 2
    is_q = head < Q_HEADS
    is_k = (head >= Q_HEADS) & (head < Q_HEADS + KV_HEADS)
    is_v = (head >= Q_HEADS + KV_HEADS) & (head < Q_HEADS + 2 * KV_HEADS)
    ok = (head < Q_HEADS + 2 * KV_HEADS)[:, None] & half_ok[None, :]
    cells = qkv + t * qkv_stride + head[:, None] * D + half[None, :]
    low = tl.load(cells, mask=ok, other=0.0).to(tl.float32)  # [AT_ONCE, HALF]
    high = tl.load(cells + D // 2, mask=ok, other=0.0).to(tl.float32)
    if q_norm is not None:
        scale = tl.rsqrt((tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / D + eps)
        normed = (is_q | is_k)[:, None]
        for part in tl.static_range(2):
            q_part = tl.load(q_norm + part * (D // 2) + half, mask=half_ok, other=0.0).to(tl.float32)
            k_part = tl.load(k_norm + part * (D // 2) + half, mask=half_ok, other=0.0).to(tl.float32)
            factor = tl.where(is_q[:, None], q_part[None, :], k_part[None, :]) * scale[:, None]
            if part == 0:
                low = tl.where(normed, low * factor, low)
            else:
                high = tl.where(normed, high * factor, high)
    position = tl.load(positions + t).to(tl.int64)
    cos = tl.load(cos_sin + position * D + half, mask=half_ok, other=0.0)[None, :]
    sin = tl.load(cos_sin + position * D + D // 2 + half, mask=half_ok, other=0.0)[None, :]
    new_low = low * cos - high * sin
    new_high = high * cos + low * sin

    dtype = q_out.dtype.element_ty
    q_cells = q_out + (t * Q_HEADS + head)[:, None] * D + half[None, :]
    tl.store(q_cells, new_low.to(dtype), mask=is_q[:, None] & half_ok[None, :])
    tl.store(q_cells + D // 2, new_high.to(dtype), mask=is_q[:, None] & half_ok[None, :])
    slot = tl.load(slot_mapping + t).to(tl.int64)
    dtype = k_cache.dtype.element_ty
    k_ok = (is_k & (slot >= 0))[:, None] & half_ok[None, :]
    k_cells = k_cache + (slot * KV_HEADS + head - Q_HEADS)[:, None] * D + half[None, :]
    tl.store(k_cells, new_low.to(dtype), mask=k_ok)
    tl.store(k_cells + D // 2, new_high.to(dtype), mask=k_ok)
    v_ok = (is_v & (slot >= 0))[:, None] & half_ok[None, :]
    v_cells = v_cache + (slot * KV_HEADS + head - Q_HEADS - KV_HEADS)[:, None] * D + half[None, :]
    tl.store(v_cells, low.to(dtype), mask=v_ok)
    tl.store(v_cells + D // 2, high.to(dtype), mask=v_ok)


def rope_and_store(
    qkv: Tensor,  # [T, (Hq + 2 * Hkv) * D]
    cos_sin: Tensor,  # [max_positions, D] float32: cosines, then sines
    positions: Tensor,  # [T]
    slot_mapping: Tensor,  # [T]; negative: the token's K/V is not kept
    k_cache: Tensor,  # [num_slots, Hkv, D]
    v_cache: Tensor,  # [num_slots, Hkv, D]
    q_out: Tensor,  # [T, Hq, D]
    q_norm: Tensor | None = None,  # [D], with k_norm: RMS norm of each head before the rotation
    k_norm: Tensor | None = None,  # [D]
    eps: float = 1e-6,
) -> Tensor:
    """Rotate q into `q_out` and k into its cache slot, copy v into its slot. Returns `q_out`."""
    tokens, q_heads, dim = q_out.shape
    kv_heads = k_cache.shape[1]
    if qkv.shape[1] != (q_heads + 2 * kv_heads) * dim:
        raise ValueError(f"qkv has {qkv.shape[1]} columns, {q_heads} + 2 * {kv_heads} heads of {dim} have others")
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm come together")
    if tokens:
        grid = (tokens, cdiv(q_heads + 2 * kv_heads, HEADS_AT_ONCE))
        launch(
            _rope_and_store, grid,
            qkv, cos_sin, positions, slot_mapping, k_cache, v_cache, q_out, q_norm, k_norm, eps, qkv.stride(0),
            Q_HEADS=q_heads, KV_HEADS=kv_heads, D=dim, HALF=next_power_of_2(dim // 2), AT_ONCE=HEADS_AT_ONCE,
            **options(2),
        )  # fmt: skip
    return q_out


def _pieces(norm: Norm) -> tuple[Tensor, float]:
    weight, eps = norm
    assert weight is not None, "bf16 weights on CUDA keep their norms apart"
    return weight, eps


class SkinnyLinear(Linear):
    """bf16 weights; up to MAX_SKINNY_ROWS rows in one launch with the norm before and the sum after."""

    def __call__(self, x: Tensor, *, norm: Norm | None = None, add: Tensor | None = None) -> Tensor:
        if x.shape[0] > MAX_SKINNY_ROWS:
            return self._product(x if norm is None else rms_norm(x, *_pieces(norm)), add)
        weight, eps = (None, 0.0) if norm is None else _pieces(norm)
        return skinny_linear(x, self.weight, self.bias, norm_weight=weight, eps=eps, residual=add)

    def _product(self, x: Tensor, add: Tensor | None) -> Tensor:
        if add is None or self.bias is not None:
            return super()._product(x, add)
        return torch.addmm(add, x, self.weight.t())  # the sum in the product's own epilogue: no pass over it after

    def gated(self, x: Tensor, activation: str, *, norm: Norm | None = None) -> Tensor:
        if x.shape[0] > MAX_SKINNY_ROWS:
            normed = x if norm is None else rms_norm(x, *_pieces(norm))
            return act_mul(F.linear(normed, self.weight, self.bias), activation)
        weight, eps = (None, 0.0) if norm is None else _pieces(norm)
        return skinny_linear(x, self.weight, self.bias, norm_weight=weight, eps=eps, activation=activation)
