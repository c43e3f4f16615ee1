"""Whether a batch is better off guessing at all, by the clock: tokens a second with and without, measured in turns.

The controller's estimates leave out what it cannot see, such as the host's own time around a device. For one sequence
that is little; for many it adds up, and then only the clock knows. Knows step times and token counts, nothing else.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

COMPARED = 6  # steps of each kind in a comparison
FIRST_REST, LONGEST_REST = 64, 4096  # plain steps after guessing lost; twice as many each time
CROWD = 4  # sequences for which that is so; the more there are, the less a trial promises
GO = 256  # steps after it won, before plain ones are timed again
SPIKE = 2.0  # a step that took so many times the median counts as no more than that
HOPELESS, LOOKED = 0.8, 2  # where guessing is so much slower after so many steps, the comparison is over


@dataclass
class Rate:
    """Tokens a second over some steps."""

    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def add(self, tokens: int, seconds: float) -> None:
        self.tokens.append(tokens)
        self.seconds.append(seconds)

    @property
    def full(self) -> bool:
        return len(self.tokens) >= COMPARED

    def value(self) -> float:
        most = SPIKE * statistics.median(self.seconds)
        return sum(self.tokens) / max(1e-9, sum(min(s, most) for s in self.seconds))


@dataclass
class _Size:
    """What is known about batches of about one size."""

    plain: Rate = field(default_factory=Rate)
    guessed: Rate = field(default_factory=Rate)
    spec_state: bool = False  # what is being timed now
    left: int = 0  # steps to go on without timing
    first_rest: int = FIRST_REST
    rest: int = FIRST_REST

    @property
    def hopeless(self) -> bool:
        return len(self.guessed.tokens) >= LOOKED and self.guessed.value() < HOPELESS * self.plain.value()

    def next(self) -> None:
        """After a comparison's half: time the other kind, or decide."""
        if not self.spec_state:
            self.spec_state = True
        elif self.guessed.value() >= self.plain.value():
            self.spec_state, self.left, self.rest = True, GO, self.first_rest
            self.plain, self.guessed = Rate(), Rate()
        else:
            self.spec_state, self.left = False, self.rest
            self.rest = min(LONGEST_REST, 2 * self.rest)
            self.plain, self.guessed = Rate(), Rate()


class Governor:
    """To be asked once before every step; one sequence alone is the controller's business."""

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}
        self._last: tuple[int, float, bool] | None = None  # sequences, when their step began, whether it guessed

    def allows(self, sequences: int, tokens: int, now: float) -> bool:
        """Whether the coming step of so many sequences may guess; the step before it gave `tokens`, until `now`."""
        if sequences < 2:
            self._last = None
            return True
        if sequences.bit_length() not in self._sizes:
            rest = FIRST_REST * max(1, sequences // CROWD)
            self._sizes[sequences.bit_length()] = _Size(first_rest=rest, rest=rest)
        size = self._sizes[sequences.bit_length()]
        if self._last is not None and self._last[0] == sequences:
            self._book(size, tokens, now - self._last[1], self._last[2])
        guesses = size.spec_state
        self._last = sequences, now, guesses
        return guesses

    @staticmethod
    def _book(size: _Size, tokens: int, seconds: float, guessed: bool) -> None:
        if size.left:
            size.left -= 1
            if size.left == 0:
                size.spec_state = False  # plain steps are timed first
            return
        if guessed != size.spec_state:
            return
        rate = size.guessed if guessed else size.plain
        rate.add(tokens, seconds)
        if rate.full or (guessed and size.hopeless):
            size.next()
