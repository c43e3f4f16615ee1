"""Plain decoding one step ahead of the host: the next step is launched before the tokens of the last one are read.

For batches in which every sequence runs its last token, and the next one depends on its logits and on the random number
of its position alone: no draft, no grammar, no penalties, no log-probabilities. The next step needs to know no token,
since the device keeps what it chose; it needs the entries, which follow each other, and pages. What the host does with
a step's tokens (text, stop strings, events) then overlaps the next step. An answer that turns out to have ended has one
row too many on its way, which is dropped: it wrote behind the answer's last entry, and whatever gets that page next
writes later. Knows no text and no events.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from forerun.core import Draft
from forerun.decode.sampling import choose_by_number, sync_free, uniform
from forerun.decode.speculator import Speculator
from forerun.engine.pace import StepWork
from forerun.engine.scheduler import Scheduler
from forerun.engine.sequence import Phase, ScheduledSequence, Sequence
from forerun.models.execution.runner import Runner

if TYPE_CHECKING:
    from forerun.models.cuda.pending import PendingTokens

_NO_DRAFT = Draft()


@dataclass(frozen=True)
class StepInFlight:
    """One step on its way: a row for each sequence, at its entry."""

    sequences: list[Sequence]
    entries: np.ndarray  # [S] int64
    pages: list[np.ndarray]  # [S] page ids, int32
    pending: PendingTokens
    launched: float

    @property
    def live(self) -> bool:
        """Whether a sequence is left that has not ended."""
        return any(seq.phase is Phase.DECODING for seq in self.sequences)


def decodes_plainly(scheduled: ScheduledSequence) -> bool:
    """Whether a step of this sequence needs nothing of the host."""
    seq = scheduled.seq
    plain = not seq.sampling_context.shaped and seq.params.logprobs is None and sync_free(seq.params)
    lone = seq.provisional is None and seq.final is None and seq.ready_logits is None
    return scheduled.decodes and plain and lone and not len(scheduled.draft)


def chooser(sequences: list[Sequence], entries: np.ndarray) -> Callable[[Tensor, int], Tensor] | None:
    """What draws the tokens behind these entries from logits on the device; None where all are the likeliest."""
    params = [seq.params for seq in sequences]
    if all(p.greedy for p in params):
        return None
    numbers = [uniform(seq.seed, entry + 1) for seq, entry in zip(sequences, entries.tolist(), strict=True)]

    def choose(logits: Tensor, first: int) -> Tensor:
        rows = slice(first, first + len(logits))
        return choose_by_number(logits, params[rows], numbers[rows])

    return choose


def _may_admit(scheduler: Scheduler) -> bool:
    """Whether one that waits may begin in the coming step: not where all places are taken, unless a client that has
    fewer of them is given another's."""
    if not scheduler.waiting or len(scheduler.running) < scheduler.max_num_seqs:
        return bool(scheduler.waiting)
    client = scheduler.running[0].request.client.name
    others = itertools.chain(scheduler.running, scheduler.waiting)
    return any(seq.request.client.name != client or seq.final is not None for seq in others)


