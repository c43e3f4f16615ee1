"""Guides inside the engine: sequences on drafted K/V that speak provisionally until the real prompt is computed.

A guide runs like any other sequence; these are the moments that differ: when it says something, when the sequence it
guides is ready to answer for itself, and as long as that one follows it.
"""

from __future__ import annotations

from collections.abc import Callable

from forerun.engine.scheduler import Scheduler
from forerun.engine.sequence import Event, Sequence, Status
from forerun.engine.work import Work
from forerun.models.cuda.prefixes import FEW


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


def meet(work: list[Work], scheduler: Scheduler, most_nodes: Callable[[Sequence], int], rows: int | None) -> list[Work]:
    """Where a prompt is computed at last, its guide falls silent, and what it said is judged: in the same forward, or,
    where only forwards of so many `rows` give the tokens that decoding gives, in the next ones, a piece at a time."""
    meeting = [w for w in work if w.meets_guide]
    for w in meeting:
        if w.seq.guide is not None:
            scheduler.dismiss(w.seq.guide)
    work = [w for w in work if w.seq.status is Status.RUNNING]
    if rows is not None:
        meeting = [w for w in meeting if w.decodes]
        beside = sum(w.count for w in work if w.count <= FEW and not w.alone)  # in the same launch
        rows = max(0, rows - beside) // max(1, len(meeting))
    for w in meeting:
        provisional = w.seq.provisional
        assert provisional is not None
        useful = min(most_nodes(w.seq), len(provisional.open))
        w.draft = provisional.draft(scheduler.reserve(w.seq, useful if rows is None else min(useful, rows)))
    return work
