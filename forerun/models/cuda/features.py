"""Rows of many tensors beside each other, each divided by its own root mean square, in one launch; and a float8 product
of them.

The tensors stay where they are: the kernel is handed their addresses, as numbers on the device. All arithmetic but the
product's is float32, rounded once when stored. Knows no model; what may be computed in float8 is decided elsewhere.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from forerun.models.cuda.all_layers_kv import addressable, addresses_of
from forerun.models.cuda.launch import cdiv, launch, next_power_of_2, options
from forerun.models.decoder import MIN_FLOAT8_ROWS
from forerun.models.execution.float8_mlp import FLOAT8

VALUES_AT_ONCE = 8192  # of a program, where its part is one of the widest
WARPS = 8
MAX_ROW_VALUES = 16384  # values of a row that a program still holds
MULTIPLE = tl.constexpr(16)  # values that widths are multiples of: rows of float8 start where 16 bytes are read at once


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
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
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
        return self._product(unit_features(parts, self._eps, FLOAT8))

    def _product(self, features: Tensor) -> Tensor:
        rows = features.shape[0]
        if len(self._ones) < rows:
            self._ones = torch.ones(rows, 1, device=features.device)
        # fast: partial sums keep fewer bits, which is little beside what float8 has lost
        return torch._scaled_mm(
            features, self._weight, scale_a=self._ones[:rows], scale_b=self._scales, bias=self._bias,
            out_dtype=torch.bfloat16, use_fast_accum=True,
        )  # fmt: skip
