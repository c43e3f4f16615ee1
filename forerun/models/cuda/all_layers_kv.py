"""K/V of many layers written, moved or read in one launch, and rows of many tensors gathered in one.

The layers' caches are tensors of their own: kernels are handed their addresses, as numbers on the device. All
arithmetic is float32, rounded once when stored. Knows slots, not whose they are; caches are [num_slots, Hkv, D].
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.core import KV
from forerun.models.cuda.launch import cdiv, launch, next_power_of_2, options, wait_for_previous
from forerun.models.decoder import AllLayersKV, Decoder, RowPicker

HEADS_AT_ONCE = 32
VALUES_AT_ONCE = 4096
MAX_HELD_BYTES = 128 << 20  # bytes of tensors that are kept until their rows are picked
ALIGNED = tl.constexpr(16)  # bytes: where every tensor starts, so that kernels may read that much at once


def addressable(x: Tensor) -> bool:
    return x.is_contiguous() and x.data_ptr() % ALIGNED.value == 0


def addresses_of(tensors: list[Tensor], device: torch.device) -> Tensor:
    """[tensors] int64 on the device."""
    if not all(addressable(x) for x in tensors):
        raise ValueError(f"kernels take addresses of contiguous tensors that start at multiples of {ALIGNED.value}")
    return torch.tensor([x.data_ptr() for x in tensors], dtype=torch.int64).to(device, non_blocking=True)


@triton.jit(do_not_specialize=["base", "total", "first", "tokens"])
def _write(
    mapped, addresses, slots, like, base, total, first, tokens, stride,
    HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: ROWS heads, token by token, of one layer's K and V. `addresses`: [3, total] of K, V, angles."""
    wait_for_previous(PDL)
    layer = tl.program_id(1)
    dtype = like.dtype.element_ty
    at = addresses + base + layer
    k_cache = tl.multiple_of(tl.load(at).to(tl.pointer_type(dtype)), ALIGNED)
    v_cache = tl.multiple_of(tl.load(at + total).to(tl.pointer_type(dtype)), ALIGNED)
    table = tl.multiple_of(tl.load(at + 2 * total).to(tl.pointer_type(tl.float32)), ALIGNED)

    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    half = tl.arange(0, HALF)
    token = (row // HEADS).to(tl.int64)
    head = row % HEADS
    ok = (token < tokens)[:, None] & (half < D // 2)[None, :]
    cells = mapped + (token * stride + (layer * 2 * HEADS + head) * D)[:, None] + half[None, :]
    low = tl.load(cells, mask=ok, other=0.0).to(tl.float32)  # [ROWS, HALF]
    high = tl.load(cells + D // 2, mask=ok, other=0.0).to(tl.float32)
    v_low = tl.load(cells + HEADS * D, mask=ok, other=0.0).to(tl.float32)
    v_high = tl.load(cells + HEADS * D + D // 2, mask=ok, other=0.0).to(tl.float32)
    angles = table + ((first + token) * D)[:, None] + half[None, :]
    cos = tl.load(angles, mask=ok, other=0.0)
    sin = tl.load(angles + D // 2, mask=ok, other=0.0)
    slot = tl.load(slots + token, mask=token < tokens, other=0).to(tl.int64)
    out = ((slot * HEADS + head) * D)[:, None] + half[None, :]
    # one product is rounded, the other is not: as torch's `addcmul` has it, so that both ways give the same bits
    tl.store(k_cache + out, tl.fma(-high, sin, low * cos).to(dtype), mask=ok)
    tl.store(k_cache + out + D // 2, tl.fma(low, sin, high * cos).to(dtype), mask=ok)
    tl.store(v_cache + out, v_low.to(dtype), mask=ok)
    tl.store(v_cache + out + D // 2, v_high.to(dtype), mask=ok)


@triton.jit(do_not_specialize=["base", "total", "count"])
def _move(
    addresses, places, like, base, total, count,
    HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: ROWS heads, token by token, of one layer's K and V. `addresses`: [3, total] of K, V, angles;
    `places`: [4, count] slots from and to, old and new positions."""
    wait_for_previous(PDL)
    layer = tl.program_id(1)
    dtype = like.dtype.element_ty
    at = addresses + base + layer
    k_cache = tl.multiple_of(tl.load(at).to(tl.pointer_type(dtype)), ALIGNED)
    v_cache = tl.multiple_of(tl.load(at + total).to(tl.pointer_type(dtype)), ALIGNED)
    table = tl.multiple_of(tl.load(at + 2 * total).to(tl.pointer_type(tl.float32)), ALIGNED)

    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    half = tl.arange(0, HALF)
    token = row // HEADS
    head = row % HEADS
    there = token < count
    ok = there[:, None] & (half < D // 2)[None, :]
    source = tl.load(places + token, mask=there, other=0)
    target = tl.load(places + count + token, mask=there, other=0)
    old = tl.load(places + 2 * count + token, mask=there, other=0)
    new = tl.load(places + 3 * count + token, mask=there, other=0)
    # as `RopeTable.between`: both carry the factor on rotated vectors, which the heads have already
    factor = tl.load(table)
    was = table + (old * D)[:, None] + half[None, :]
    becomes = table + (new * D)[:, None] + half[None, :]
    cos_old = tl.load(was, mask=ok, other=0.0)
    sin_old = tl.load(was + D // 2, mask=ok, other=0.0)
    cos_new = tl.load(becomes, mask=ok, other=0.0)
    sin_new = tl.load(becomes + D // 2, mask=ok, other=0.0)
    cos = (cos_new * cos_old + sin_new * sin_old) / (factor * factor)
    sin = (sin_new * cos_old - cos_new * sin_old) / (factor * factor)

    cells = ((source * HEADS + head) * D)[:, None] + half[None, :]
    out = ((target * HEADS + head) * D)[:, None] + half[None, :]
    low = tl.load(k_cache + cells, mask=ok, other=0.0).to(tl.float32)  # [ROWS, HALF]
    high = tl.load(k_cache + cells + D // 2, mask=ok, other=0.0).to(tl.float32)
    v_low = tl.load(v_cache + cells, mask=ok, other=0.0)
    v_high = tl.load(v_cache + cells + D // 2, mask=ok, other=0.0)
    tl.store(k_cache + out, tl.fma(-high, sin, low * cos).to(dtype), mask=ok)
    tl.store(k_cache + out + D // 2, tl.fma(low, sin, high * cos).to(dtype), mask=ok)
    tl.store(v_cache + out, v_low, mask=ok)
    tl.store(v_cache + out + D // 2, v_high, mask=ok)


@triton.jit(do_not_specialize=["base", "total", "count"])
def _gather(
    addresses, rows, out, base, total, count,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: ROWS of the rows [count], of one tensor of one kind. `addresses`: [kinds, total]."""
    wait_for_previous(PDL)
    which, kind = tl.program_id(1), tl.program_id(2)
    dtype = out.dtype.element_ty
    source = tl.load(addresses + kind * total + base + which).to(tl.pointer_type(dtype))
    source = tl.multiple_of(source, ALIGNED)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    ok = (n < count)[:, None] & (col < SIZE)[None, :]
    row = tl.load(rows + n, mask=n < count, other=0).to(tl.int64)
    values = tl.load(source + row[:, None] * SIZE + col[None, :], mask=ok)
    to = (kind * tl.num_programs(1) + which).to(tl.int64) * count + n
    tl.store(out + to[:, None] * SIZE + col[None, :], values, mask=ok)


def gather(addresses: Tensor, base: int, like: Tensor, rows: Tensor) -> Tensor:
    """Rows [N] of tensors of the shape and dtype of `like` [T, ...], those from `base` on of the `addresses` [kinds,
    tensors]: [kinds, tensors - base, N, ...]."""
    kinds, total = addresses.shape
    out = like.new_empty(kinds, total - base, len(rows), *like.shape[1:])
    size = math.prod(like.shape[1:])
    block = next_power_of_2(size)
    together = max(1, VALUES_AT_ONCE // block)
    launch(
        _gather, (cdiv(len(rows), together), total - base, kinds),
        addresses, rows, out, base, total, len(rows), SIZE=size, BLOCK=block, ROWS=together, **options(4)
    )  # fmt: skip
    return out


class DeferredRowPicker(RowPicker):
    """Keeps what it is shown and picks from many tensors in one launch; from fewer where they are large."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__(rows)
        self._held: list[Tensor] = []

    def add(self, x: Tensor) -> None:
        self._held.append(x if addressable(x) else x.clone(memory_format=torch.contiguous_format))
        if len(self._held) * x.nbytes > MAX_HELD_BYTES:
            self.flush()

    def flush(self) -> None:
        if self._held:
            addresses = addresses_of(self._held, self._rows.device)[None]
            self._picked.append(gather(addresses, 0, self._held[0], self._rows)[0])
            self._held = []


class CudaAllLayersKV(AllLayersKV):
    def __init__(self, decoder: Decoder, kv: KV) -> None:
        super().__init__(decoder, kv)
        tables = [self._ropes[self._config.layer_ropes[i]].table for i in range(len(kv))]
        self._held = [*(k for k, _ in kv), *(v for _, v in kv), *tables]  # addresses are good for as long as these are
        self._addresses = addresses_of(self._held, kv[0][0].device).view(3, -1)

    def prepare(self) -> None:
        """By launches of no programs."""
        c, like, total = self._config, self._kv[0][0], len(self._kv)
        nothing = self._addresses.new_empty(0)
        self.write(like.new_empty(0, total, 2, *like.shape[1:]), 0, nothing, [range(total)])
        self.read(0, nothing)
        self.move(0, nothing.view(4, 0))
        for width in (c.hidden_size, c.num_heads * c.head_dim):
            gather(self._addresses[:1], 0, like.new_empty(0, width), nothing)

    def write(self, mapped: Tensor, first: int, slots: Tensor, runs: list[range]) -> None:
        """In one launch, whatever the runs: every layer has the address of its own angles."""
        tokens, layers, _, heads, dim = mapped.shape
        if not mapped[:1].is_contiguous():
            mapped = mapped.contiguous()
        base, total = runs[0].start, len(self._kv)
        if layers != total - base:
            raise ValueError(f"K/V of {layers} layers from {base} on, there are {total}")
        launch(
            _write, (cdiv(tokens * heads, HEADS_AT_ONCE), layers),
            mapped, self._addresses, slots, self._kv[0][0], base, total, first, tokens, mapped.stride(0),
            HEADS=heads, D=dim, HALF=next_power_of_2(dim // 2), ROWS=HEADS_AT_ONCE, **options(4),
        )  # fmt: skip

    def move(self, base: int, places: Tensor) -> None:
        count, (heads, dim), total = places.shape[1], self._kv[0][0].shape[1:], len(self._kv)
        launch(
            _move, (cdiv(count * heads, HEADS_AT_ONCE), total - base),
            self._addresses, places, self._kv[0][0], base, total, count,
            HEADS=heads, D=dim, HALF=next_power_of_2(dim // 2), ROWS=HEADS_AT_ONCE, **options(4),
        )  # fmt: skip

    def read(self, base: int, slots: Tensor) -> Tensor:
        return gather(self._addresses[:2], base, self._kv[base][0], slots)

    def row_picker(self, rows: Tensor) -> RowPicker:
        return DeferredRowPicker(rows)
