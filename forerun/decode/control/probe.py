"""Probes: single rounds of a paid drafter that does not pay, to notice when it starts to.

A small share of all time is saved up for them, so that the loss does not show. Without probes a drafter that was poor
for one text would never run for the next. Knows costs and which requests were probed; not how good a drafter is.
"""

from __future__ import annotations

from forerun.decode.control.acceptance import RequestStats
from forerun.decode.control.depth import DepthPlan

PROBE_TIME_SHARE = 0.015  # of all time, the most that probes may lose: well inside the 5% that drafting may cost
MAX_SAVED_PROBES = 4.0  # probes that may be saved up for; also the credit of a drafter that is new


class Probes:
    """Seconds that probing may lose, by drafter."""

    def __init__(self) -> None:
        self._credit_s: dict[str, float] = {}

    def save(self, drafter: str, plan: DepthPlan) -> None:
        """Set this step's share aside; a drafter that is new starts with a few rounds' worth."""
        saved_s = self._credit_s.get(drafter, MAX_SAVED_PROBES * plan.round_s(1))
        self._credit_s[drafter] = saved_s + PROBE_TIME_SHARE * plan.free.seconds

    def refund(self, drafter: str, seconds: float) -> None:
        """A probe's tokens were accepted, which saved that much."""
        self._credit_s[drafter] += seconds

    def plan(
        self,
        stats: list[RequestStats],
        drafter: str,
        plan: DepthPlan,
        limits: list[int],
        start_s: list[float],
        candidates: list[int],
    ) -> list[int]:
        """One round where enough has been saved up for it, else none.

        For all candidates that need the least to catch up: a round for all costs little more than for one, and it takes
        them all to find that a batch is worth drafting for.
        """
        rounds = [0] * len(stats)
        first_s = min(start_s[i] for i in candidates)
        probed = [i for i in candidates if start_s[i] <= first_s and limits[i] > 0]
        if first_s > 0.0:
            probed = probed[:1]
        if not probed:
            return rounds
        extra_s = plan.seconds(plan.size + len(probed)) - plan.seconds(plan.size)
        cost_s = plan.round_s(len(probed)) + extra_s + first_s
        credit_s = self._credit_s[drafter] = min(self._credit_s[drafter], MAX_SAVED_PROBES * cost_s)
        if credit_s < cost_s * (1.0 if any(stats[i].trials > 0 for i in probed) else 2.0):
            return rounds
        self._credit_s[drafter] -= cost_s
        for i in probed:
            stats[i].trials -= 1
            stats[i].probing, stats[i].refund_s = drafter, 1.0 / plan.rate
            rounds[i] = 1
        return rounds
