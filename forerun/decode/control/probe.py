"""Trying again what did not pay: a share of all time is saved up for it, so that the loss does not show.

Without it a drafter that was poor for one text would never be asked about the next. Knows costs and who has been tried,
nothing of how good a drafter is.
"""

from __future__ import annotations

from forerun.decode.control.acceptance import RequestStats
from forerun.decode.control.depth import DepthPlan

SHARE = 0.015  # of all time, at most lost on probes
SAVED = 4.0  # probes that may be saved up for


class Probes:
    """Seconds that probing may lose, by drafter."""

    def __init__(self) -> None:
        self._credit: dict[str, float] = {}

    def save(self, drafter: str, plan: DepthPlan) -> None:
        """Set this step's share aside; a drafter that is new begins with a few rounds' worth."""
        saved_s = self._credit.get(drafter, SAVED * plan.round_s(1))
        self._credit[drafter] = saved_s + SHARE * plan.free.seconds

    def refund(self, drafter: str, seconds: float) -> None:
        """Of a probe whose tokens came true, which saved that much."""
        self._credit[drafter] += seconds

    def rounds(
        self,
        stats: list[RequestStats],
        drafter: str,
        plan: DepthPlan,
        limits: list[int],
        start_s: list[float],
        about: list[int],
    ) -> list[int]:
        """One round where enough has been saved up for it.

        For all sequences of `about` that the drafter has caught up with as far: a round for all costs little more than
        for one, and it takes them all to find that a batch is worth drafting for.
        """
        rounds = [0] * len(stats)
        least = min(start_s[i] for i in about)
        probed = [i for i in about if start_s[i] <= least and limits[i] > 0]
        if least > 0.0:
            probed = probed[:1]
        if not probed:
            return rounds
        extra = plan.seconds(plan.size + len(probed)) - plan.seconds(plan.size)
        cost = plan.round_s(len(probed)) + extra + least
        credit = self._credit[drafter] = min(self._credit[drafter], SAVED * cost)
        if credit < cost * (1.0 if any(stats[i].trials > 0 for i in probed) else 2.0):
            return rounds
        self._credit[drafter] -= cost
        for i in probed:
            stats[i].trials -= 1
            stats[i].probing, stats[i].refund = drafter, 1.0 / plan.rate
            rounds[i] = 1
        return rounds
