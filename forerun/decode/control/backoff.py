"""Skipping steps after drafting attempts that drafted nothing.

Running the drafters takes host time even where none of them proposes a token. Knows step times and empty steps only.
"""

from __future__ import annotations

MAX_EMPTY_TIME_SHARE = 0.02  # of decoding time that attempts without a draft may take
EMPTY_STEPS_BEFORE_PAUSE = 4  # in a row; one sequence alone often has a short gap between two drafts
LARGE_BATCH_SEQS = 16  # from here one empty step is enough: that many sequences without a draft are no coincidence
MAX_PAUSE_STEPS = 64  # so that text that becomes predictable is noticed


class EmptyDraftBackoff:
    """Counts steps without a draft, and the steps to skip after them."""

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
            self._pause_steps = min(MAX_PAUSE_STEPS, int(draft_s / plain_s / MAX_EMPTY_TIME_SHARE))
