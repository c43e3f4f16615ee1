"""Drafted steps one ahead of the host: the next one is launched before the tokens of the last one are read.

For a few greedy sequences whose draft model drafts in one forward (`decode/device_drafting.py`: when that pays). The
device keeps what it chose and goes on from there, so that the host need only see to pages: as many as the step in
flight and the next one can fill. What it does with a step's tokens then overlaps the next step. An answer that turns
out to have ended has a step too many on its way, which writes behind its last entry and is dropped. Knows no text.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from forerun.core.drafted import DraftedStart, DraftedTokens, PendingDrafted, rows_of
from forerun.decode.control.controller import PaidPlan
from forerun.decode.device_drafting import DeviceDrafting
from forerun.decode.drafter_pool import DraftTask
from forerun.engine.scheduler import Scheduler
from forerun.engine.sequence import Phase, Sequence

RECENT_SHARE = 0.25  # of the last step in what one is expected to give


@dataclass(frozen=True)
class DraftedInFlight:
    """One step on its way."""

    sequences: list[Sequence]
    plan: PaidPlan
    pending: PendingDrafted
    launched: float
    first: bool  # of several

    @property
    def live(self) -> bool:
        return any(seq.phase is Phase.DECODING for seq in self.sequences)


class DraftAhead:
    """`append`: makes a step's tokens part of an answer; `fail`: ends one with an error. `max_length`: tokens that a
    prompt and its answer may have together."""

    def __init__(
        self,
        drafting: DeviceDrafting,
        scheduler: Scheduler,
        max_length: int,
        append: Callable[[Sequence, DraftedTokens], None],
        fail: Callable[[Sequence, Exception], None],
    ) -> None:
        self.drafting, self._scheduler, self._max_length = drafting, scheduler, max_length
        self._append, self._fail = append, fail
        self.in_flight: DraftedInFlight | None = None
        self._goes_on: PaidPlan | None = None  # of the step after the next one
        self._last_read, self._tokens = 0.0, 1.0  # when the last step was read; tokens of a step, of late

    def begin(self, sequences: list[Sequence], plan: PaidPlan) -> bool:
        """Launch the first step; False, and nothing happens but that the draft model may have read, where it is not yet
        possible."""
        tasks, device = self._tasks(sequences), self.drafting.device
        if device is None or not all(self._has_room(seq, len(sequences), 0) for seq in sequences):
            self.drafting.pause(tasks)
            return False
        start = time.perf_counter()
        unread = self.drafting.read_up(tasks, plan)
        if unread is None:
            return False
        starts = [DraftedStart(len(s.tokens), left, s.pages) for s, left in zip(sequences, unread, strict=True)]
        device.begin(starts, self.drafting.depth, min(seq.params.speculation.nodes for seq in sequences))
        self.in_flight = DraftedInFlight(sequences, plan, device.launch(), start, True)
        self._goes_on = plan
        return True

    def step(self) -> bool:
        """Launch the step after the one on its way, read that one's tokens and do what is to be done with them; False
        where none is."""
        step, self.in_flight = self.in_flight, None
        if step is None or not step.live:
            return False
        following = self._follow(step, in_flight=1)
        results, now = step.pending.read(), time.perf_counter()
        seconds, self._last_read = now - max(step.launched, self._last_read), now
        rows = [pair for pair in zip(step.sequences, results, strict=True) if pair[0].phase is Phase.DECODING]
        self.drafting.observe(self._tasks([seq for seq, _ in rows]), step.plan, seconds, step.first)
        for seq, result in rows:
            seq.usage.verify_s += seconds
            self._tokens += RECENT_SHARE * (len(result.tokens) - self._tokens)
            try:
                self._append(seq, result)
            except Exception as error:  # of this sequence alone
                self._fail(seq, error)
        following = following or self._follow(step, in_flight=0)
        if following is not None and following.live:
            self.in_flight = following
            live = all(seq.phase is Phase.DECODING for seq in following.sequences)
            self._goes_on = self.drafting.goes_on(self._tasks(following.sequences)) if live else None
        return True

    def _follow(self, step: DraftedInFlight, in_flight: int) -> DraftedInFlight | None:
        """Launch the next step beside so many; None where something else has to be decided first."""
        plan, device, sequences = self._goes_on, self.drafting.device, step.sequences
        alone = not self._scheduler.waiting and len(self._scheduler.running) == len(sequences)
        if plan is None or device is None or not alone:
            return None
        pages = sum(len(seq.pages) for seq in sequences)
        if not all(seq.phase is Phase.DECODING and self._has_room(seq, len(sequences), in_flight) for seq in sequences):
            return None
        if sum(len(seq.pages) for seq in sequences) > pages:
            device.send_pages([seq.pages for seq in sequences])
        return DraftedInFlight(sequences, plan, device.launch(), time.perf_counter(), False)

    def _has_room(self, seq: Sequence, sequences: int, in_flight: int) -> bool:
        """Whether another step has pages beside those in flight, and these are not expected to end the answer."""
        entries, left = (1 + in_flight) * rows_of(sequences), seq.params.max_tokens - seq.num_sampled
        if left <= in_flight * self._tokens or len(seq.tokens) + entries >= self._max_length:
            return False
        return self._scheduler.reserve(seq, entries) >= entries

    def _tasks(self, sequences: list[Sequence]) -> list[DraftTask]:
        tasks = []
        for seq in sequences:
            assert seq.spec_state is not None
            left = min(seq.params.max_tokens - seq.num_sampled, self._max_length - len(seq.tokens)) - 1
            tasks.append(DraftTask(seq.spec_state, seq.pages, max(0, min(left, seq.params.speculation.nodes))))
        return tasks
