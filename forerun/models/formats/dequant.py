"""Turns GGUF blocks into float32, vectorised over blocks and in chunks that stay in the cache.

Knows the thirteen block layouts and nothing else: no files, no names. A format is two rules: `scales` gives what each
group of weights is multiplied by and shifted by, `quants` gives the whole numbers, as bytes.

Chunks are just below the size from which torch would spread one operation over threads, and whole spans of chunks go to
our own threads instead: a hundred thousand small parallel operations would wait for each other at every one, which
costs little on an idle machine and a factor of thirty on a busy one.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch

CHUNK_WEIGHTS = 127 * 256  # weights per operation: below torch's 32,768, 127 KB of float32
SPAN_CHUNKS = 16  # chunks whose scales are computed at once: up to 16 scales a block, so 127 * 16 * 16 is below it too
DEVICE_CHUNK_WEIGHTS = 1 << 25  # on a GPU: a launch takes longer than what it computes of a few
MIN_THREADED_WEIGHTS = 1 << 21  # weights from which a second thread pays

Scales = tuple[torch.Tensor, torch.Tensor | None]  # factor and shift, [n, groups] each


@dataclass(frozen=True)
class BlockFormat:
    """One block layout: `size` bytes hold `weights` weights in `groups` groups of one scale each."""

    weights: int
    size: int
    groups: int
    scales: Callable[[torch.Tensor], Scales]
    quants: Callable[[torch.Tensor], torch.Tensor]  # [n, size] uint8 -> n * weights whole numbers, in order


def block_size(kind: str) -> tuple[int, int]:
    """Weights and bytes of a block of this type; a float is a block of one."""
    return (1, _FLOATS[kind].itemsize) if kind in _FLOATS else (FORMATS[kind].weights, FORMATS[kind].size)


def dequantise(raw: torch.Tensor, kind: str) -> torch.Tensor:
    """Rows of type `kind` as numbers: raw [rows, row_bytes] uint8 -> [rows, cols] float32."""
    if kind in _FLOATS:
        return raw.contiguous().view(_FLOATS[kind]).to(torch.float32, copy=True)
    form = FORMATS[kind]
    blocks = raw.reshape(-1, form.size)  # [rows * blocks, size]
    out = torch.empty(blocks.shape[0], form.weights, device=raw.device)
    threaded = out.numel() >= MIN_THREADED_WEIGHTS and not raw.is_cuda
    workers = torch.get_num_threads() if threaded else 1
    if workers == 1:
        _fill(form, (blocks, out))
    else:
        fill = partial(_fill_as, torch.is_inference_mode_enabled(), form)
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(fill, zip(blocks.chunk(workers), out.chunk(workers), strict=True)))
    return out.view(raw.shape[0], -1)


@dataclass(frozen=True)
class EmbeddingRows:
    """Rows of a table when they are asked for: it stays in the mapped file and takes no memory of its own."""

    kind: str
    raw: torch.Tensor  # [rows, row_bytes] uint8

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return dequantise(self.raw[ids], self.kind)  # [len(ids), cols] float32


def as_stored(matrix: torch.Tensor) -> tuple[str, torch.Tensor]:
    """A matrix of floats as `dequantise` takes it: its type and bytes [rows, row_bytes]."""
    kinds = {dtype: kind for kind, dtype in _FLOATS.items()}
    matrix = (matrix if matrix.dtype in kinds else matrix.float()).cpu().contiguous()
    return kinds[matrix.dtype], matrix.view(torch.uint8)


def _fill_as(inference: bool, form: BlockFormat, job: tuple[torch.Tensor, torch.Tensor]) -> None:
    """In a thread of its own, which does not inherit the mode that the caller made `out` in."""
    with torch.inference_mode(inference):
        _fill(form, job)


def _fill(form: BlockFormat, job: tuple[torch.Tensor, torch.Tensor]) -> None:
    blocks, out = job
    step = (DEVICE_CHUNK_WEIGHTS if blocks.is_cuda else CHUNK_WEIGHTS) // form.weights
    for start in range(0, blocks.shape[0], SPAN_CHUNKS * step):
        span = blocks[start : start + SPAN_CHUNKS * step]
        factor, shift = form.scales(span)
        grouped = out[start : start + SPAN_CHUNKS * step].view(-1, form.groups, form.weights // form.groups)
        for at in range(0, span.shape[0], step):
            part = grouped[at : at + step]  # [n, groups, weights of a group]
            part.copy_(form.quants(span[at : at + step]).view(part.shape))
            part.mul_(factor[at : at + step].unsqueeze(-1))
            if shift is not None:
                part.add_(shift[at : at + step].unsqueeze(-1))


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 at byte `at` of each block."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()  # [n, 1]


def _factor(blocks: torch.Tensor) -> Scales:
    return _half(blocks, 0), None


def _factor_and_shift(blocks: torch.Tensor) -> Scales:
    return _half(blocks, 0), _half(blocks, 2)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Low halves, then high halves: packed [n, r, w] -> [n, r, 2, w]."""
    n, rows, width = packed.shape
    out = torch.empty(n, rows, 2, width, dtype=torch.uint8, device=packed.device)
    torch.bitwise_and(packed, 15, out=out[:, :, 0])
    torch.bitwise_right_shift(packed, 4, out=out[:, :, 1])
    return out


