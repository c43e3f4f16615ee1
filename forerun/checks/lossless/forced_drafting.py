"""Drafting as `forerun check lossless` needs it: a controller that has every draft verified, and drafters that are
registered only while a check runs. Knows no part of the check itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from forerun.core import Draft
from forerun.decode.control.controller import MIN_GROWN_PROB, Controller, PaidPlan, RequestStats
from forerun.decode.control.cost import CostCurve
from forerun.decode.drafters import base
from forerun.engine.engine import Engine


class VerifyAllDrafts(Controller):
    """Has every draft verified, whatever it costs: a check must not depend on the speed of the machine."""

    def __init__(self) -> None:
        names = [name for name, kind in base.registered().items() if not kind.free]
        super().__init__(CostCurve({1: 1.0, 64: 1.001}), {name: CostCurve({1: 1e-4, 64: 1.1e-4}) for name in names})

    def calibrate(self, stats: RequestStats, draft: Draft) -> list[float]:
        """Stated probabilities stay: branches keep the drafter's order, and wrong ones may stay the likeliest."""
        return list(draft.probs)

    def select(
        self,
        stats: list[RequestStats],
        drafts: list[Draft],
        probs: list[list[float]],
        limits: list[int],
        context: int,
        spent_s: float = 0.0,
    ) -> list[list[int]]:
        return [list(range(min(limit, len(draft)))) for limit, draft in zip(limits, drafts, strict=True)]

    def plan_rounds(
        self,
        stats: list[RequestStats],
        drafts: list[Draft],
        drafter: str,
        limits: list[int],
        context: int,
        start_s: list[float],
        spent_s: float = 0.0,
    ) -> PaidPlan:
        return PaidPlan(drafter, list(limits), 1.0, [[0.0] * max(limits, default=0)] * len(stats), "every draft")

    def should_draft(self, stats: list[RequestStats], drafters: list[list[str]], context: int, now: float) -> bool:
        return super().should_draft(stats, drafters, context, now) or True

    def should_run(self, stats: RequestStats, drafter: str, covered: float = 0.0) -> bool:
        return True

    def max_wait_s(self, s: RequestStats, drafter: str) -> float:
        return math.inf

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