class RunAhead:
    """`max_length`: tokens that a prompt and its answer may have together. `stays_plain`: whether sequences are decoded
    without drafts in the coming step. `append`: makes a token part of an answer; `fail`: ends one with an error."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        speculator: Speculator,
        max_length: int,
        stays_plain: Callable[[list[Sequence]], bool],
        append: Callable[[Sequence, int], None],
        fail: Callable[[Sequence, Exception], None],
    ) -> None:
        self._runner, self._scheduler, self._max_length = runner, scheduler, max_length
        self._speculator, self._stays_plain, self._append, self._fail = speculator, stays_plain, append, fail
        self.in_flight: StepInFlight | None = None
        self._last_read = 0.0  # when the tokens of a step were read

    def start(self, batch: list[ScheduledSequence]) -> bool:
        """Launch a batch that has been scheduled, and the step after it; False: it runs as usual."""
        step = self.begin(batch)
        return step is not None and self._finish(step)

    def step(self) -> bool:
        """Go on from the step that is on its way; False where none is."""
        step, self.in_flight = self.in_flight, None
        return step is not None and step.live and self._finish(step)

    def _finish(self, step: StepInFlight) -> bool:
        """Launch the step after one that is on its way, then read that one's tokens and do what is to be done."""
        self.in_flight = self._follow(step)
        start = time.perf_counter()
        tokens, now = step.pending.read(), time.perf_counter()
        waited_s = now - start if step.launched < self._last_read else 0.0
        seconds, self._last_read = now - max(step.launched, self._last_read), now
        rows = [pair for pair in zip(step.sequences, tokens, strict=True) if pair[0].phase is Phase.DECODING]
        if states := [seq.spec_state for seq, _ in rows if seq.spec_state is not None]:
            longest = max(len(seq.tokens) for seq, _ in rows)
            self._speculator.observe([_NO_DRAFT] * len(rows), longest, seconds, waited_s)
            self._speculator.record_plain(states)
        self._scheduler.pacer.observe(StepWork(len(rows), 0, 0), 0, seconds)
        for seq, token in rows:
            seq.usage.verify_s += seconds
            try:
                self._append(seq, token)
            except Exception as error:  # of this sequence alone
                self._fail(seq, error)
        return True

    def begin(self, batch: list[ScheduledSequence]) -> StepInFlight | None:
        """Launch a batch that has been scheduled; None: it runs as usual."""
        if not self._runner.can_launch or not all(decodes_plainly(s) for s in batch):
            return None
        sequences = [s.seq for s in batch]
        tokens = np.array([seq.tokens[-1] for seq in sequences], dtype=np.int64)
        entries = np.array([seq.computed for seq in sequences], dtype=np.int64)
        pages = [self._pages(seq, entry) for seq, entry in zip(sequences, entries.tolist(), strict=True)]
        return self._launch(sequences, tokens, entries, pages)

    def _follow(self, step: StepInFlight) -> StepInFlight | None:
        """Launch the step after one that is on its way; None where something else has to be scheduled first."""
        scheduler = self._scheduler
        if _may_admit(scheduler) or self._runner.launches != step.pending.launch:
            return None
        rows = [row for row, seq in enumerate(step.sequences) if self._goes_on(seq)]
        sequences = [step.sequences[row] for row in rows]
        running = sum(seq.phase is Phase.DECODING for seq in step.sequences)
        if not sequences or running != len(scheduler.running) or not self._stays_plain(sequences):
            return None
        entries, pages = step.entries[rows] + 1, [step.pages[row] for row in rows]
        size, at = scheduler.pool.page_size, entries.tolist()
        crossing = [i for i, own in enumerate(pages) if at[i] >= len(own) * size]  # into a page that is new to it
        missing = [sequences[i] for i in crossing if at[i] >= len(sequences[i].pages) * size]
        if missing and not scheduler.make_room(len(missing)):
            return None
        for seq in missing:
            seq.pages.extend(scheduler.pool.allocate(1, after=seq.pages[-1]))
        for i in crossing:
            pages[i] = self._pages(sequences[i], at[i])
        return self._launch(sequences, -1 - np.array(rows, dtype=np.int64), entries, pages)

    def _pages(self, seq: Sequence, entry: int) -> np.ndarray:
        """Those up to this entry: what a draft has reserved beyond may be given back before the next step."""
        return np.array(seq.pages[: entry // self._scheduler.pool.page_size + 1], dtype=np.int32)

    def _goes_on(self, seq: Sequence) -> bool:
        """Whether this sequence has another token after the one that is on its way, unless that one ends it."""
        if seq.phase is not Phase.DECODING:
            return False
        size = len(seq.tokens)
        return size + 1 < min(seq.params.max_tokens + len(seq.request.prompt_ids), self._max_length)

    def _launch(
        self, sequences: list[Sequence], tokens: np.ndarray, entries: np.ndarray, pages: list[np.ndarray]
    ) -> StepInFlight | None:
        now = time.perf_counter()
        pending = self._runner.launch(tokens, entries, pages, chooser(sequences, entries))
        return None if pending is None else StepInFlight(sequences, entries, pages, pending, now)
