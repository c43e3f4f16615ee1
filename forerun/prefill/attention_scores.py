"""Tail attention: how much the end of a prompt attends to everything before it, collected while a model reads the end.

Averaged over the layers and heads that were added; attention sinks are left in. Knows one model's K/V and pages; not
what is chosen by it.
"""

from __future__ import annotations

from array import array

import numpy as np
import torch
from torch import Tensor

from forerun.core.batch import send
from forerun.models.execution.runner import Runner

REDUCTIONS = ("mean", "max")  # over the queries of the tail
MAX_WEIGHTS = 1 << 25  # attention weights computed at a time: all those of a long prompt would be large


def slots_of(pages: array[int], first: int, end: int, page_size: int) -> np.ndarray:
    """Where entries first .. end lie in the pool, [end - first] int64."""
    page = first // page_size
    starts = np.array(pages[page : -(-end // page_size)], dtype=np.int64) * page_size
    return (starts[:, None] + np.arange(page_size)).reshape(-1)[first - page * page_size :][: end - first]


class TailAttention:
    """Attention of the queries at entries `tail`, ... over all entries of a sequence of `tokens`."""

    def __init__(self, runner: Runner, pages: array[int], tail: int, tokens: int) -> None:
        self._config, self._kv = runner.decoder.config, runner.kv
        self.tail, self.tokens = tail, tokens
        slots = slots_of(pages, 0, tokens, runner.pool.page_size)
        together = bool((np.diff(slots) == 1).all())
        self._start = int(slots[0]) if together else None  # pages side by side are read in place
        self._slots = send(slots, runner.decoder.device)
        self._sum = torch.zeros(tokens - tail, tokens, device=runner.decoder.device)  # [Q, tokens]
        self._layers: set[int] = set()
        self._added: set[int] = set()  # entries whose queries were added
        self._mask: tuple[tuple[int, int, int, int | None], Tensor] | None = None

    def add(self, layer: int, q: Tensor, first: int) -> None:
        """Rotated queries [Q, Hq, D] of entries first, first + 1, ... whose K is in the cache already."""
        count, end, window = q.shape[0], first + q.shape[0], self._config.windows[layer]
        lo = 0 if window is None else max(0, first + 1 - window)
        keys = self._keys(layer, lo, end)  # [E, Hkv, D]
        group = q.shape[1] // keys.shape[1]
        rows = q.view(count, -1, group, q.shape[2]).permute(1, 2, 0, 3).flatten(1, 2)  # [Hkv, group * Q, D]
        rows, hidden = rows * self._config.scale, self._hidden(first, end, lo, window)
        total = self._sum[first - self.tail : end - self.tail, lo:end]
        together = max(1, MAX_WEIGHTS // (rows.shape[1] * (end - lo)))
        for head in range(0, keys.shape[1], together):
            some = keys[:, head : head + together].permute(1, 2, 0)  # [heads, D, E]
            scores = torch.matmul(rows[head : head + together], some.to(rows.dtype)).view(-1, count, end - lo).float()
            scores += hidden
            total.add_(torch.softmax(scores, -1).sum(0), alpha=1.0 / q.shape[1])
        self._layers.add(layer)
        self._added.update(range(first, end))

    def _keys(self, layer: int, lo: int, end: int) -> Tensor:
        cache = self._kv[layer][0]
        if self._start is not None:
            return cache[self._start + lo : self._start + end]
        return cache.index_select(0, self._slots[lo:end])

    def _hidden(self, first: int, end: int, lo: int, window: int | None) -> Tensor:
        """[Q, E], to be added to scores: minus infinity where a query may not attend. The same for most layers."""
        asked = (first, end, lo, window)
        if self._mask is None or self._mask[0] != asked:
            entry = torch.arange(lo, end, device=self._sum.device)
            own = torch.arange(first, end, device=self._sum.device)[:, None]
            masked = entry > own if window is None else (entry > own) | (entry <= own - window)
            mask = torch.zeros(masked.shape, device=self._sum.device).masked_fill_(masked, float("-inf"))
            self._mask = asked, mask
        return self._mask[1]

    @property
    def complete(self) -> bool:
        return len(self._added) == self.tokens - self.tail > 0

    def weights(self) -> Tensor:
        """[Q, tokens] mean over layers and heads: each row sums to one."""
        return self._sum / max(1, len(self._layers))

    def reduce(self, how: str = "mean") -> np.ndarray:
        """[tokens] float32: mean or maximum over the queries."""
        assert how in REDUCTIONS, how
        weights = self.weights()
        return (weights.mean(0) if how == "mean" else weights.amax(0)).cpu().numpy()
