"""Steps that run ahead of the host, drafted or not: what they take, what free drafters would give instead, what came.

The decision itself is the same as for any paid drafter (`Controller.plan_rounds`). Knows no device.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from forerun.core.drafted import rows_of
from forerun.decode.control.acceptance import Acceptance, RequestStats
from forerun.decode.control.cost import CostCurve
from forerun.decode.control.decision import Decision, DraftedBatch, EndedStep, PaidPlan
from forerun.decode.control.host import HostTime
from forerun.decode.control.selection import Selection, StepCosts


class OnDevice:
    """The controller's part for such steps."""

    target: CostCurve
    drafters: dict[str, CostCurve]
    acceptance: Acceptance
    host: HostTime
    decisions: deque[Decision]
    _ended: EndedStep | None
    _read_at: float | None
    _draft_s: float
    _gained: bool

    if TYPE_CHECKING:

        def _plain_s(self, sequences: int, context: int) -> float: ...

        def _costs(self, sequences: int, spent_s: float) -> StepCosts: ...

        def _selected(
            self, batch: DraftedBatch, costs: StepCosts, share: float = 1.0, doubt: bool = False
        ) -> Selection: ...

    def on_device_s(self, drafter: str, batch: DraftedBatch) -> float:
        """Seconds of a step: as measured, before that of both models' forwards."""
        sequences = len(batch.stats)
        count = sequences * rows_of(sequences)
        forwards_s = self.drafters[drafter].seconds(count, sequences, batch.context)
        return self.host.on_device(sequences, forwards_s + self.target.seconds(count, sequences, batch.context))

    def free_is_better(self, batch: DraftedBatch, plan: PaidPlan) -> bool:
        """Whether the host should have the free drafts of this batch verified, in place of steps on the device. Before
        the draft model has read, such a step may save that, and reading counts against the tokens surely to come. Later
        a lower bound has to pay for going back to the device, too, where the draft model reads what was accepted."""
        n, reading_s = len(batch.stats), sum(plan.start_s)
        found = self._selected(batch, self._costs(n, batch.spent_s), doubt=not reading_s)
        if found.size == n:
            return False
        tokens, seconds, rate = sum(found.gains), found.seconds, plan.rate
        if reading_s:
            surely = n * min(map(self.acceptance.expected_remaining, batch.stats))
            rate = surely / (surely / plan.rate + reading_s)
        else:
            seconds += self.drafters[plan.drafter].seconds(round(tokens), n, batch.context) + self.host.paid(n)
            for s, gain in zip(batch.stats, found.gains, strict=True):
                hoped = (gain - 1.0) / self.acceptance.gains.ratio(s.kind, s.gain, doubt=True)
                s.gain.beside = hoped if n + n * hoped > plan.rate * seconds else 0.0
        return tokens > rate * seconds

    def record_followed(self, stats: RequestStats, tokens: int) -> None:
        """Free drafts that were not verified, as steps on the device went on, had so many tokens right."""
        self.acceptance.gains.record_followed(stats.kind, stats.gain, tokens)

    def observe_on_device(
        self, stats: list[RequestStats], plan: PaidPlan, context: int, seconds: float, first: bool
    ) -> None:
        """What a step took. The `first` of several also waited for what the draft model had to read."""
        n, plain_s = len(stats), self._plain_s(len(stats), context)
        if not first:
            self.host.observe_on_device(n, seconds)
        depth, rows, expected = max(plan.rounds, default=0), n * rows_of(n), plan.rate * seconds
        self.decisions.append(Decision(n, context, plan.drafter, depth, rows, expected, seconds, plain_s, plan.why))
        self._read_at, self._draft_s, self._gained = None, 0.0, True
        self._ended = EndedStep(seconds, seconds, plain_s, True, 0.0 if first or n > 1 else plan.rate)

    def record_single(self, batch: list[RequestStats]) -> None:
        """`record_tokens` of one token for each of many sequences, in a fraction of its time: the host is what a step
        of a large batch waits for."""
        wall_s, taken_s, plain_s, _, _ = self._ended or EndedStep(0.0, 0.0, 0.0, False, 0.0)
        for s in batch:
            if s.gain.open:
                self.acceptance.gains.record(s.kind, s.gain, 0)
            s.count_plain(wall_s, taken_s, plain_s)

    def record_on_device(self, stats: RequestStats, drafter: str, depth: int, accepted: int, tokens: int) -> None:
        """What a step gave one sequence: of so many drafted positions, the accepted ones, and all its tokens."""
        stats.own[drafter].asked = depth
        self.acceptance.record_path(stats, drafter, accepted, tokens)
