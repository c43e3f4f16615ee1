"""The target recomputes chosen tokens of a drafted prompt, and a first look that does so before all is read.

Knows a job and what its rows cost; not how they were chosen.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from forerun.models.decoder import Watch
from forerun.models.runner import Runner
from forerun.prefill.checks import Checker, Scores
from forerun.prefill.depth import Rows, Staircase
from forerun.prefill.job import Job
from forerun.prefill.plan import Checkpoint, Costs, Policy


class Repair:
    def __init__(self, runner: Runner, policy: Policy) -> None:
        self._runner, self._policy, self._staircase = runner, policy, Staircase(runner)

    def run(self, job: Job, costs: Costs, entries: np.ndarray, checker: Checker | None) -> int:
        """As many of these entries, in order, as start in one layer; how many they were. Later ones see what earlier
        ones have become."""
        start, layers = time.perf_counter(), costs.start(entries)
        entries = entries[: int(np.argmax(layers != layers[0])) or None]
        x = None
        if layers[0]:
            assert job.x is not None
            x = job.x.index_select(0, torch.from_numpy(entries - job.first).to(job.x.device, non_blocking=True))
        rows = Rows(job.ids[entries], entries, job.pages, np.full(len(entries), job.layers), x=x, first=int(layers[0]))
        watch: Watch | None = None if checker is None else checker.watch(entries)
        self._staircase.run(rows, watch)
        job.depths[entries] = job.layers
        job.report.token_layers += costs.token_layers(entries)
        job.report.repair_s += time.perf_counter() - start
        return len(entries)

    def first_look(self, job: Job, costs: Costs, base: int) -> tuple[Scores, np.ndarray]:
        """One checkpoint at the end of what is read so far; its scores, and the entries that were recomputed for it."""
        size, end = self._policy.span, min(job.read, job.end)
        span = Checkpoint(end - size, size, job.first, end)
        sinks = np.arange(job.first, min(self._policy.first, job.end))  # what every token looks at must be right
        checker = Checker(self._runner, job.pages, [span], base, min(self._policy.first, job.end))
        entries = todo = np.union1d(sinks, span.entries)
        while len(todo):
            todo = todo[self.run(job, costs, todo, checker) :]
        return checker.scores(), entries
