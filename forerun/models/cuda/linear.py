"""Linears on CUDA: few rows go to the fused kernels that read weights at memory speed, many to cuBLAS.

Knows no model; which rows are few is the only decision taken here.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.models.cuda.fused import act_mul
from forerun.models.cuda.fused import rms_norm as fused_rms_norm
from forerun.models.cuda.skinny import skinny_linear
from forerun.models.linear import Linear, Norm

MAX_SKINNY_ROWS = 24  # from 32 rows on cuBLAS is faster (docs/log.md: whole steps of both shapes on one H200)


def _pieces(norm: Norm) -> tuple[Tensor, float]:
    weight, eps = norm
    assert weight is not None, "bf16 weights on CUDA keep their norms apart"
    return weight, eps


class SkinnyLinear(Linear):
    """bf16 weights; up to FEW_ROWS rows in one launch with the norm before and the sum after."""

    def __call__(self, x: Tensor, *, norm: Norm | None = None, add: Tensor | None = None) -> Tensor:
        if x.shape[0] > MAX_SKINNY_ROWS:
            return self._product(x if norm is None else fused_rms_norm(x, *_pieces(norm)), add)
        weight, eps = (None, 0.0) if norm is None else _pieces(norm)
        return skinny_linear(x, self.weight, self.bias, norm_weight=weight, eps=eps, residual=add)

    def _product(self, x: Tensor, add: Tensor | None) -> Tensor:
        if add is None or self.bias is not None:
            return super()._product(x, add)
        return torch.addmm(add, x, self.weight.t())  # the sum in the product's own epilogue: no pass over it after

    def gated(self, x: Tensor, activation: str, *, norm: Norm | None = None) -> Tensor:
        if x.shape[0] > MAX_SKINNY_ROWS:
            normed = x if norm is None else fused_rms_norm(x, *_pieces(norm))
            return act_mul(F.linear(normed, self.weight, self.bias), activation)
        weight, eps = (None, 0.0) if norm is None else _pieces(norm)
        return skinny_linear(x, self.weight, self.bias, norm_weight=weight, eps=eps, activation=activation)
