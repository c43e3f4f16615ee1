"""Turns GGUF blocks into float32, vectorised over blocks and in chunks that stay in the cache.

Knows the thirteen block layouts and nothing else: no files, no names. Each rule takes blocks [n, block bytes] uint8 and
fills out [n, block weights] float32 in place. Integer work is done on bytes, float work in the output itself.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

CHUNK = 1 << 18  # weights per chunk: 1 MB of float32 and its bytes stay in a core's cache, enough work for two threads

Rule = Callable[[torch.Tensor, torch.Tensor], None]


def dequantise(raw: torch.Tensor, kind: str) -> torch.Tensor:
    """Rows of type `kind` as numbers: raw [rows, row_bytes] uint8 -> [rows, cols] float32."""
    if kind in _FLOATS:
        return raw.contiguous().view(_FLOATS[kind]).to(torch.float32, copy=True)
    rule, weights, size = _RULES[kind]
    rows = raw.shape[0]
    blocks = raw.reshape(-1, size)  # [rows * blocks, size]
    out = torch.empty(blocks.shape[0], weights)
    step = CHUNK // weights
    for start in range(0, blocks.shape[0], step):
        rule(blocks[start : start + step], out[start : start + step])
    return out.view(rows, -1)


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 at byte `at` of each block, shaped to scale the block."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()  # [n, 1]


def _nibbles(packed: torch.Tensor, out: torch.Tensor) -> None:
    """Low halves of packed [..., w] to out[..., 0, w], high halves to out[..., 1, w]."""
    out.select(-2, 0).copy_(packed & 15)
    out.select(-2, 1).copy_(packed >> 4)


def _q4_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _nibbles(blocks[:, 2:], out.view(-1, 2, 16))
    out.sub_(8.0).mul_(_half(blocks, 0))


def _q4_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _nibbles(blocks[:, 4:], out.view(-1, 2, 16))
    out.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _fifth_bits(high: torch.Tensor) -> torch.Tensor:
    """32 single bits (4 bytes) -> their weight 16 or 0, in order."""
    shifts = torch.arange(8, dtype=torch.uint8)
    bits = high.unsqueeze(-1) >> shifts  # [n, 4, 8]
    return bits.bitwise_and_(1).bitwise_left_shift_(4).view(-1, 2, 16)


def _five(packed: torch.Tensor, high: torch.Tensor, out: torch.Tensor) -> None:
    quants = torch.stack((packed & 15, packed >> 4), dim=1)  # [n, 2, 16]
    out.view(-1, 2, 16).copy_(quants.bitwise_or_(_fifth_bits(high)))


def _q5_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _five(blocks[:, 6:], blocks[:, 2:6], out)
    out.sub_(16.0).mul_(_half(blocks, 0))


def _q5_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _five(blocks[:, 8:], blocks[:, 4:8], out)
    out.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(blocks[:, 2:].view(torch.int8)).mul_(_half(blocks, 0))


def _q2_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    scales, quants = blocks[:, :16], blocks[:, 16:80].view(-1, 2, 1, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 1, 4, 1)
    out.view(-1, 2, 4, 32).copy_((quants >> shifts).bitwise_and_(3))
    groups = out.view(-1, 16, 16)
    groups.mul_(((scales & 15) * _half(blocks, 80)).unsqueeze(-1))
    groups.sub_(((scales >> 4) * _half(blocks, 82)).unsqueeze(-1))


def _q3_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    mask, quants = blocks[:, None, :32], blocks[:, 32:96].view(-1, 2, 1, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 1, 4, 1)
    low = (quants >> shifts).bitwise_and_(3).view(-1, 8, 32)
    high = (mask >> torch.arange(8, dtype=torch.uint8).view(1, 8, 1)).bitwise_and_(1).bitwise_left_shift_(2)
    out.view(-1, 8, 32).copy_(low.bitwise_or_(high))
    packed = blocks[:, 96:108].view(-1, 3, 4)  # 16 six-bit scales: low halves in 8 bytes, top bits in 4
    low_scale = torch.cat((packed[:, :2] & 15, packed[:, :2] >> 4), dim=1)  # [n, 4, 4]
    high_scale = (packed[:, 2:] >> shifts.view(1, 4, 1)).bitwise_and_(3).bitwise_left_shift_(4)
    scales = low_scale.bitwise_or_(high_scale).view(-1, 16).float().sub_(32.0).mul_(_half(blocks, 108))
    out.sub_(4.0).view(-1, 16, 16).mul_(scales.unsqueeze(-1))


def _six_bit_pairs(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Q4_K's and Q5_K's 12 bytes -> 8 scales and 8 minima of six bits."""
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), dim=1)
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=1)
    return scales, minima  # [n, 8] each


def _scale_and_shift(blocks: torch.Tensor, out: torch.Tensor) -> None:
    scales, minima = _six_bit_pairs(blocks[:, 4:16])
    groups = out.view(-1, 8, 32)
    groups.mul_((scales * _half(blocks, 0)).unsqueeze(-1))
    groups.sub_((minima * _half(blocks, 2)).unsqueeze(-1))


def _q4_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _nibbles(blocks[:, 16:].view(-1, 4, 32), out.view(-1, 4, 2, 32))
    _scale_and_shift(blocks, out)


def _q5_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    packed = blocks[:, 48:].view(-1, 4, 32)
    low = torch.stack((packed & 15, packed >> 4), dim=2).view(-1, 8, 32)
    high = (blocks[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8).view(1, 8, 1)).bitwise_and_(1)
    out.view(-1, 8, 32).copy_(low.bitwise_or_(high.bitwise_left_shift_(4)))
    _scale_and_shift(blocks, out)


def _q6_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    low, high = blocks[:, :128].view(-1, 2, 1, 2, 32), blocks[:, 128:192].view(-1, 2, 1, 32)
    halves = torch.cat((low & 15, low >> 4), dim=2)  # [n, 2, 2, 2, 32]
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 1, 4, 1)
    tops = (high >> shifts).bitwise_and_(3).bitwise_left_shift_(4)  # [n, 2, 4, 32]
    out.view(-1, 2, 4, 32).copy_(halves.view(-1, 2, 4, 32).bitwise_or_(tops))
    scales = blocks[:, 192:208].view(torch.int8) * _half(blocks, 208)  # [n, 16]
    out.sub_(32.0).view(-1, 16, 16).mul_(scales.unsqueeze(-1))


_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_RULES: dict[str, tuple[Rule, int, int]] = {  # rule, weights per block, bytes per block
    "Q4_0": (_q4_0, 32, 18),
    "Q4_1": (_q4_1, 32, 20),
    "Q5_0": (_q5_0, 32, 22),
    "Q5_1": (_q5_1, 32, 24),
    "Q8_0": (_q8_0, 32, 34),
    "Q2_K": (_q2_k, 256, 84),
    "Q3_K": (_q3_k, 256, 110),
    "Q4_K": (_q4_k, 256, 144),
    "Q5_K": (_q5_k, 256, 176),
    "Q6_K": (_q6_k, 256, 210),
}
