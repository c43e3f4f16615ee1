"""What a sequence may lose to the others of its batch, so that none pays for drafts that only others gain by.

Drafting makes a step longer for every sequence of a batch. Knows plans and what answers took so far; no cost curves.
"""

from __future__ import annotations

from forerun.decode.control.acceptance import Acceptance, RequestStats
from forerun.decode.control.depth import Depths

MAX_SLOWDOWN_SHARE = 0.025  # of its plain time that a sequence may lose to its batch: 5% with what is not foreseen
# Of a sequence's expected tokens that count where a draft model has yet to read for a batch: sequences differ, and the
# first that falls behind ends drafting for all of them, with the reading spent (0.85 of plain in simulation)
BATCH_START_SHARE = 0.8


def slack_s(known: Acceptance, s: RequestStats, plain_s: float) -> float:
    """What a sequence may still lose to the others; `plain_s`: of a plain step."""
    whole_s = s.plain_s + known.expected_remaining(s) * plain_s
    return MAX_SLOWDOWN_SHARE * whole_s + s.plain_s - s.taken_s


def lagging(known: Acceptance, stats: list[RequestStats], plain_s: float) -> list[int]:
    """Sequences that a step must not slow down; one alone can only slow down itself."""
    return [i for i, s in enumerate(stats) if slack_s(known, s, plain_s) < 0.0] if len(stats) > 1 else []


def slows_down(
    known: Acceptance,
    stats: list[RequestStats],
    gains: list[float],
    depths: Depths,
    start_s: list[float],
    plain_s: float,
) -> bool:
    """Whether a step with a paid drafter would cost a sequence of a batch more than it may lose to the others; one that
    gains by it wins back what reading for all takes."""
    if len(stats) < 2:
        return False
    reading_s = sum(start_s[i] for i in depths.rounds)
    counted = BATCH_START_SHARE if reading_s else 1.0
    for i, s in enumerate(stats):
        tokens = counted * (gains[i] + depths.gains.get(i, 0.0))
        steps = known.expected_remaining(s) / tokens if tokens > depths.slowdown else 1.0
        if reading_s + (depths.slowdown - tokens) * plain_s * steps > max(0.0, slack_s(known, s, plain_s)):
            return True  # what is lost already can only be won back
    return False
