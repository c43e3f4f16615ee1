"""What a step takes beside its forwards: the host's own time, measured by batch size and by what the step did.

Drafting, merging, selecting, verifying, recording and streaming run in Python; beside a GPU's step of a millisecond
that is not little. Where steps are launched ahead of the host a plain step hides it, and a step with a draft does not.
Knows step times, nothing else.
"""

from __future__ import annotations

from collections import deque
from statistics import median

RECENT_STEPS = 15  # of each kind: their median counts, which a pause of the operating system does not move
DRAFTED_EXTRA_S = 80e-6  # of a sequence with a draft, before any was timed: merged, selected, verified, recorded
# Of a sequence that a paid drafter drafts for, before any was timed: planned, grown, merged, selected. One step later
# it is known (0.3 to 0.5 ms beside an H200), and a first step that is not taken never is
PAID_EXTRA_S = 50e-6
ON_DEVICE_EXTRA_S = 50e-6  # of a drafted step without the host, beside its forwards, before any was timed
MAX_IDLE_SHARE = 0.5  # of the host's idle time beside a step in flight that drafters may use: steps vary
MIN_IDLE_S = 50e-6  # about one run of a free drafter


class HostTime:
    """Seconds of the host, by number of sequences (to a factor of two)."""

    def __init__(self) -> None:
        self._recent: dict[tuple[int, str], deque[float]] = {}
        self._known: dict[tuple[int, str], float] = {}  # medians
        self._asked: set[int] = set()  # sizes of batches of which a plain step was asked for

    def observe(self, sequences: int, drafted: bool, seconds: float) -> None:
        """Of a step that was not launched ahead: what it took beside drafting and its forward."""
        self._count(sequences, "drafted" if drafted else "plain", seconds)

    def observe_paid(self, sequences: int, seconds: float) -> None:
        """Of a step with a paid drafter: what drafting took beside its forwards and what came before it."""
        self._count(sequences, "paid", seconds)

    def observe_ahead(self, sequences: int, busy_s: float, idle_s: float) -> None:
        """Of the host beside a step that was launched ahead."""
        self._count(sequences, "hidden", busy_s)
        self._count(sequences, "idle", idle_s)

    def observe_on_device(self, sequences: int, seconds: float) -> None:
        """Of a step that drafted without the host: all of it."""
        self._count(sequences, "on device", seconds)

    def on_device(self, sequences: int, forwards_s: float) -> float:
        """Of such a step; `forwards_s`: of its forwards, where none was timed."""
        return self._known.get((sequences.bit_length(), "on device"), forwards_s + ON_DEVICE_EXTRA_S)

    def _count(self, sequences: int, what: str, seconds: float) -> None:
        key = sequences.bit_length(), what
        recent = self._recent.setdefault(key, deque(maxlen=RECENT_STEPS))
        recent.append(max(0.0, seconds))
        self._known[key] = median(recent)

    def timed(self, sequences: int) -> bool:
        """Whether a plain step of about so many sequences was timed."""
        return any((sequences.bit_length(), what) in self._known for what in ("plain", "hidden"))

    def is_asked_for(self, sequences: int) -> bool:
        """Whether the coming step is to be plain so that it can be timed: the first of about so many sequences, unless
        one was timed. One that follows a draft on a device that runs ahead of the host shows nothing of it."""
        size = sequences.bit_length()
        asked = size in self._asked or self.timed(sequences)
        self._asked.add(size)
        return not asked

    def timed_paid(self, sequences: int) -> bool:
        """Whether a step of about so many sequences with a paid drafter was timed."""
        return all((sequences.bit_length(), what) in self._known for what in ("drafted", "paid"))

    def seconds(self, sequences: int, drafted: bool) -> float:
        """Of a step that shows; one with a draft that was not timed hides nothing and adds what a draft does."""
        size = sequences.bit_length()
        plain_s = 0.0 if (size, "hidden") in self._known else self._known.get((size, "plain"), 0.0)
        extra_s = self.hidden(sequences) + DRAFTED_EXTRA_S * sequences
        return self._known.get((size, "drafted"), plain_s + extra_s) if drafted else plain_s

    def paid(self, sequences: int) -> float:
        """Of drafting with a paid drafter, beside its forwards."""
        return self._known.get((sequences.bit_length(), "paid"), PAID_EXTRA_S * sequences)

    def hidden(self, sequences: int) -> float:
        """Of a plain step that was launched ahead: what shows where one is not."""
        return self._known.get((sequences.bit_length(), "hidden"), 0.0)

    def idle(self, sequences: int) -> float:
        """That drafters may use beside a step that was launched ahead; 0: not worth a run."""
        idle_s = MAX_IDLE_SHARE * self._known.get((sequences.bit_length(), "idle"), 0.0)
        return idle_s if idle_s >= MIN_IDLE_S else 0.0
