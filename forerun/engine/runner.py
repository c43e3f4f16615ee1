"""From scheduled work to logits: lays tokens out as a `TokenBatch` and runs the decoder on it.

Knows sequences' tokens and pages, not why they were chosen nor what becomes of the logits.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forerun.cache.pool import PagePool
from forerun.core import TokenBatch
from forerun.engine.scheduler import Work
from forerun.models.decoder import Decoder, Output, Taps


@dataclass
class Span:
    """Tokens of one sequence that run now: its entries `first`, `first + 1`, ..., on its pages."""

    ids: list[int]
    first: int
    pages: array[int]
    want: Seq[int]  # which of the ids need logits

    @classmethod
    def of(cls, work: Work) -> Span:
        seq = work.seq
        ids = seq.tokens[seq.computed : seq.computed + work.count]
        return cls(ids, seq.computed, seq.pages, (work.count - 1,) if work.samples else ())


class Runner:
    """Runs batches on one decoder and one pool."""

    def __init__(self, decoder: Decoder, pool: PagePool) -> None:
        self.decoder, self.pool = decoder, pool

    def run(self, work: list[Work]) -> Tensor:
        """Logits [N, V] of the works that sample, in their order."""
        return self.forward([Span.of(w) for w in work]).logits

    def forward(self, spans: list[Span], taps: Taps | None = None) -> Output:
        return self.decoder.forward(self.batch(spans), self.pool.kv, taps)

    def batch(self, spans: list[Span]) -> TokenBatch:
        """Lay spans out in causal order: each token sees the entries of its sequence before it, and itself."""
        size, device = self.pool.page_size, self.decoder.device
        counts = [len(span.ids) for span in spans]
        starts = [0, *np.cumsum(counts).tolist()]
        entries = np.concatenate([np.arange(s.first, s.first + len(s.ids)) for s in spans])  # [T]
        tables = np.zeros((len(spans), max(len(s.pages) for s in spans)), dtype=np.int32)
        for row, span in enumerate(spans):
            tables[row, : len(span.pages)] = span.pages
        rows = np.repeat(np.arange(len(spans)), counts)
        slots = tables[rows, entries // size].astype(np.int64) * size + entries % size
        want = [start + w for start, span in zip(starts, spans, strict=False) for w in span.want]
        return TokenBatch(
            tokens=torch.tensor([t for span in spans for t in span.ids], device=device),
            positions=torch.from_numpy(entries).to(device),
            slots=torch.from_numpy(slots).to(device),
            seen=torch.from_numpy((entries + 1).astype(np.int32)).to(device),
            tables=torch.from_numpy(tables).to(device),
            starts=starts,
            contexts=[span.first + len(span.ids) for span in spans],
            page_size=size,
            want=torch.tensor(want, dtype=torch.int64, device=device),
        )

    def score(self, ids: list[int], chunk: int) -> Tensor:
        """Logits at every position of a text, [len(ids), V] float32, on pages borrowed from the pool."""
        pages = array("i", self.pool.allocate(self.pool.pages_for(len(ids))))
        try:
            parts = [
                self.forward([Span(ids[lo : lo + chunk], lo, pages, range(len(ids[lo : lo + chunk])))]).logits
                for lo in range(0, len(ids), chunk)
            ]
        finally:
            self.pool.release(pages)
        return torch.cat(parts)

    def time_forward(self, tokens: int, context: int, repeats: int = 5) -> float:
        """Median seconds of one forward of `tokens` new tokens of one sequence after `context` others."""
        pages = array("i", self.pool.allocate(self.pool.pages_for(context + tokens)))
        span = Span([0] * tokens, context, pages, range(tokens))
        slots = slice(min(pages) * self.pool.page_size, (max(pages) + 1) * self.pool.page_size)
        for k, v in self.pool.kv:  # fresh memory may hold anything, and not-a-number is slow to compute with
            k[slots].zero_()
            v[slots].zero_()
        times = []
        try:
            for _ in range(repeats + 1):
                start = time.perf_counter()
                self.forward([span]).logits[-1, 0].item()  # reading one value waits for the device
                times.append(time.perf_counter() - start)
        finally:
            self.pool.release(pages)
        return float(np.median(times[1:]))
