"""From scheduled work to logits: lays tokens out as a `TokenBatch` and runs the decoder on it.

Knows sequences' tokens and pages, not why they were chosen nor what becomes of the logits.
"""

from __future__ import annotations

import itertools
import time
from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from forerun.cache.pool import PagePool
from forerun.core import HostBatch
from forerun.engine.scheduler import Work
from forerun.models.decoder import Decoder, Output, Taps

if TYPE_CHECKING:
    from forerun.models.cuda.graphs import GraphRunner


@dataclass
class Span:
    """Tokens of one sequence that run now: its entries `first`, `first + 1`, ..., on its pages."""

    ids: list[int]
    first: int
    pages: array[int]
    want: Seq[int]  # which of the ids need logits

    @property
    def entries(self) -> range:
        return range(self.first, self.first + len(self.ids))

    def slots(self, page_size: int) -> list[int]:
        """Where the entries lie in the pool. Plain integers: most spans are one token, and numpy would cost more."""
        return [self.pages[e // page_size] * page_size + e % page_size for e in self.entries]

    @classmethod
    def of(cls, work: Work) -> Span:
        seq = work.seq
        ids = seq.tokens[seq.computed : seq.computed + work.count]
        return cls(ids, seq.computed, seq.pages, (work.count - 1,) if work.samples else ())


class Runner:
    """Runs batches on one decoder and one pool; on CUDA as captured graphs where one fits."""

    def __init__(self, decoder: Decoder, pool: PagePool, max_context: int) -> None:
        self.decoder, self.pool = decoder, pool
        self.graphs: GraphRunner | None = None
        if decoder.device.type == "cuda" and decoder.dtype == torch.bfloat16:
            from forerun.models.cuda.graphs import GraphRunner

            self.graphs = GraphRunner(decoder, pool.kv, max_context, pool.page_size)

    def run(self, work: list[Work]) -> Output:
        """Logits [N, V] of the works that sample, in their order."""
        return self.forward([Span.of(w) for w in work])

    def forward(self, spans: list[Span], taps: Taps | None = None) -> Output:
        batch = self.batch(spans)
        output = self.graphs.run(batch) if self.graphs is not None and taps is None else None
        return output or self.decoder.forward(batch.to(self.decoder.device), self.pool.kv, taps)

    def batch(self, spans: list[Span]) -> HostBatch:
        """Lay spans out one after the other."""
        starts = [0, *itertools.accumulate(len(span.ids) for span in spans)]
        return HostBatch(
            tokens=np.array([t for span in spans for t in span.ids], dtype=np.int64),
            entries=np.array([e for span in spans for e in span.entries], dtype=np.int64),
            slots=np.array([slot for span in spans for slot in span.slots(self.pool.page_size)], dtype=np.int64),
            starts=starts,
            contexts=[span.first + len(span.ids) for span in spans],
            pages=[np.frombuffer(span.pages, dtype=np.int32) for span in spans],
            page_size=self.pool.page_size,
            want=[start + w for start, span in zip(starts, spans, strict=False) for w in span.want],
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
        times = []
        try:
            for _ in range(repeats + 1):
                start = time.perf_counter()
                self.forward([span]).logits[-1, 0].item()  # reading one value waits for the device
                times.append(time.perf_counter() - start)
        finally:
            self.pool.release(pages)
        return float(np.median(times[1:]))
