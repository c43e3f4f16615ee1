"""A target and a source as calibration sees them: what the source knows of a window, and the target run on drafted K/V.

`read` gives features and scores, `recompute` runs chosen rows of a window over K/V that comes from maps. Differentiable
where it must be. Knows neither how maps are found nor how good they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.prefill.calibration.dense import AttentionHook, DenseModel, LayerActivations
from forerun.prefill.maps import unit

TAIL = 64  # the last tokens of a prompt, which the target always runs
FIRST = 16  # the first ones, which it always runs too


@dataclass
class ModelPair:
    """`source` is the target itself where nothing else drafts."""

    target: DenseModel
    source: DenseModel
    taps: tuple[int, ...]
    base: int  # layers below it are the target's own for every token

    @property
    def alone(self) -> bool:
        return self.source is self.target

    @property
    def own(self) -> bool:
        """Whether the target's embedding is among the features: a draft's is narrower, and does not tell as much."""
        return not self.alone

    @property
    def inputs(self) -> int:
        """Width of the features."""
        own = self.target.config.hidden_size if self.own else 0
        return len(self.taps) * self.source.config.hidden_size + own

    @property
    def mapped(self) -> int:
        return self.target.config.num_layers - self.base

    @property
    def width(self) -> int:
        """Of the maps' output: K and V of every mapped layer."""
        return self.mapped * 2 * self.target.config.kv_size

    def read(self, tokens: Tensor, tail: slice, exact: LayerActivations) -> tuple[Tensor, Tensor]:
        """Features [B, T, inputs], and how much each query of the tail looks at each token [B, tail, T].

        `exact` is the target's own trace; a source that is the target reads its lower layers from there.
        """
        tail_attention = DenseTailAttention(tail, self.source.config.scale)
        if self.alone:
            return torch.cat([unit(exact.hidden[t]) for t in self.taps], -1), tail_attention.mean(tokens)
        layers = max(self.taps)
        trace = self.source.trace(tokens, max(layers, 1), tail_attention, keep_kv=False)
        seen = [unit(trace.hidden[t]) for t in self.taps]
        return torch.cat([*seen, unit(exact.hidden[0])], -1), tail_attention.mean(tokens)

    def recompute(
        self, exact: LayerActivations, drafted: Tensor, rows: Tensor, see: AttentionHook | None = None
    ) -> Tensor:
        """Hidden states [B, R, hidden] at the end of the rows' way up, where everything else has drafted K/V.

        `drafted` [B, T, width] from the maps, `rows` [B, R] positions in order; layers below `base` are exact for all.
        """
        target = self.target
        wide = rows[..., None]
        x = exact.hidden[self.base].gather(1, wide.expand(-1, -1, target.config.hidden_size))
        everyone = torch.arange(drafted.shape[1], device=rows.device)
        parts = drafted.unflatten(-1, (self.mapped, 2, target.config.kv_size))  # [B, T, mapped, 2, kv]
        for i in range(self.base, target.config.num_layers):
            q, k, v = target.project(x, i)
            spread = wide.expand(-1, -1, target.config.kv_size)
            k = parts[:, :, i - self.base, 0].scatter(1, spread, k)
            v = parts[:, :, i - self.base, 1].scatter(1, spread, v)
            q, k = target.rotate(q, rows, i), target.rotate(k, everyone, i)
            if see is not None:
                see(i, q, k, rows)
            x = target.finish(x, target.masked(q, k, v, rows, i), i)
        return x


class DenseTailAttention:
    """Attention of some queries over all entries, summed over heads and layers."""

    def __init__(self, queries: slice, scale: float) -> None:
        self.queries, self.scale = queries, scale
        self._sum: Tensor | None = None
        self._count = 0

    def __call__(self, layer: int, q: Tensor, k: Tensor, positions: Tensor) -> None:
        with torch.no_grad():
            rows = positions[..., self.queries]
            rows = rows[None] if rows.dim() == 1 else rows  # [B or 1, Q]
            group = q.shape[1] // k.shape[1]
            q = q[:, :, self.queries].unflatten(1, (k.shape[1], group))  # [B, Hkv, G, Q, D]
            scores = (q @ k[:, :, None].transpose(-1, -2)).float() * self.scale  # [B, Hkv, G, Q, T]
            hidden = torch.arange(k.shape[2], device=k.device) > rows[..., None]  # [B, Q, T]
            scores = scores.masked_fill(hidden[:, None, None], float("-inf"))
            mean = F.softmax(scores, -1).mean((1, 2))  # [B, Q, T]
        self._sum = mean if self._sum is None else self._sum + mean
        self._count += 1

    def mean(self, tokens: Tensor) -> Tensor:
        """[B, Q, T]; zeros where nothing was seen."""
        if self._sum is None:
            count = self.queries.stop - self.queries.start
            return torch.zeros(tokens.shape[0], count, tokens.shape[1], device=tokens.device)
        return self._sum / self._count


def choose(tail_attention: Tensor, end: int, share: float) -> Tensor:
    """Positions [B, n] of the share of tokens before `end` that the tail looks at most, beside the first ones."""
    count = round(share * end)
    scores = tail_attention.mean(1)[:, :end].clone()  # [B, end]
    scores[:, :FIRST] = -1.0
    return scores.topk(count, -1).indices


def with_ends(chosen: Tensor, end: int, stop: int) -> Tensor:
    """Chosen positions, the first ones, and everything from `end` to `stop`, in order: [B, R]."""
    ends = torch.cat((torch.arange(FIRST), torch.arange(end, stop))).to(chosen.device)
    return torch.cat((chosen, ends.expand(chosen.shape[0], -1)), 1).sort(-1).values
