"""An MLP of many rows in float8: kernels that leave rows as float8 with a scale each, and the products between them.

All arithmetic but the products' is float32. A row's scale makes its largest value the largest that float8 (e4m3) has;
a weight has one scale for each output. Knows no model; what may be computed in float8 is decided elsewhere.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from forerun.models.cuda.launch import launch, next_power_of_2, options
from forerun.models.cuda.skinny import activate
from forerun.models.execution.float8_mlp import FLOAT8

MAX_ROW_VALUES = 16384  # of a gated row that a program holds; longer ones are computed twice, a piece at a time
PIECE_VALUES = 2048  # values of such a piece


@triton.jit
def _limit(most):
    """What rows are scaled by: a row of zeros is one of zeros, and infinities have a place."""
    return tl.minimum(tl.maximum(most, 1e-30), 3e38)


@triton.jit
def _store(out, y, most, ok):
    """y as float8, on the scale on which `most` is its largest number."""
    y = tl.clamp(y * (448.0 / most), -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out, y.to(out.dtype.element_ty), mask=ok)


@triton.jit
def _norm_to_float8(
    x, weight, out, scales, x_stride, eps, N: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    ok = col < N
    h = tl.load(x + row * x_stride + col, mask=ok, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(h * h, axis=0) / N + eps)
    y = h * scale * tl.load(weight + col, mask=ok, other=0.0).to(tl.float32)
    most = _limit(tl.max(tl.abs(y), axis=0))
    _store(out + row * N + col, y, most, ok)
    tl.store(scales + row, most / 448.0)


def norm_to_float8(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The RMS norm of rows [T, N] times the weight [N]: float8 [T, N] and what rows are to be multiplied by, [T, 1]."""
    if x.stride(1) != 1:
        raise ValueError("norms take rows that are contiguous")
    rows, n = x.shape
    out, scales = _empty(rows, n, x)
    if rows:
        block = next_power_of_2(n)
        warps = max(1, min(8, block // 512))
        launch(
            _norm_to_float8, (rows,),
            x, weight, out, scales, x.stride(0), eps, N=n, BLOCK=block, **options(warps)
        )  # fmt: skip
    return out, scales


@triton.jit
def _gated(row, col, ok, N: tl.constexpr, ACT: tl.constexpr):
    """act(gate) * up of these columns of a row, gate in its first half."""
    gate = tl.load(row + col, mask=ok, other=0.0).to(tl.float32)
    return activate(gate, ACT) * tl.load(row + N + col, mask=ok, other=0.0).to(tl.float32)


@triton.jit
def _act_mul_to_float8(
    gate_up, out, scales, stride, N: tl.constexpr, ACT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """A row at once where BLOCK holds it. Else its largest value first, then all of them again: the second time they
    come from the cache, and registers hold no row of that length."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    t = tl.program_id(0).to(tl.int64)
    row, cells = gate_up + t * stride, out + t * N
    col = tl.arange(0, BLOCK)
    if BLOCK >= N:
        y = _gated(row, col, col < N, N, ACT)
        most = _limit(tl.max(tl.abs(y), axis=0))
        _store(cells + col, y, most, col < N)
    else:
        largest = tl.zeros([BLOCK], tl.float32)
        for first in range(0, N, BLOCK):
            at = first + col
            largest = tl.maximum(largest, tl.abs(_gated(row, at, at < N, N, ACT)))
        most = _limit(tl.max(largest, axis=0))
        for first in range(0, N, BLOCK):
            at = first + col
            _store(cells + at, _gated(row, at, at < N, N, ACT), most, at < N)
    tl.store(scales + t, most / 448.0)


def act_mul_to_float8(gate_up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """act(gate) * up of rows [T, 2 * I], gate in the first half: float8 [T, I] and what rows are to be multiplied by,
    [T, 1]."""
    if activation not in ("silu", "gelu_tanh"):
        raise ValueError(f"activation {activation!r}, known are silu and gelu_tanh")
    if gate_up.stride(1) != 1:
        raise ValueError("activations take rows that are contiguous")
    rows, n = gate_up.shape[0], gate_up.shape[1] // 2
    out, scales = _empty(rows, n, gate_up)
    if rows:
        block = next_power_of_2(n) if n <= MAX_ROW_VALUES else PIECE_VALUES
        warps = max(1, min(16, block // 1024 if n <= MAX_ROW_VALUES else block // 256))
        launch(
            _act_mul_to_float8, (rows,),
            gate_up, out, scales, gate_up.stride(0), N=n, ACT=activation, BLOCK=block, **options(warps)
        )  # fmt: skip
    return out, scales


def _empty(rows: int, n: int, like: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.empty(rows, n, dtype=FLOAT8, device=like.device)
    return out, torch.empty(rows, 1, dtype=torch.float32, device=like.device)


class Float8Mlp:
    """x + down(act(gate_up(norm(x)))) of rows x [T, hidden], from weights in float8 with a scale for each row."""

    def __init__(
        self,
        norm: Tensor,  # [hidden]
        eps: float,
        gate_up: tuple[Tensor, Tensor],  # [2 * I, hidden] float8, [2 * I, 1] float32
        down: tuple[Tensor, Tensor],  # [hidden, I], [hidden, 1]
        activation: str,
    ) -> None:
        self._norm, self._eps, self._activation = norm, eps, activation
        (gate_up_values, gate_up_scales), (down_values, down_scales) = gate_up, down
        self._gate_up = gate_up_values.t(), gate_up_scales.t()  # [hidden, 2 * I], its columns contiguous; [1, 2 * I]
        self._down = down_values.t(), down_scales.t()

    def __call__(self, x: Tensor) -> Tensor:
        gate_up = self._product(*norm_to_float8(x, self._norm, self._eps), *self._gate_up)  # [T, 2 * I]
        h, scales = act_mul_to_float8(gate_up, self._activation)
        return self._product(h, scales, *self._down).add_(x)

    @staticmethod
    def _product(rows: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
        # fast: partial sums keep fewer bits, which is little beside what float8 has lost
        return torch._scaled_mm(
            rows, weight, scale_a=scales, scale_b=weight_scales, out_dtype=torch.bfloat16, use_fast_accum=True
        )
