"""Drafting as `forerun check lossless` needs it: a controller that has every draft verified, and drafters that are
registered only while a check runs. Knows no part of the check itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from forerun.core import Draft
from forerun.decode.control.controller import MIN_GROWN_PROB, Controller, DraftedBatch, PaidPlan, RequestStats
from forerun.decode.control.cost import CostCurve
from forerun.decode.drafters import base
from forerun.engine.engine import Engine


class VerifyAllDrafts(Controller):
    """Has every draft verified, whatever it costs: a check must not depend on the speed of the machine."""

    def __init__(self) -> None:
        names = [name for name, kind in base.registered().items() if not kind.free]
        super().__init__(CostCurve({1: 1.0, 64: 1.001}), {name: CostCurve({1: 1e-4, 64: 1.1e-4}) for name in names})

    def calibrate(self, stats: RequestStats, draft: Draft, beside: bool = False) -> list[float]:
        """Stated probabilities stay: branches keep the drafter's order, and wrong ones may stay the likeliest."""
        return list(draft.probs)

    def select(self, batch: DraftedBatch) -> list[list[int]]:
        return [list(range(min(limit, len(draft)))) for limit, draft in zip(batch.limits, batch.drafts, strict=True)]

    def plan_rounds(self, batch: DraftedBatch, drafter: str, start_s: list[float]) -> PaidPlan:
        limits = batch.limits
        return PaidPlan(drafter, list(limits), 1.0, [[0.0] * max(limits, default=0)] * len(limits), "every draft")

    def should_draft(self, *given: Any) -> bool:
        return super().should_draft(*given) or True

    def idle_s(self, stats: list[RequestStats], context: int) -> float:
        super().idle_s(stats, context)
        return math.inf

    def should_leave(self, batch: DraftedBatch) -> bool:
        return True

    def should_run(self, *given: Any, **more: Any) -> bool:
        return True

    def max_wait_s(self, s: RequestStats, drafter: str) -> tuple[float, float]:
        return math.inf, 1.0

    def min_grown_prob(self) -> float:
        return MIN_GROWN_PROB


@contextmanager
def all_drafts_verified(engine: Engine) -> Iterator[None]:
    """Meanwhile the engine verifies every draft."""
    measured = engine.speculator.controller
    engine.speculator.controller = VerifyAllDrafts()
    try:
        yield
    finally:
        engine.speculator.controller = measured


@contextmanager
def registered_drafter(kind: type[base.Drafter], engine: Engine | None = None) -> Iterator[None]:
    """A drafter that only a check can name; afterwards neither the registry nor the engine has it, as the next check
    brings other answers."""
    base.register(kind)
    try:
        yield
    finally:
        base.unregister(kind.name)
        if engine is not None:
            engine.speculator.drafter_pool.remove(kind.name)
