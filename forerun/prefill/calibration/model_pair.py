"""A target and its source for calibration: features of a window, and the target run over drafted K/V.

`features` gives what maps read, `recompute` runs chosen rows of a window over K/V that comes from maps, and `draft`
does all of it for windows with a continuation. Differentiable where it must be. Knows neither how maps are found nor
how good they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.prefill.calibration.dense import AttentionHook, DenseModel, LayerActivations
from forerun.prefill.choosers import copy_scores
from forerun.prefill.maps import Maps, unit
from forerun.prefill.plan import Policy

TAIL_TOKENS = Policy.tail  # last tokens of a prompt, which the target always runs
FIRST_TOKENS = Policy.first  # first tokens of a prompt, which it always runs too

# Called in every mapped layer before rows replace drafts: (layer, inputs x [B, R, hidden], unrotated q, k, v of the
# rows [B, R, heads * D], drafted K and V of all entries [B, T, 2, kv_size])
RowHook = Callable[[int, Tensor, tuple[Tensor, Tensor, Tensor], Tensor], None]


@dataclass
class ModelPair:
    """`source` is the target itself where its own lower layers draft."""

    target: DenseModel
    source: DenseModel
    taps: tuple[int, ...]
    base: int  # layers below it are the target's own for every token

    @property
    def alone(self) -> bool:
        return self.source is self.target

    @property
    def target_embedding(self) -> bool:
        """Whether the target's embedding is among the features: a draft's is narrower and holds less."""
        return not self.alone

    @property
    def inputs(self) -> int:
        """Width of the features."""
        embedding = self.target.config.hidden_size if self.target_embedding else 0
        return len(self.taps) * self.source.config.hidden_size + embedding

    @property
    def mapped(self) -> int:
        return self.target.config.num_layers - self.base

    @property
    def width(self) -> int:
        """Of the maps' output: K and V of every mapped layer."""
        return self.mapped * 2 * self.target.config.kv_size

    def features(self, tokens: Tensor, exact: LayerActivations) -> Tensor:
        """[B, T, inputs]. `exact`: the target's own activations; a source that is the target takes its lower layers
        from there."""
        if self.alone:
            return torch.cat([unit(exact.hidden[t]) for t in self.taps], -1)
        read = self.source.trace(tokens, max(*self.taps, 1), keep_kv=False)
        return torch.cat([*(unit(read.hidden[t]) for t in self.taps), unit(exact.hidden[0])], -1)

    def recompute(
        self,
        exact: LayerActivations,
        drafted: Tensor,
        rows: Tensor,
        hook: AttentionHook | None = None,
        row_hook: RowHook | None = None,
    ) -> Tensor:
        """Hidden states [B, R, hidden] of the rows after the last layer, where all other entries have drafted K/V.

        `drafted` [B, T, width] from the maps, `rows` [B, R] positions in order; layers below `base` are exact for all.
        """
        target = self.target
        x = take_rows(exact.hidden[self.base], rows)
        positions = torch.arange(drafted.shape[1], device=rows.device)
        parts = drafted.unflatten(-1, (self.mapped, 2, target.config.kv_size))  # [B, T, mapped, 2, kv]
        at = rows[..., None].expand(-1, -1, target.config.kv_size)
        for i in range(self.base, target.config.num_layers):
            q, k, v = target.project(x, i)
            guess = parts[:, :, i - self.base]  # [B, T, 2, kv]
            if row_hook is not None:
                row_hook(i, x, (q, k, v), guess)
            k, v = guess[:, :, 0].scatter(1, at, k), guess[:, :, 1].scatter(1, at, v)
            q, k = target.rotate(q, rows, i), target.rotate(k, positions, i)
            if hook is not None:
                hook(i, q, k, rows)
            x = target.finish_layer(x, target.masked_attention(q, k, v, rows, i), i)
        return x

    @torch.no_grad()
    def draft(self, maps: Maps, windows: Tensor, ahead: int) -> DraftedWindows:
        """Windows [B, T] that end with `ahead` continuation tokens, drafted by these maps."""
        tokens = windows.to(self.target.device).long()
        exact = self.target.trace(tokens, keep_kv=False)
        drafted = maps(self.features(tokens, exact).to(maps.down.dtype)).to(self.target.dtype)
        end = tokens.shape[1] - ahead - TAIL_TOKENS
        return DraftedWindows(self, tokens, ahead, exact, drafted, tail_attention_over(self, exact, drafted, end))