def _centred(quants: torch.Tensor, zero: int) -> torch.Tensor:
    """Unsigned to signed: still bytes, because that is four times less to move than floats."""
    return quants.view(torch.int8).sub_(zero)


def _bits(packed: torch.Tensor, width: int, to: int) -> torch.Tensor:
    """Every `width`-bit field of packed [n, r, w], lowest field first, moved to bit `to`: [n, r, 8 / width, w]."""
    fields = packed.unsqueeze(-2) >> _SHIFTS[width].to(packed.device)
    return fields.bitwise_and_((1 << width) - 1).bitwise_left_shift_(to)


def _five(packed: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Four low bits each in `packed` [n, 16], the fifths one after the other in `high` [n, 4]."""
    fifths = _bits(high.unsqueeze(-1), 1, 4)  # [n, 4, 8, 1]
    return _nibbles(packed.unsqueeze(1)).view(-1, 32).bitwise_or_(fifths.view(-1, 32))


def _q2_k_scales(blocks: torch.Tensor) -> Scales:
    return (blocks[:, :16] & 15) * _half(blocks, 80), (blocks[:, :16] >> 4) * -_half(blocks, 82)


def _q3_k_scales(blocks: torch.Tensor) -> Scales:
    """Sixteen six-bit scales: the low halves in 8 bytes, the top two bits in 4."""
    low = _nibbles(blocks[:, None, 96:104]).view(-1, 16)
    scales = low.bitwise_or_(_bits(blocks[:, None, 104:108], 2, 4).view(-1, 16))
    return _centred(scales, 32) * _half(blocks, 108), None


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    low = _bits(blocks[:, 32:96].view(-1, 2, 32), 2, 0).view(-1, 8, 32)
    high = _bits(blocks[:, None, :32], 1, 2).view(-1, 8, 32)
    return _centred(low.bitwise_or_(high), 4)


def _six_bit_scales(blocks: torch.Tensor) -> Scales:
    """Q4_K's and Q5_K's 12 bytes: 8 scales and 8 minima of six bits."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), dim=1)
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=1)
    return scales * _half(blocks, 0), minima * -_half(blocks, 2)  # [n, 8] each


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    low = _nibbles(blocks[:, 48:].view(-1, 4, 32)).view(-1, 8, 32)
    return low.bitwise_or_(_bits(blocks[:, None, 16:48], 1, 4).view(-1, 8, 32))


def _q6_k_scales(blocks: torch.Tensor) -> Scales:
    return blocks[:, 192:208].view(torch.int8) * _half(blocks, 208), None


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    low = _nibbles(blocks[:, :128].view(-1, 2, 64)).view(-1, 2, 4, 32)
    return _centred(low.bitwise_or_(_bits(blocks[:, 128:192].view(-1, 2, 32), 2, 4)), 32)


_SHIFTS = {width: torch.arange(0, 8, width, dtype=torch.uint8).view(-1, 1) for width in (1, 2)}
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
FORMATS = {
    "Q4_0": BlockFormat(32, 18, 1, _factor, lambda b: _centred(_nibbles(b[:, None, 2:]), 8)),
    "Q4_1": BlockFormat(32, 20, 1, _factor_and_shift, lambda b: _nibbles(b[:, None, 4:])),
    "Q5_0": BlockFormat(32, 22, 1, _factor, lambda b: _centred(_five(b[:, 6:], b[:, 2:6]), 16)),
    "Q5_1": BlockFormat(32, 24, 1, _factor_and_shift, lambda b: _five(b[:, 8:], b[:, 4:8])),
    "Q8_0": BlockFormat(32, 34, 1, _factor, lambda b: b[:, 2:].view(torch.int8).unsqueeze(1)),
    "Q2_K": BlockFormat(256, 84, 16, _q2_k_scales, lambda b: _bits(b[:, 16:80].view(-1, 2, 32), 2, 0)),
    "Q3_K": BlockFormat(256, 110, 16, _q3_k_scales, _q3_k),
    "Q4_K": BlockFormat(256, 144, 8, _six_bit_scales, lambda b: _nibbles(b[:, 16:].view(-1, 4, 32))),
    "Q5_K": BlockFormat(256, 176, 8, _six_bit_scales, _q5_k),
    "Q6_K": BlockFormat(256, 210, 16, _q6_k_scales, _q6_k),
}
