"""Many rows in float8: an MLP, from kernels that leave rows as float8 with a scale each; and a projection of rows of
many tensors beside each other, each divided by its own root mean square in one launch.

All arithmetic but the products' is float32, rounded once when stored. A row's scale makes its largest value the largest
that float8 (e4m3) has; a weight has one scale for each output. The tensors of a projection stay where they are: the
kernel is handed their addresses. Knows no model; what may be computed in float8 is decided elsewhere.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.models.cuda.all_layers_kv import addressable, addresses_of
from forerun.models.cuda.launch import cdiv, launch, next_power_of_2, options, wait_for_previous
from forerun.models.cuda.skinny import activate
from forerun.models.decoder import MIN_FLOAT8_ROWS
from forerun.models.execution.float8_mlp import FLOAT8

MAX_ROW_VALUES = 16384  # of a row that a program holds; longer gated ones are computed twice, a piece at a time
PIECE_VALUES = 2048  # values of such a piece
VALUES_AT_ONCE = 8192  # of a program, where its part is one of the widest
WARPS = 8
MULTIPLE = tl.constexpr(16)  # values that widths are multiples of: rows of float8 start where 16 bytes are read at once


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
    wait_for_previous(PDL)
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
    wait_for_previous(PDL)
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


def _product(rows: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None = None) -> Tensor:
    # fast: partial sums keep fewer bits, which is little beside what float8 has lost
    return torch._scaled_mm(
        rows, weight, scale_a=scales, scale_b=weight_scales, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=True
    )


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
        gate_up = _product(*norm_to_float8(x, self._norm, self._eps), *self._gate_up)  # [T, 2 * I]
        h, scales = act_mul_to_float8(gate_up, self._activation)
        return _product(h, scales, *self._down).add_(x)


@triton.jit
def _rows(
    source, out, rows, width, total, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    n = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    col = tl.arange(0, BLOCK)
    ok = (n < rows)[:, None] & (col < width)[None, :]
    x = tl.load(source + n[:, None] * width + col[None, :], mask=ok, other=0.0).to(tl.float32)  # [ROWS, BLOCK]
    y = x * tl.rsqrt(tl.sum(x * x, axis=1) / width + eps)[:, None]
    tl.store(out + n[:, None] * total + col[None, :], y.to(out.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["rows"])
def _unit_features(
    addresses, columns, like, out, rows, total, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One program: ROWS rows of one part. `addresses`: [parts]; `columns`: [parts, 2], the first and how many."""
    wait_for_previous(PDL)
    part = tl.program_id(1)
    source = tl.multiple_of(tl.load(addresses + part).to(tl.pointer_type(like.dtype.element_ty)), MULTIPLE)
    first = tl.multiple_of(tl.load(columns + 2 * part), MULTIPLE)
    width = tl.multiple_of(tl.load(columns + 2 * part + 1), MULTIPLE)
    if width <= BLOCK // 2:  # a source's beside a wider target's: more than half of the lanes would idle
        _rows(source, out + first, rows, width, total, eps, ROWS, BLOCK // 2)
    else:
        _rows(source, out + first, rows, width, total, eps, ROWS, BLOCK)


@lru_cache(maxsize=64)
def _columns(widths: tuple[int, ...], device: torch.device) -> Tensor:
    """[parts, 2] int32: where each part starts in a row of all, and its width."""
    starts = [sum(widths[:i]) for i in range(len(widths))]
    return torch.tensor(list(zip(starts, widths, strict=True)), dtype=torch.int32, device=device)


def fits(parts: list[Tensor]) -> bool:
    """Whether these are parts that `unit_features` takes, in bf16."""
    return all(x.dtype == torch.bfloat16 and _width_fits(x.shape[1]) and addressable(x) for x in parts)


def _width_fits(width: int) -> bool:
    return 0 < width <= MAX_ROW_VALUES and width % MULTIPLE.value == 0


def unit_features(parts: list[Tensor], eps: float, dtype: torch.dtype) -> Tensor:
    """Parts [T, width] of one dtype, contiguous, their widths multiples of 16 -> [T, sum of the widths].

    float8 needs no scale: a value of a unit row is at most the root of its width, far below float8's largest.
    """
    like = parts[0]
    rows, widths = like.shape[0], tuple([x.shape[1] for x in parts])
    if not all(_width_fits(width) for width in widths):
        raise ValueError(
            f"parts are {MULTIPLE.value}, {2 * MULTIPLE.value}, ... {MAX_ROW_VALUES} wide, not {list(widths)}"
        )
    if any(x.shape[0] != rows or x.dtype != like.dtype for x in parts):
        raise ValueError("parts have as many rows each, and one dtype")
    out = torch.empty(rows, sum(widths), dtype=dtype, device=like.device)
    block = next_power_of_2(max(widths))
    together = max(1, VALUES_AT_ONCE // block)
    launch(
        _unit_features, (cdiv(rows, together), len(parts)),
        addresses_of(parts, like.device), _columns(widths, like.device), like, out, rows, out.shape[1], eps,
        ROWS=together, BLOCK=block, **options(WARPS)
    )  # fmt: skip
    return out


class Float8Projection:
    """unit_features(parts) @ W.T + bias of many rows, from a weight in float8 with a scale for each row."""

    def __init__(self, weight: tuple[Tensor, Tensor], bias: Tensor | None, eps: float) -> None:
        values, scales = weight  # [out, in] float8, [out, 1] float32
        self._weight, self._scales, self._bias, self._eps = values.t(), scales.t(), bias, eps
        self._ones = torch.ones(0, 1, device=values.device)  # scales of features; more where more rows come

    @property
    def nbytes(self) -> int:
        return self._weight.nbytes + self._scales.nbytes

    def takes(self, parts: list[Tensor]) -> bool:
        return parts[0].shape[0] >= MIN_FLOAT8_ROWS and fits(parts)

    def __call__(self, parts: list[Tensor]) -> Tensor:
        features = unit_features(parts, self._eps, FLOAT8)
        rows = features.shape[0]
        if len(self._ones) < rows:
            self._ones = torch.ones(rows, 1, device=features.device)
        return _product(features, self._ones[:rows], self._weight, self._scales, self._bias)
