"""Steps that change a matrix equally in all directions (Muon): momentum whose singular values are all made one.

For the matrices of layers; embeddings, heads and norms are Adam's. A step is as large as Adam's would be, so one rate
serves both. Knows tensors; no network.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

MOMENTUM = 0.95
ITERATIONS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan et al. 2024: steep at zero, near one from there on
ADAM_SIZE = 0.2  # root mean square of a step of Adam, which a step here is scaled to (Liu et al. 2025)


def orthogonal(matrices: Tensor) -> Tensor:
    """[N, m, n], m <= n, by the nearest ones whose singular values are about one."""
    a, b, c = COEFFICIENTS
    x = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(ITERATIONS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x


class Muon(torch.optim.Optimizer):
    def __init__(self, matrices: Iterable[Tensor], lr: float) -> None:
        super().__init__(list(matrices), {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            alike: dict[tuple[int, int], list[Tensor]] = {}  # matrices of one shape, or of its transpose, go together
            for matrix in group["params"]:
                if matrix.grad is not None:
                    alike.setdefault((min(matrix.shape), max(matrix.shape)), []).append(matrix)
            for (_, wide), own in alike.items():
                self._change(own, group["lr"] * ADAM_SIZE * wide**0.5)

    def _change(self, matrices: list[Tensor], rate: float) -> None:
        moved = []
        for matrix in matrices:
            gradient, state = matrix.grad, self.state[matrix]
            assert gradient is not None
            past = state.setdefault("momentum", torch.zeros_like(matrix))
            past.lerp_(gradient, 1.0 - MOMENTUM)
            ahead = gradient.lerp(past, MOMENTUM)
            moved.append(ahead if ahead.shape[0] <= ahead.shape[1] else ahead.mT)
        dtype = torch.bfloat16 if matrices[0].is_cuda else torch.float32
        for matrix, change in zip(matrices, orthogonal(torch.stack(moved).to(dtype)), strict=True):
            change = change if matrix.shape[0] <= matrix.shape[1] else change.mT
            matrix.add_(change.to(matrix.dtype), alpha=-rate)
