"""Maps by ridge regression from streamed sums, then cut down to a rank: constant memory, however much text there is.

Outputs are weighted by the inverse of their spread, K more than V, since errors in K do far more damage. Knows
features and outputs as matrices; not where they come from.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.prefill.maps import Maps

KEY_WEIGHT = 2.0  # of an error in K, beside 1 for V


class Ridge:
    """Sums over tokens: X'X, X'Y, and what standardising needs."""

    def __init__(self, inputs: int, outputs: int, device: torch.device) -> None:
        self.count = 0
        self.xx = torch.zeros(inputs, inputs, device=device)
        self.xy = torch.zeros(inputs, outputs, device=device)
        self.x = torch.zeros(inputs, device=device)
        self.y = torch.zeros(outputs, device=device)
        self.yy = torch.zeros(outputs, device=device)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Some tokens: [N, inputs], [N, outputs]."""
        x, y = x.float(), y.float()
        self.xx.addmm_(x.T, x)
        self.xy.addmm_(x.T, y)
        self.x += x.sum(0)
        self.y += y.sum(0)
        self.yy += y.square().sum(0)
        self.count += x.shape[0]

    def state(self) -> dict[str, Tensor]:
        sums = {name: getattr(self, name) for name in ("xx", "xy", "x", "y", "yy")}
        return {**sums, "count": torch.tensor(self.count)}

    def load(self, state: dict[str, Tensor]) -> None:
        for name in ("xx", "xy", "x", "y", "yy"):
            getattr(self, name).copy_(state[name])
        self.count = int(state["count"])

    def fit(
        self,
        taps: tuple[int, ...],
        base: int,
        kv_size: int,
        rank: int,
        inner: int,
        strength: float,
        target_embedding: bool = False,
    ) -> Maps:
        """The best maps of a rank. `strength`: the ridge, as a share of the features' mean spread."""
        n = self.count
        mean_x, mean_y = self.x / n, self.y / n
        spread = (self.yy / n - mean_y.square()).clamp_min(1e-8).sqrt()  # [outputs]
        weight = (
            spread.reciprocal().view(-1, 2, kv_size) * torch.tensor([KEY_WEIGHT, 1.0], device=spread.device)[:, None]
        )
        weight = weight.flatten()
        xx = self.xx / n - torch.outer(mean_x, mean_x)
        xy = (self.xy / n - torch.outer(mean_x, mean_y)) * weight
        xx.diagonal().add_(strength * xx.diagonal().mean())
        solution = torch.linalg.solve_ex(xx.double(), xy.double())[0].float()  # [inputs, outputs]
        basis, variance = _leading(solution, xx, rank)  # [outputs, rank]
        scale = variance.sqrt().clamp_min(1e-6)
        down = (solution @ basis / scale).T.contiguous()  # [rank, inputs]
        up = basis * scale / weight[:, None]  # [outputs, rank]
        generator = torch.Generator().manual_seed(0)
        mix_in = torch.randn(inner, rank, generator=generator).to(down.device) * rank**-0.5
        return Maps(
            taps,
            base,
            down=down,
            down_bias=-down @ mean_x,
            mix_in=mix_in,
            mix_out=torch.zeros(rank, inner, device=down.device),  # linear until distillation trains it
            up=up,
            up_bias=mean_y,
            target_embedding=target_embedding,
        )


def _leading(solution: Tensor, xx: Tensor, rank: int, rounds: int = 4) -> tuple[Tensor, Tensor]:
    """Directions of the outputs [outputs, rank] along which predictions vary most, and their variances; by subspace
    iteration."""
    rank = min(rank, *solution.shape)
    generator = torch.Generator().manual_seed(1)
    basis = torch.randn(solution.shape[1], min(rank + 32, solution.shape[1]), generator=generator).to(solution.device)
    for _ in range(rounds):
        basis = torch.linalg.qr(solution.T @ (xx @ (solution @ basis)))[0]
    image = solution @ basis
    values, vectors = torch.linalg.eigh(image.T @ (xx @ image))
    order = values.argsort(descending=True)[:rank]
    return basis @ vectors[:, order], values[order]
