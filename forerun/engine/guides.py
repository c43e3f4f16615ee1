"""Guides inside the engine: sequences on drafted K/V that speak provisionally until the real prompt is computed.

A guide runs like any other sequence; these are the two moments that differ: when it says something, and when the
sequence it guides is ready to answer for itself.
"""

from __future__ import annotations

from collections.abc import Callable

from forerun.engine.scheduler import Scheduler
from forerun.engine.sequence import Event, Sequence, Status
from forerun.engine.work import Work


def say(guide: Sequence, event: Event, scheduler: Scheduler, ends: bool) -> None:
    """What a guide said is shown, but may be taken back. It has no more to say where the answer would end, or where it
    has gone on for long."""
    real = guide.real
    assert real is not None and real.provisional is not None
    if not real.provisional.tokens:
        real.usage.provisional_s = guide.usage.ttft_s
    real.provisional.tokens += event.token_ids
    real.usage.provisional += len(event.token_ids)
    event.provisional = True
    if ends or real.provisional.full:
        scheduler.dismiss(guide)


def meet(work: list[Work], scheduler: Scheduler, most_nodes: Callable[[Sequence], int]) -> list[Work]:
    """Where a prompt is computed at last, its guide falls silent, and what it said is judged in the same forward."""
    for w in [w for w in work if w.meets_guide]:
        if w.seq.guide is not None:
            scheduler.dismiss(w.seq.guide)
        assert w.seq.provisional is not None
        nodes = min(most_nodes(w.seq), len(w.seq.provisional.tokens))
        w.draft = w.seq.provisional.draft(scheduler.reserve(w.seq, nodes))
    return [w for w in work if w.seq.status is Status.RUNNING]
