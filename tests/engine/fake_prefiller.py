"""A prefiller for engine tests: writes K/V of known quality in a few units of work, without maps or profiles."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from forerun.decode.draft_context import DraftContext
from forerun.errors import BadRequest, ForerunError
from forerun.models.execution.runner import Span
from forerun.params import Prefill
from forerun.prefill.state import Job, Phase

TAIL = 8
UNIT = 24  # tokens a unit of work drafts


class FakePrefiller:
    """`bad`: how far drafted K/V is from the truth. `exact_from`: give up and leave it to exact prefill once so many
    tokens are drafted. `fails_at`: raise then. `ahead`: run the tail, too, as a device does in its own pass."""

    def __init__(
        self,
        ctx: DraftContext,
        bad: float = 0.0,
        exact_from: int | None = None,
        fails_at: int | None = None,
        ahead: bool = False,
    ) -> None:
        self.ahead = ahead
        self.runner, self.bad, self.exact_from, self.fails_at = ctx.runner, bad, exact_from, fails_at
        self.open_jobs: dict[int, Job] = {}
        self.opened: list[Job] = []
        self.generator = torch.Generator().manual_seed(1)

    def problem(self, settings: Prefill, num_tokens: int) -> ForerunError | None:
        if settings.source == "impossible":
            return BadRequest("the source of prefill is 'impossible'", "use another")
        return None

    def source(self, settings: Prefill) -> object:
        return self

    def key(self, settings: Prefill) -> str:
        return f"fake {settings.source}"

    def open(
        self,
        seq_id: int,
        tokens: Sequence[int],
        pages: array[int],
        first: int,
        settings: Prefill,
        known: int = 0,
        depths: np.ndarray | None = None,
    ) -> Job:
        job = Job(seq_id, tokens, pages, first, max(first, len(tokens) - TAIL), settings, len(self.runner.kv))
        if depths is not None:
            job.known = min(known, job.end)
            job.depths[first : job.known] = depths[first : job.known]
        job.read = max(first, job.known)
        if len(tokens) - first < 2 * TAIL:
            job.phase, job.report.fell_back = Phase.EXACT, "too short"
        self.open_jobs[seq_id] = job
        self.opened.append(job)
        return job

    def advance(self, job: Job, budget: int) -> int:
        assert not job.finished and budget >= 1 and job.id in self.open_jobs
        count = min(UNIT, budget, job.end - job.read)
        if count:
            self._write(job, count)
        done = job.read - job.first
        if self.fails_at is not None and done >= self.fails_at:
            raise BadRequest("the source failed", "use another")
        if self.exact_from is not None and done >= self.exact_from:
            job.phase, job.report.fell_back = Phase.EXACT, "checks failed"
        elif job.read >= job.end:
            job.phase = Phase.DONE
            job.report.drafted = job.end - job.first
            if self.ahead:
                tail = job.ids[job.end :].tolist()
                out = self.runner.forward([Span(tail, job.end, job.pages, range(len(tail) - 1, len(tail)))])
                job.filled, job.logits = len(job.tokens) - 1, out.logits.clone()
        return max(1, count)

    def _write(self, job: Job, count: int) -> None:
        """The true K/V, then noise on it."""
        lo, hi, size = job.read, job.read + count, self.runner.pool.page_size
        self.runner.forward([Span(job.ids[lo:hi].tolist(), lo, job.pages, ())])
        if self.bad:
            slots = torch.tensor([job.pages[e // size] * size + e % size for e in range(lo, hi)])
            for layer in self.runner.kv:
                for cache in layer:
                    cache[slots] += self.bad * torch.randn(cache[slots].shape, generator=self.generator)
        job.read = hi
        job.depths[lo:hi] = 1

    def close(self, job: Job) -> None:
        del self.open_jobs[job.id]


def fake(**values: Any) -> Any:
    """What an engine takes as `prefiller`."""
    return lambda ctx: FakePrefiller(ctx, **values)
