"""Whether a step drafts at all. Knows step times and token counts, nothing else.

`Governor` times batches with and without drafts in alternation. The controller's estimates leave out what it cannot
see, such as the host's own time around a device: for one sequence that is little, for many it adds up, and only the
clock shows it. `EmptyDraftBackoff` pauses after attempts that gave no draft.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

TIMED_STEPS = 6  # of each kind in a comparison
FIRST_PAUSE_STEPS = 64  # plain steps after drafting lost a comparison; doubled with every further loss
MAX_PAUSE_STEPS = 4096
SEQS_PER_FIRST_PAUSE = 4  # the first pause is taken once per this many sequences: large batches rarely gain
TRUSTED_STEPS = 256  # drafting steps after it won, before plain ones are timed again
MAX_STEP_OVER_MEDIAN = 2.0  # a step counts as no longer than this: one hiccup must not decide a comparison
CLEARLY_SLOWER_RATIO = 0.8  # of the plain rate: drafting below it loses without the rest of the comparison,
MIN_COMPARED_STEPS = 2  # after this many steps
MAX_EMPTY_TIME_SHARE = 0.02  # of decoding time that attempts without a draft may take
EMPTY_STEPS_BEFORE_PAUSE = 4  # in a row; one sequence alone often has a short gap between two drafts
LARGE_BATCH_SEQS = 16  # from here one empty step is enough: that many sequences without a draft are no coincidence
MAX_EMPTY_PAUSE_STEPS = 64  # so that text that becomes predictable is noticed


@dataclass
class StepRate:
    """Tokens per second over some steps."""

    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def add(self, tokens: int, seconds: float) -> None:
        self.tokens.append(tokens)
        self.seconds.append(seconds)

    @property
    def full(self) -> bool:
        return len(self.tokens) >= TIMED_STEPS

    def value(self) -> float:
        limit = MAX_STEP_OVER_MEDIAN * statistics.median(self.seconds)
        return sum(self.tokens) / max(1e-9, sum(min(s, limit) for s in self.seconds))


@dataclass
class _BatchSize:
    """What is known about batches of about one size."""

    first_pause: int
    pause: int  # plain steps after the next loss
    plain: StepRate = field(default_factory=StepRate)
    drafted: StepRate = field(default_factory=StepRate)
    drafting: bool = False  # the kind of step that runs, and is timed, now
    untimed_steps: int = 0  # left until the next comparison

    @property
    def clearly_slower(self) -> bool:
        enough = len(self.drafted.tokens) >= MIN_COMPARED_STEPS
        return enough and self.drafted.value() < CLEARLY_SLOWER_RATIO * self.plain.value()

    def next_phase(self) -> None:
        """After the plain half of a comparison time drafting; after both, go on with the faster kind."""
        if not self.drafting:
            self.drafting = True
            return
        if self.drafted.value() >= self.plain.value():
            self.untimed_steps, self.pause = TRUSTED_STEPS, self.first_pause
        else:
            self.drafting, self.untimed_steps = False, self.pause
            self.pause = min(MAX_PAUSE_STEPS, 2 * self.pause)
        self.plain, self.drafted = StepRate(), StepRate()


class Governor:
    """Asked once before every step. One sequence alone always may: the controller's estimates suffice for it."""

    def __init__(self) -> None:
        self._sizes: dict[int, _BatchSize] = {}
        self._last: tuple[int, float, bool] | None = None  # sequences, when their step began, whether it drafted

    def should_draft(self, sequences: int, tokens: int, now: float) -> bool:
        """Whether the coming step of so many sequences may draft; the step before it gave `tokens`, until `now`."""
        if sequences < 2:
            self._last = None
            return True
        if sequences.bit_length() not in self._sizes:
            pause = FIRST_PAUSE_STEPS * max(1, sequences // SEQS_PER_FIRST_PAUSE)
            self._sizes[sequences.bit_length()] = _BatchSize(pause, pause)
        size = self._sizes[sequences.bit_length()]
        if self._last is not None and self._last[0] == sequences:
            self._record_step(size, tokens, now - self._last[1], self._last[2])
        self._last = sequences, now, size.drafting
        return size.drafting

    @staticmethod
    def _record_step(size: _BatchSize, tokens: int, seconds: float, drafted: bool) -> None:
        if size.untimed_steps:
            size.untimed_steps -= 1
            if size.untimed_steps == 0:
                size.drafting = False  # a comparison starts with plain steps
            return
        if drafted != size.drafting:
            return
        rate = size.drafted if drafted else size.plain
        rate.add(tokens, seconds)
        if rate.full or (drafted and size.clearly_slower):
            size.next_phase()


class EmptyDraftBackoff:
    """Skips steps after drafting attempts that drafted nothing: running the drafters takes host time even then."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """After a new request: it may be more predictable than those before."""
        self._empty_steps, self._pause_steps = 0, 0

    def should_skip(self) -> bool:
        """Whether the coming step skips drafting. Called once a step."""
        self._pause_steps -= self._pause_steps > 0
        return self._pause_steps > 0

    def record(self, sequences: int, drafted: bool, draft_s: float, plain_s: float) -> None:
        """What an attempt gave and took; `plain_s` is a plain step of as many sequences."""
        self._empty_steps = 0 if drafted else self._empty_steps + 1
        if self._empty_steps >= (EMPTY_STEPS_BEFORE_PAUSE if sequences < LARGE_BATCH_SEQS else 1):
            self._pause_steps = min(MAX_EMPTY_PAUSE_STEPS, int(draft_s / plain_s / MAX_EMPTY_TIME_SHARE))