@dataclass
class DraftedWindows:
    """Windows with exact activations and drafted K/V; `end` is where the tail of their prompts begins."""

    pair: ModelPair
    tokens: Tensor  # [B, T]
    ahead: int
    exact: LayerActivations
    kv: Tensor  # [B, T, width] drafted
    tail_attention: Tensor  # [B, tail, T] of the target's own tail over drafted K/V

    @cached_property
    def repeated(self) -> Tensor:
        return repeated(self.tokens[:, : self.tokens.shape[1] - self.ahead], self.end)

    @property
    def end(self) -> int:
        return self.tokens.shape[1] - self.ahead - TAIL_TOKENS

    def choose(self, share: float) -> Tensor:
        return choose(self.tail_attention, self.repeated, share)

    def uncovered(self, chosen: Tensor) -> Tensor:
        """[B] how much of the tail's attention falls on entries that stay drafted when these [B, n] are recomputed."""
        attention = self.tail_attention.mean(1)[:, : self.end].clone()
        attention[:, :FIRST_TOKENS] = 0.0
        return attention.scatter(1, chosen, 0.0).sum(1)

    def recompute(self, chosen: Tensor, row_hook: RowHook | None = None) -> Tensor:
        """Hidden states of these rows [B, n], the first tokens, the tail and the continuation, after the last layer."""
        rows = with_ends(chosen, self.end, self.tokens.shape[1])
        return self.pair.recompute(self.exact, self.kv, rows, row_hook=row_hook)


class DenseTailAttention:
    """Attention of some queries over all entries, averaged over the heads and layers it is called for."""

    def __init__(self, queries: slice, scale: float) -> None:
        self.queries, self.scale = queries, scale
        self._sum: Tensor | None = None
        self._layers = 0

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
        self._layers += 1

    def mean(self) -> Tensor:
        """[B, Q, T], once at least one layer has run."""
        assert self._sum is not None
        return self._sum / self._layers


def tail_attention_over(pair: ModelPair, exact: LayerActivations, drafted: Tensor, end: int) -> Tensor:
    """[B, tail, T] attention of the target's own tail, which begins at `end`, over drafted K/V."""
    none = torch.zeros(drafted.shape[0], 0, dtype=torch.int64, device=drafted.device)
    attention = DenseTailAttention(slice(FIRST_TOKENS, FIRST_TOKENS + TAIL_TOKENS), pair.target.config.scale)
    pair.recompute(exact, drafted, with_ends(none, end, end + TAIL_TOKENS), attention)
    return attention.mean()


def take_rows(x: Tensor, at: Tensor) -> Tensor:
    """Rows `at` [B, C] of x [B, R, n]: [B, C, n]."""
    return x.gather(1, at[..., None].expand(-1, -1, x.shape[-1]))


def repeated(prompts: Tensor, end: int) -> Tensor:
    """[B, end] what the tail of prompts [B, P], from `end` on, repeats of what stands before it, as for any request."""
    marks = [copy_scores(row, end)[:end] for row in prompts.cpu().numpy()]
    return torch.from_numpy(np.stack(marks)).to(prompts.device, torch.float32)


def choose(tail_attention: Tensor, marks: Tensor, share: float) -> Tensor:
    """Positions [B, n] of the share of tokens that the tail repeats (`marks` [B, end]) or attends to most, the first
    ones left out."""
    end = marks.shape[1]
    count = round(share * end)
    scores = tail_attention.mean(1)[:, :end] + marks  # [B, end]
    scores[:, :FIRST_TOKENS] = -1.0
    return scores.topk(count, -1).indices


def with_ends(chosen: Tensor, end: int, stop: int) -> Tensor:
    """Chosen positions, the first ones, and everything from `end` to `stop`, in order: [B, R]."""
    ends = torch.cat((torch.arange(FIRST_TOKENS), torch.arange(end, stop))).to(chosen.device)
    return torch.cat((chosen, ends.expand(chosen.shape[0], -1)), 1).sort(-1).values
