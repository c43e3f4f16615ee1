"""What a step takes beside its forwards: the host's own time, measured by batch size, with drafts and without.

Drafting, merging, selecting, verifying, recording and streaming run in Python; beside a GPU's step of a millisecond
that is not little. Knows step times, nothing else.
"""

from __future__ import annotations

from collections import deque
from statistics import median

RECENT_STEPS = 15  # of each kind: their median counts, which a pause of the operating system does not move
DRAFTED_EXTRA_S = 80e-6  # of a sequence with a draft, before any was timed: merged, selected, verified, recorded


class HostTime:
    """Seconds of the host, by number of sequences (to a factor of two) and by whether the step had a draft."""

    def __init__(self) -> None:
        self._recent: dict[tuple[int, bool], deque[float]] = {}
        self._known: dict[tuple[int, bool], float] = {}  # medians

    def observe(self, sequences: int, drafted: bool, seconds: float) -> None:
        key = sequences.bit_length(), drafted
        recent = self._recent.setdefault(key, deque(maxlen=RECENT_STEPS))
        recent.append(max(0.0, seconds))
        self._known[key] = median(recent)

    def timed(self, sequences: int) -> bool:
        """Whether a plain step of about so many sequences was timed."""
        return (sequences.bit_length(), False) in self._known

    def seconds(self, sequences: int, drafted: bool) -> float:
        """Of a step; one with a draft that was not timed takes as long as a plain one, and what a draft adds."""
        size = sequences.bit_length()
        plain_s = self._known.get((size, False), 0.0)
        return self._known.get((size, True), plain_s + DRAFTED_EXTRA_S * sequences) if drafted else plain_s
