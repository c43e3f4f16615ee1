"""Log-probabilities of given continuations: one prefill of what they share, then one pass over all of them.

Runs between the engine's steps, on pages under a lease. The shared part is read from the prefix tree as far as it is
known there and becomes known to it. Knows tokens only, not what they are scored for.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from forerun.core import SamplingParams
from forerun.engine.engine import Engine
from forerun.errors import BadRequest, OutOfPages
from forerun.llm import LLM
from forerun.models.execution.runner import Span
from forerun.runtime.lease import EngineLease


@dataclass(frozen=True)
class ContinuationScores:
    """Log-probabilities of the tokens of each continuation, and what they cost."""

    logprobs: list[list[float]]
    cached_tokens: int  # of the shared part, read from the prefix tree
    computed_tokens: int

    @property
    def totals(self) -> list[float]:
        return [sum(tokens) for tokens in self.logprobs]

    @property
    def means(self) -> list[float]:
        """Per token, so that short answers are not better for being short."""
        return [sum(tokens) / len(tokens) for tokens in self.logprobs]


def score_continuations(
    llm: LLM, prefix: str | Sequence[int], continuations: Sequence[str | Sequence[int]]
) -> ContinuationScores:
    """Log-probability of every token of every continuation after one prefix, under the model itself. Both are text or
    token ids; text is encoded piece by piece."""
    encode = llm.tokenizer.encode
    ids = encode(prefix, add_special=True) if isinstance(prefix, str) else prefix
    return score_each(llm, [(ids, [encode(c) if isinstance(c, str) else c for c in continuations])])[0]


def score_each(llm: LLM, pairs: Sequence[tuple[Sequence[int], Sequence[Sequence[int]]]]) -> list[ContinuationScores]:
    """The same for several prefixes; what they share is computed once, as far as the prefix cache is on."""
    for prefix, continuations in pairs:
        for i, continuation in enumerate(continuations):
            if not continuation:
                raise BadRequest(f"continuation {i} is empty", "give at least one token to score")
            llm.engine.intake.check([*prefix, *continuation], SamplingParams())
        llm.engine.intake.check(list(prefix), SamplingParams())

    with llm.driver.lease() as lease:
        return [_Scorer(llm.engine, lease, list(prefix)).run(continuations) for prefix, continuations in pairs]


@dataclass(eq=False)
class _Job:
    """One continuation. Prefix and continuation run without the last token: what follows that is not needed."""

    ids: list[int]
    last: int
    pages: array[int]
    done: int  # tokens that have K/V
    logprobs: list[float] = field(default_factory=list)


class _Scorer:
    """Continuations of one prefix. The prefix's whole pages are shared; the rest of it runs with each continuation."""

    def __init__(self, engine: Engine, lease: EngineLease, prefix: list[int]) -> None:
        self.engine, self.lease, self.prefix = engine, lease, prefix
        self.pool, self.chunk = engine.pool, engine.config.max_num_batched_tokens
        self.shared = (len(prefix) - 1) // self.pool.page_size * self.pool.page_size  # its last token runs: for logits
        self.stem = array("i")
        self.cached = self.computed = 0

    def run(self, continuations: Sequence[Sequence[int]]) -> ContinuationScores:
        jobs = [_Job([*self.prefix, *c[:-1]], c[-1], array("i"), self.shared) for c in continuations]
        self._prefill()
        with self.lease.exclusive():
            try:
                self._run_in_waves(jobs)
            finally:
                self._close(jobs)
                self.lease.pages.drop(self.stem)
        return ContinuationScores([job.logprobs for job in jobs], self.cached, self.computed)

    def _run_in_waves(self, jobs: list[_Job]) -> None:
        """As many continuations at once as there are pages for."""
        wave: list[_Job] = []
        for job in jobs:
            if not self._open(job):
                self._run(wave)
                self._close(wave)
                wave = []
                if not self._open(job):
                    raise self._too_large(len(job.ids))
            wave.append(job)
        self._run(wave)

    def _prefill(self) -> None:
        """Whole pages of the prefix: known ones, then computed ones, which become known."""
        ids = self.prefix[: self.shared]
        with self.lease.exclusive() as engine:
            self.stem = self.lease.hold_prefix(engine, ids)
            self.cached = len(self.stem) * self.pool.page_size
            if not self.lease.pages.extend(self.stem, self.shared):
                raise self._too_large(self.shared)
        self.lease.prefill(ids, self.stem, self.cached)
        self.computed = self.shared - self.cached

    def _open(self, job: _Job) -> bool:
        job.pages = self.lease.pages.hold(self.stem)
        if self.lease.pages.extend(job.pages, len(job.ids)):
            return True
        self._close([job])
        return False

    def _close(self, jobs: list[_Job]) -> None:
        for job in jobs:
            self.lease.pages.drop(job.pages)
            job.pages = array("i")

    def _run(self, jobs: list[_Job]) -> None:
        """Batches of up to a step's tokens until all continuations have run."""
        while any(job.done < len(job.ids) for job in jobs):
            room, spans, targets = self.chunk, [], []
            for job in jobs:
                ids = job.ids[job.done : job.done + room]
                if not ids:
                    continue
                want = range(max(0, len(self.prefix) - 1 - job.done), len(ids))
                spans.append(Span(ids, job.done, job.pages, want, prompt=True))
                following = [*job.ids, job.last]
                targets += [(job, following[job.done + w + 1]) for w in want]
                job.done += len(ids)
                room -= len(ids)
            self.computed += self.chunk - room
            self._record_logprobs(self.engine.runner.forward(spans).logits, targets)

    @staticmethod
    def _record_logprobs(logits: torch.Tensor, targets: list[tuple[_Job, int]]) -> None:
        if not targets:
            return
        tokens = torch.tensor([token for _, token in targets], device=logits.device)
        found = torch.log_softmax(logits.float(), -1).gather(1, tokens[:, None])[:, 0].tolist()  # [N]
        for (job, _), logprob in zip(targets, found, strict=True):
            job.logprobs.append(logprob)

    def _too_large(self, tokens: int) -> OutOfPages:
        problem = f"scoring {tokens} tokens needs {self.pool.pages_for(tokens)} pages, {self.pool.free} are free"
        return OutOfPages(problem, "ask again when fewer requests run, or raise kv_cache_tokens")
