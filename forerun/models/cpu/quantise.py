"""Float matrices in GGUF formats: 16 bits (F16), 8 (Q8_0), 5 (Q5_0) and 4 (Q4_K, or Q4_1 where rows are no multiple of
256).

For 4 bits a block's scale and minimum are searched for: a few ranges are tried, each is fitted to the levels it gives
by least squares, the one with the least squared error is taken. Knows no model and no kernel.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

CHUNK_WEIGHTS = 1 << 17  # quantised at a time: temporaries stay in a core's cache
# Measured on SmolLM2, all layers in 4 bits, KL of prose and code: Q4_0 0.24 and 0.36, Q4_1 without a search 0.25 and
# 0.30, Q4_1 0.21 and 0.27, Q4_K (a tenth smaller) 0.21 and 0.28.
# Levels beyond 15 that a block's range is divided into: more than 0 clips its ends
RANGE_STEPS = (-1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0)


def quantise(weight: Tensor, bits: int) -> tuple[str, Tensor]:
    """A matrix [rows, cols] in 4, 5, 8 or 16 bits as a file would store it: its format and bytes [rows, row bytes]."""
    rows, cols = weight.shape
    format = format_of(cols, bits)
    make: Callable[[Tensor], Tensor] = {"F16": f16, "Q8_0": q8_0, "Q5_0": q5_0, "Q4_K": q4_k, "Q4_1": q4_1}[format]
    step = max(1, CHUNK_WEIGHTS // cols)
    return format, torch.cat([make(weight[at : at + step].float()) for at in range(0, rows, step)])


def format_of(cols: int, bits: int) -> str:
    """The format of a matrix with rows of so many values."""
    if bits == 4:
        return "Q4_K" if cols % 256 == 0 else "Q4_1"
    return {5: "Q5_0", 8: "Q8_0", 16: "F16"}[bits]


def f16(weight: Tensor) -> Tensor:
    """[rows, cols] -> [rows, bytes]."""
    return weight.clamp(-65504, 65504).half().contiguous().view(torch.uint8)


def q8_0(weight: Tensor) -> Tensor:
    """Blocks of 32 eight-bit values with a scale: [rows, cols] -> [rows, bytes]."""
    blocks = weight.float().reshape(weight.shape[0], -1, 32)  # [rows, blocks, 32]
    scales = (blocks.abs().amax(-1, keepdim=True) / 127).half()
    levels = torch.where(scales > 0, blocks / scales.float(), 0).round_().clamp_(-127, 127).to(torch.int8)
    return torch.cat((scales.view(torch.uint8), levels.view(torch.uint8)), -1).reshape(weight.shape[0], -1)


def q5_0(weight: Tensor) -> Tensor:
    """Blocks of 32 five-bit values with a scale: the value farthest from zero is its -16th multiple."""
    blocks = weight.reshape(-1, 32)
    farthest = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
    scales = (farthest / -16).half()
    levels = torch.where(scales != 0, blocks / scales.float(), 0).round_().add_(16).clamp_(0, 31).to(torch.uint8)
    packed = (levels[:, :16] & 15) | (levels[:, 16:] & 15) << 4
    bits = (levels >> 4).view(-1, 4, 8) << torch.arange(8, dtype=torch.uint8)  # the fifth ones, eight in a byte
    high = bits.sum(-1, dtype=torch.uint8)
    return torch.cat((scales.view(torch.uint8), high, packed), -1).reshape(weight.shape[0], -1)


def q4_1(weight: Tensor) -> Tensor:
    """Blocks of 32 four-bit values with a scale and a minimum."""
    blocks = weight.reshape(-1, 32)
    scale, low = (value.half() for value in _fit(blocks))  # [n, 1] each
    levels = _levels(blocks, scale.float(), low.float())
    packed = levels[:, :16] | levels[:, 16:] << 4
    return torch.cat((scale.view(torch.uint8), low.view(torch.uint8), packed), -1).reshape(weight.shape[0], -1)


def q4_k(weight: Tensor) -> Tensor:
    """Blocks of 256: eight groups of 32 four-bit values, their scales and minima in six bits of the block's own."""
    groups = weight.reshape(-1, 8, 32)  # [n, 8, 32]
    scale, low = _fit(groups, top=0.0)  # [n, 8, 1] each; minima are subtracted, so they are 0 or less
    block_scale = (scale.amax(1) / 63).half()  # [n, 1]
    block_low = (low.amin(1) / -63).half()
    s = _levels(scale.squeeze(-1), block_scale.float(), torch.zeros(1), 63)  # [n, 8]
    m = _levels(low.squeeze(-1).neg(), block_low.float(), torch.zeros(1), 63)
    levels = _levels(groups, (s * block_scale.float())[..., None], (m * -block_low.float())[..., None])
    packed = levels[:, 0::2] | levels[:, 1::2] << 4  # [n, 4, 32]
    first, last = slice(0, 4), slice(4, 8)
    high = [x[:, first] | x[:, last] >> 4 << 6 for x in (s, m)]
    six = torch.cat((*high, s[:, last] & 15 | (m[:, last] & 15) << 4), -1)  # [n, 12]
    halves = block_scale.view(torch.uint8), block_low.view(torch.uint8)
    return torch.cat((*halves, six, packed.flatten(1)), -1).reshape(weight.shape[0], -1)


def _levels(x: Tensor, scale: Tensor, low: Tensor, top: int = 15) -> Tensor:
    """Whole numbers 0 to `top` such that levels * scale + low is near x."""
    return torch.where(scale > 0, (x - low) / scale, 0).round_().clamp_(0, top).to(torch.uint8)


def _fit(x: Tensor, top: float = float("inf")) -> tuple[Tensor, Tensor]:
    """Scale and minimum (at most `top`) of 16 levels for the values of the last dimension."""
    low, high = x.amin(-1, keepdim=True).clamp_max_(top), x.amax(-1, keepdim=True)
    mean = x.mean(-1, keepdim=True)
    best_scale, best_low = (high - low) / 15, low
    best = torch.full_like(low, float("inf"))
    for step in RANGE_STEPS:
        inverse = (15 + step) / (high - low).clamp_min_(1e-30)
        levels = ((x - low) * inverse).round_().clamp_(0, 15)
        centre, square = levels.mean(-1, keepdim=True), levels.square().mean(-1, keepdim=True)
        product = (levels * x).mean(-1, keepdim=True)
        scale = (product - centre * mean) / (square - centre.square()).clamp_min_(1e-6)
        start = mean - scale * centre
        if top < float("inf"):  # a line that may not start above it is fitted through it
            through = (product - centre * top) / square.clamp_min_(1e-6)
            scale, start = torch.where(start > top, through, scale), start.clamp_max(top)
        error = (levels * scale).add_(start).sub_(x).square_().sum(-1, keepdim=True)
        better = (error < best) & (scale >= 0)
        best_scale, best_low = torch.where(better, scale, best_scale), torch.where(better, start, best_low)
        best = torch.where(better, error, best)
    return best_scale, best_low
