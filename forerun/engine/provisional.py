"""Provisional answers: tokens emitted from drafted K/V while the exact prompt is still being computed.

A provisional sequence is scheduled like any other; here is what differs: its tokens go to the reader as provisional,
and once the final sequence's prompt is computed they become that sequence's draft, in the forward that ends its prefill
or in those that come next. They stand only as far as they are what the final sequence would have sampled itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from forerun.core import Draft, Verdict
from forerun.decode.verify import StepOutput
from forerun.engine.sequence import Event, ScheduledSequence, Sequence
from forerun.errors import ForerunError

if TYPE_CHECKING:
    from forerun.engine.scheduler import Scheduler
    from forerun.models.execution.runner import Runner

MAX_PROVISIONAL_TOKENS = 64  # of an answer whose source has shown nothing yet: more are likely to be retracted
NAME = "provisional"  # the drafter of these tokens, in usage
# Log-odds that a token stands, for each root of the expected KL by which its logit is above the next best one: fitted
# to 25 answers over copied K/V, 0.9 by 25 of other texts. Of 874 tokens with a margin of 0.5 and more none fell
ODDS_PER_DEVIATION = 1.0
# Least chance that all tokens so far stand, below which no more are shown: by the same 25 answers 433 of 523 shown
# tokens stand, 499 of 980 without it; of the other 25 532 of 624 and 561 of 978 (docs/results.md)
MIN_STANDING = 0.4


@dataclass(eq=False)
class ProvisionalAnswer:
    """Tokens of one answer that were shown already; none is added once the answer has begun."""

    tokens: list[int] = field(default_factory=list)
    confirmed: int = 0  # tokens at the beginning that are part of the answer
    verified: bool = False  # none is open: all of them stand, or the others were retracted
    seq: Sequence | None = None  # that emits them; None once it has ended
    max_tokens: int = MAX_PROVISIONAL_TOKENS  # that are shown
    kl: float | None = None  # of its tokens' distributions to exact prefill's, as it is expected; None: not known
    standing: float = 1.0  # how likely all that were shown stand, by how sure each of them was

    @property
    def awaited(self) -> bool:
        """Whether its first token is still to come: it must not wait for the final sequence's prefill."""
        return self.seq is not None and not self.seq.num_generated

    @property
    def open(self) -> list[int]:
        """Tokens that are neither confirmed nor retracted."""
        return [] if self.verified else self.tokens[self.confirmed :]

    def sure(self, margins: list[float]) -> int:
        """How many of the next tokens are likely enough to stand with all before them; each margin says by how much a
        token's logit is above the next best one. The others are held back, and so is what would follow."""
        if not self.kl:
            return len(margins)
        for number, margin in enumerate(margins):
            odds = ODDS_PER_DEVIATION * margin / math.sqrt(self.kl)
            self.standing /= 1.0 + math.exp(-odds)
            if self.standing < MIN_STANDING:
                self.max_tokens = len(self.tokens) + number
                return number
        return len(margins)

    def draft(self, room: int) -> Draft:
        tokens = self.open[: max(0, room)]
        return Draft.chain(tokens, [1.0] * len(tokens), NAME)

    def verify(self, answer: list[int], last: bool = True) -> tuple[int, int]:
        """How many of the open tokens stand, now that the final answer continues like this, and how many are retracted:
        none before the first wrong one, or the `last` of what can be compared."""
        left = self.open
        pairs = zip(left, answer, strict=False)
        stand = next((i for i, (shown, token) in enumerate(pairs) if shown != token), min(len(left), len(answer)))
        self.confirmed += stand
        self.verified = last or stand < len(answer) or stand == len(left)
        return stand, len(left) - stand if self.verified else 0


def hold_doubted(batch: list[ScheduledSequence], outputs: list[StepOutput]) -> list[StepOutput]:
    """The outputs of a step without provisional tokens that are unlikely to stand. A sequence that shows nothing more
    ends, as by an error, of which its reader learns nothing."""
    for number, (scheduled, output) in enumerate(zip((s for s in batch if s.samples), outputs, strict=True)):
        final = scheduled.seq.final
        if final is None or final.provisional is None or not output.margins:
            continue
        count = final.provisional.sure(output.margins)
        if count == len(output.margins):
            continue
        tokens, verdict = output.tokens[:count], Verdict(output.verdict.path[: max(0, count - 1)], output.tokens[0])
        if not count:
            outputs[number] = StepOutput(verdict, [], error=ForerunError("no more tokens are sure enough", "wait"))
        else:
            outputs[number] = StepOutput(verdict, tokens, output.logprobs[:count])
    return outputs


def emit_provisional(seq: Sequence, event: Event, scheduler: Scheduler, ends: bool) -> None:
    """Tokens of a provisional sequence are shown, but may be retracted. It ends where the answer would end, or where it
    has gone on for long."""
    final = seq.final
    assert final is not None and final.provisional is not None
    if not final.provisional.tokens:
        final.usage.provisional_s = seq.usage.ttft_s
    final.provisional.tokens += event.token_ids
    final.usage.provisional += len(event.token_ids)
    event.provisional = True
    if ends or len(final.provisional.tokens) >= final.provisional.max_tokens:
        scheduler.end_provisional(seq)
    elif final.running:
        final.enter_next()  # it was held for the first of them


def draft_provisional(
    batch: list[ScheduledSequence], scheduler: Scheduler, runner: Runner, max_nodes: Callable[[Sequence], int]
) -> list[ScheduledSequence]:
    """Where a prompt is computed at last, its provisional sequence ends, and its tokens become the draft: of the same
    forward, or, where only forwards of so many rows give the tokens that decoding gives, of the next ones, a piece at a
    time. Returns the batch without the sequences that ended."""
    verifying = [s for s in batch if s.verifies_provisional]
    for scheduled in verifying:
        provisional = scheduled.seq.provisional
        if provisional is not None and provisional.seq is not None:
            scheduler.end_provisional(provisional.seq)
    batch = [s for s in batch if s.seq.running]
    rows = runner.decoding_rows
    if rows is not None:
        verifying = [s for s in verifying if s.decodes]
        beside = sum(s.count for s in batch if not s.isolated and runner.joins_decoding(s.count, s.in_prompt))
        rows = max(0, rows - beside) // max(1, len(verifying))
    for scheduled in verifying:
        provisional = scheduled.seq.provisional
        assert provisional is not None
        useful = min(max_nodes(scheduled.seq), len(provisional.open))
        nodes = scheduler.reserve(scheduled.seq, useful if rows is None else min(useful, rows))
        scheduled.draft = provisional.draft(nodes)
    return batch
