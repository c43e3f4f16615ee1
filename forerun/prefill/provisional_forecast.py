"""How many words of a provisional answer are shown, if any: by the share of those shown before that stood.

Where few stand, fewer are shown, and then none. Knows numbers only: neither prompts nor models.
"""

from __future__ import annotations

from dataclasses import dataclass

DECAY_PER_SKIP = 0.005  # of what was learnt to be bad: such prompts are tried again after a hundred and more
MIN_STANDING_SHARE = 0.35  # of shown tokens: where fewer are expected to stand, a provisional answer is not begun
PRIOR_STANDING = {"chunk": 0.65}  # before any was shown: edited prompts, 54 of 80 and 78 of 102; others by the curve
PRIOR_ANSWERS, PRIOR_SHOWN = 2, 24  # what the prior counts as: answers, and tokens of each
SHOWN_PER_STANDING = 1.5  # tokens that are shown for each that stood on average
MIN_SHOWN, MAX_SHOWN = 4, 64  # tokens of a provisional answer


@dataclass
class _Standing:
    """Provisional answers of one source: how many there were, and tokens that were shown and that stood."""

    answers: float = 0.0
    shown: float = 0.0
    stood: float = 0.0

    def scale(self, factor: float) -> None:
        self.answers, self.shown, self.stood = (factor * value for value in (self.answers, self.shown, self.stood))

    def add(self, weight: float, share: float) -> None:
        """Count the prior, of which this share stands, with this weight."""
        self.answers += weight * PRIOR_ANSWERS
        self.shown += weight * PRIOR_ANSWERS * PRIOR_SHOWN
        self.stood += weight * PRIOR_ANSWERS * PRIOR_SHOWN * share


class ProvisionalForecast:
    """What is expected of provisional answers, by source."""

    def __init__(self) -> None:
        self._standing: dict[str, _Standing] = {}

    def why_not_provisional(self, source: str, top1: float) -> str:
        """Why words should not be shown from K/V that this source drafts, with this agreement by the profile's curve;
        empty: enough of them will stand."""
        record = self._standing_of(source, top1)
        if record.stood >= MIN_STANDING_SHARE * record.shown:
            return ""
        share, prior = record.stood / record.shown, self._prior_standing(source, top1)
        record.scale(1.0 - DECAY_PER_SKIP)
        record.add(DECAY_PER_SKIP, prior)
        least = MIN_STANDING_SHARE
        return f"of the words shown from {source!r} drafts {share:.2f} are expected to stand, the least is {least}"

    def max_shown(self, source: str, top1: float) -> int:
        """Tokens of a provisional answer that are shown at most."""
        record = self._standing_of(source, top1)
        return max(MIN_SHOWN, min(MAX_SHOWN, round(SHOWN_PER_STANDING * record.stood / record.answers) + 2))

    def record_provisional(self, source: str, top1: float, shown: int, stood: int) -> None:
        record = self._standing_of(source, top1)
        record.scale(0.9)  # the last ten answers count most
        record.answers, record.shown, record.stood = record.answers + 1, record.shown + shown, record.stood + stood

    def _standing_of(self, source: str, top1: float) -> _Standing:
        if source not in self._standing:
            self._standing[source] = _Standing()
            self._standing[source].add(1.0, self._prior_standing(source, top1))
        return self._standing[source]

    @staticmethod
    def _prior_standing(source: str, top1: float) -> float:
        """By the curve: the mean share of PRIOR_SHOWN tokens before the first that differs."""
        return PRIOR_STANDING.get(source) or sum(top1**n for n in range(1, PRIOR_SHOWN + 1)) / PRIOR_SHOWN
