"""From hidden states of a source to K and V of the target: a shared projection to low rank, a small nonlinear step, and
one matrix to all layers at once.

A token's features are its hidden states at some layers, each divided by its own root mean square, and perhaps its
embedding in the target, which is free and holds what a narrower source lacks. K comes out before rotation, so that a
map does not depend on the position. `Maps` are the weights as calibration saves them; `FastMaps` are the same, ready to
run beside a decoder. Neither knows pages, prompts or which model is which.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.models.execution.float8_mlp import float8_projection
from forerun.models.linear import Linear, Precision
from forerun.models.rotation import Rotation

EPS = 1e-6


@dataclass
class Maps:
    """`taps`: inputs of these layers of the source, num_layers for the last one's output. `target_embedding`:
    the target's embedding of the token comes after them."""

    taps: tuple[int, ...]
    base: int  # target layers below it are not mapped
    down: Tensor  # [rank, inputs]
    down_bias: Tensor  # [rank]
    mix_in: Tensor  # [inner, rank]
    mix_out: Tensor  # [rank, inner]
    up: Tensor  # [mapped layers * 2 * kv_size, rank]: K, then V, layer by layer
    up_bias: Tensor  # [mapped layers * 2 * kv_size]
    target_embedding: bool = field(default=False, kw_only=True)

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    @property
    def macs(self) -> int:
        """Multiply-adds for one token."""
        return sum(t.numel() for t in (self.down, self.mix_in, self.mix_out, self.up))

    def tensors(self) -> dict[str, Tensor]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.type == "Tensor"}

    def __call__(self, features: Tensor) -> Tensor:
        """[..., inputs] -> [..., mapped layers * 2 * kv_size]; differentiable."""
        z = F.linear(features, self.down, self.down_bias)
        z = z + F.linear(F.silu(F.linear(z, self.mix_in)), self.mix_out)
        return F.linear(z, self.up, self.up_bias)

    def to(self, device: torch.device, dtype: torch.dtype) -> Maps:
        return self.with_tensors({name: t.to(device, dtype) for name, t in self.tensors().items()})

    def with_tensors(self, tensors: dict[str, Tensor]) -> Maps:
        """Maps of the same shape with other weights."""
        other = copy(self)
        vars(other).update(tensors)
        return other


def unit(x: Tensor) -> Tensor:
    """Rows divided by their root mean square, which a rotation of the residual stream does not change."""
    return F.rms_norm(x, (x.shape[-1],), None, EPS)


def features_of(hidden: list[Tensor]) -> Tensor:
    """[T, width] each -> [T, inputs]."""
    return torch.cat([unit(x) for x in hidden], 1)


def _fused_features(dtype: torch.dtype, widths: list[int], device: torch.device) -> Callable[[list[Tensor]], Tensor]:
    """`features_of` in one launch in place of one for each part, if the kernel takes their shapes."""
    from forerun.models.cuda.features import fits, unit_features

    empty = [torch.empty(0, width, dtype=dtype, device=device) for width in widths]
    if not fits(empty):
        return features_of
    unit_features(empty, EPS, dtype)  # compiled now, so that no prompt waits for it
    return lambda hidden: unit_features(hidden, EPS, dtype) if fits(hidden) else features_of(hidden)


class FastMaps:
    """Maps in a decoder's precision. `bases`: of each part of the inputs, in order, how wide it is and the (perhaps
    rotated) basis it comes in. `float8`: many rows may be projected in float8, where the device can."""

    def __init__(
        self,
        maps: Maps,
        precision: Precision,
        bases: list[tuple[int, Rotation | None]],
        device: torch.device,
        float8: bool = False,
    ) -> None:
        widths = [width for width, _ in bases]
        parts = maps.down.float().split(widths, 1)
        rotated = (part if b is None else b.apply(part.contiguous()) for part, (_, b) in zip(parts, bases, strict=True))
        down = torch.cat(list(rotated), 1)
        dtype = precision.dtype

        def linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
            held = weight.float() if precision.linear.packs else weight.to(dtype)
            return precision.linear(held.to(device), None if bias is None else bias.to(device, dtype))

        self._down = linear(down, maps.down_bias)
        self._mix_in, self._mix_out = linear(maps.mix_in), linear(maps.mix_out)
        self._up = linear(maps.up, maps.up_bias)
        fused = device.type == "cuda" and dtype == torch.bfloat16
        self._features = _fused_features(dtype, widths, device) if fused else features_of
        self._float8_down = float8_projection(self._down, widths, EPS) if float8 else None

    @property
    def nbytes(self) -> int:
        held = sum(linear.nbytes for linear in (self._down, self._mix_in, self._mix_out, self._up))
        return held if self._float8_down is None else held + self._float8_down.nbytes

    def __call__(self, hidden: list[Tensor]) -> Tensor:
        """Hidden states, [T, hidden] each -> [T, mapped layers * 2 * kv_size]."""
        float8 = self._float8_down
        z = float8(hidden) if float8 is not None and float8.takes(hidden) else self._down(self._features(hidden))
        z = self._mix_out(F.silu(self._mix_in(z)), add=z)
        return self._up(z)
