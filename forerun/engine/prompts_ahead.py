"""Steps with prompts one ahead of the host: the next one is launched before the first tokens of the last one are read.

Which prompts run next, and on which pages, follows from their lengths, not from what was sampled. So a prompt counts as
computed once it is launched, and a sequence whose first token is on its way has nothing left to run: it sits out the
step that is scheduled meanwhile, and decodes from the one after. Rows that decode beside prompts are launched before
these and read while they run. A sequence that is cancelled or preempted meanwhile leaves a token that is dropped; a
preempted one samples the same again. Steps that need the host (drafts, grammars, penalties, log-probabilities, drafted
prompts) and those beside streams, whose gaps are bounded, run as usual. Knows no text and no events.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from forerun.core import Verdict
from forerun.decode.sampling import sync_free
from forerun.decode.verify import StepOutput
from forerun.engine.run_ahead import RunAhead, chooser, decodes_plainly
from forerun.engine.scheduler import Scheduler
from forerun.engine.sequence import Phase, ScheduledSequence
from forerun.models.execution.runner import Runner

if TYPE_CHECKING:
    from forerun.models.cuda.pending import PendingTokens

_NOTHING_ACCEPTED = Verdict([], -1)


@dataclass(frozen=True)
class PromptsInFlight:
    """The prompts that end in a step on its way, and the first tokens of their answers."""

    ended: list[ScheduledSequence]
    pending: PendingTokens


def _launchable(scheduled: ScheduledSequence) -> bool:
    """Whether a step of this sequence needs nothing of the host until its token is read."""
    seq, prompt = scheduled.seq, len(scheduled.seq.request.prompt_ids)
    if scheduled.decodes:
        return decodes_plainly(scheduled)
    lone = seq.provisional is None and seq.final is None and seq.prefill is None
    plain = not seq.sampling_context.shaped and seq.params.logprobs is None and sync_free(seq.params)
    return lone and seq.computed + scheduled.count <= prompt and (plain or not scheduled.samples)


class PromptsAhead:
    """`computed`: records what a sequence has run; `add`: makes a token part of its answer."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        run_ahead: RunAhead,
        computed: Callable[[ScheduledSequence], None],
        add: Callable[[ScheduledSequence, StepOutput], None],
    ) -> None:
        self._runner, self._scheduler, self._run_ahead = runner, scheduler, run_ahead
        self._computed, self._add = computed, add
        self.in_flight: PromptsInFlight | None = None

    def settle(self) -> None:
        """Before a step is scheduled: read the tokens that it should know of, since no prompts are left to be launched
        first, or since the gap to a stream's next token has a bound."""
        scheduler, step = self._scheduler, self.in_flight
        prompts = bool(scheduler.waiting) or any(seq.remaining > 1 for seq in scheduler.running)
        if not prompts or (step is not None and any(s.seq.request.streamed for s in step.ended)):
            self.finish()

    def finish(self) -> None:
        """Read the first tokens that are on their way."""
        step, self.in_flight = self.in_flight, None
        if step is None:
            return
        for scheduled, token in zip(step.ended, step.pending.read(), strict=True):
            seq = scheduled.seq
            if seq.phase is Phase.DECODING and not seq.remaining:  # else it was cancelled or preempted
                self._add(scheduled, StepOutput(_NOTHING_ACCEPTED, [token]))

    def step(self, batch: list[ScheduledSequence]) -> bool:
        """Launch a batch with prompts, then read what the one before and its own rows gave; False: it runs as usual,
        and nothing is on its way any more."""
        rows = [s for s in batch if s.decodes]
        able = self._runner.launches_prompts and not self._scheduler.work.paced and len(rows) < len(batch)
        if not able or not all(_launchable(s) for s in batch):
            self.finish()
            return False
        decoding = self._run_ahead.begin(rows) if rows else None
        if rows and decoding is None:
            self.finish()
            return False
        following = self._launch([s for s in batch if not s.decodes])
        self.finish()
        self.in_flight = following
        for scheduled, token in zip(rows, decoding.pending.read() if decoding else (), strict=True):
            self._computed(scheduled)
            self._add(scheduled, StepOutput(_NOTHING_ACCEPTED, [token]))
        return True

    def _launch(self, prompts: list[ScheduledSequence]) -> PromptsInFlight:
        ended = [s for s in prompts if s.samples]
        logits = self._runner.forward([s.span for s in prompts]).logits  # [ended, V]
        lasts = np.array([len(s.seq.tokens) - 1 for s in ended], dtype=np.int64)
        pending = self._runner.choose_later(logits, chooser([s.seq for s in ended], lasts))
        for scheduled in prompts:
            self._computed(scheduled)
        return PromptsInFlight(ended, pending)
