"""Rotary position embedding: the frequencies of every scaling rule, and one table that forwards read.

Knows no model. K is stored rotated, so moving a cached span to other positions is one more rotation by the difference.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from forerun.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """(inverse frequency of each of head_dim / 2 rotations, factor on the rotated vectors)."""
    base = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)  # [D / 2]
    if rope.kind == "linear":
        return base / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(base, rope), 1.0
    if rope.kind == "yarn":
        return _yarn(base, rope, head_dim)
    return base, 1.0


def _llama3(base: Tensor, rope: RopeConfig) -> Tensor:
    """Low frequencies are divided by the factor, high ones kept, those between blended."""
    wavelength = 2 * math.pi / base
    cycles = rope.original_context / wavelength  # rotations within the original context
    blend = ((cycles - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return base / rope.factor * (1 - blend) + base * blend


def _yarn(base: Tensor, rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Interpolate the dimensions that turn less than beta_slow times in the original context, keep the fast ones."""

    def dimension(turns: float) -> float:
        return head_dim * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(dimension(rope.beta_fast)), 0)
    high = min(math.ceil(dimension(rope.beta_slow)), head_dim - 1)
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    factor = rope.attention_factor
    if factor is None:
        factor = 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
    return base * (1 - ramp) + base / rope.factor * ramp, factor


class RopeTable:
    """cos and sin of every position, as [positions, D]: cosines in the first half, sines in the second."""

    def __init__(self, rope: RopeConfig, head_dim: int, max_context: int, device: torch.device) -> None:
        inverse, factor = inverse_frequencies(rope, head_dim)
        angles = torch.arange(max_context, dtype=torch.float32)[:, None] * inverse  # [P, D / 2]
        self.table = (torch.cat((angles.cos(), angles.sin()), dim=1) * factor).to(device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, signed sin) at these positions, [T, 1, D] each, ready for `rotate`."""
        cos, sin = self.table.index_select(0, positions).chunk(2, dim=1)
        return torch.cat((cos, cos), 1)[:, None], torch.cat((-sin, sin), 1)[:, None]

    def between(self, old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, signed sin) that take heads rotated at `old` to where they would be at `new`, for `rotate`.

        From the table's own angles, not from the angle of the difference: at long contexts float32 angles are off by a
        thousandth of a turn, and what is moved must be off by the same as what was computed there.
        """
        cos_old, sin_old = self.table.index_select(0, old).chunk(2, dim=1)  # [T, D / 2] each
        cos_new, sin_new = self.table.index_select(0, new).chunk(2, dim=1)
        scale = self.table[0, 0] ** 2  # both carry the factor on rotated vectors, which the heads have already
        cos = (cos_new * cos_old + sin_new * sin_old) / scale
        sin = (sin_new * cos_old - cos_new * sin_old) / scale
        return torch.cat((cos, cos), 1)[:, None], torch.cat((-sin, sin), 1)[:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads [T, H, D] by their positions' angles, in float32, in the dtype of x."""
    swapped = x.roll(x.shape[-1] // 2, -1)
    rotated = (x * cos).addcmul_(swapped, sin)
    return rotated if rotated.dtype == x.dtype else rotated.to(x.dtype)
