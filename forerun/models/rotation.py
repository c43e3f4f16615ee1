"""Rotating the residual stream, so that eight bits are enough for it.

A few channels of a decoder's hidden states are tens of times larger than the rest, and a row's int8 scale must cover
them. Multiplying the stream by an orthogonal matrix spreads them over all channels, and costs nothing at run time: RMS
norms do not see a rotation once their weights are folded into the matrices behind them, matrices that read the stream
are multiplied by it, matrices that write the stream by its transpose. No data is needed. Knows matrices, not models.

The rotation is a Kronecker product of two small ones, because a full one would cost more than loading the model.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 64
_CHUNK_ROWS = 256


class Rotation:
    """An orthogonal matrix Q of the given size, as kron(outer, inner)."""

    def __init__(self, size: int) -> None:
        inner = min(size & -size, _BLOCK)  # the largest power of two that divides size, within a block
        self.size, self.inner, self.outer = size, hadamard(inner), _orthogonal(size // inner)

    def apply(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """(x * scale) @ Q for rows x [N, size]; a row's result does not depend on how many rows there are."""
        if x.shape[0] > _CHUNK_ROWS:  # a matrix: some rows at a time stay in the caches, three times faster
            out = torch.empty(x.shape, dtype=torch.float32)
            for lo in range(0, x.shape[0], _CHUNK_ROWS):
                out[lo : lo + _CHUNK_ROWS] = self.apply(x[lo : lo + _CHUNK_ROWS], scale)
            return out
        x = x.float() if scale is None else x * scale
        if x.shape[0] == 1:  # a lone row would take another kernel, which sums in another order
            return self.apply(x.expand(2, -1))[:1]
        blocks = x.reshape(-1, self.outer.shape[0], self.inner.shape[0])  # [N, outer, inner]
        return torch.matmul(self.outer.T, blocks @ self.inner).view(x.shape)

    def undo(self, x: Tensor) -> Tensor:
        """x @ Q.T for rows x [..., size]."""
        blocks = x.reshape(-1, self.outer.shape[0], self.inner.shape[0])
        return torch.matmul(self.outer, blocks @ self.inner.T).view(x.shape)

    def apply_output(self, weight: Tensor) -> Tensor:
        """Q.T @ weight for a matrix [size, K] that writes the stream."""
        blocks = weight.reshape(self.outer.shape[0], self.inner.shape[0], -1)  # [outer, inner, K]
        blocks = torch.matmul(self.inner.T, blocks)
        return (self.outer.T @ blocks.reshape(self.outer.shape[0], -1)).view(weight.shape)


def hadamard(size: int) -> Tensor:
    """The orthonormal Hadamard matrix of a power of two."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / size**0.5


def _orthogonal(size: int) -> Tensor:
    if size & (size - 1) == 0:
        return hadamard(size)
    draw = torch.Generator().manual_seed(size)
    q, r = torch.linalg.qr(torch.randn(size, size, generator=draw, dtype=torch.float64))
    return (q * r.diagonal().sign()).float()
