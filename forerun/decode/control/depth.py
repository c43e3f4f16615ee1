"""Whether and how deep a drafter that runs a model should draft, by what it costs and by what it is known to get right.

Plans one step before anything is drafted. Knows no records and no requests, only probabilities and seconds.
"""

from __future__ import annotations

from operator import itemgetter

from forerun.decode.control.cost import DEEPEST, LOOK_AHEAD, CostCurve
from forerun.decode.control.selection import Selection

MARGIN = 0.01  # gain below which nothing is drafted, for every doubling of the batch: it would be lost in variance
UNLIKELY = 0.02  # probability of a path below which nobody would draft on


class DepthPlan:
    """The rate of a batch as a paid drafter adds rounds to it."""

    def __init__(self, target: CostCurve, rounds: CostCurve, context: int, free: Selection) -> None:
        """`free`: the step as it is without the drafter."""
        self.target, self.rounds, self.context, self.free = target, rounds, context, free
        self.sequences, self.size, self.tokens = len(free.gains), free.size, sum(free.gains)
        self.rate = self.tokens / free.seconds
        self.least = self.rate * (1.0 + MARGIN * self.sequences.bit_length())  # rate from which drafting is worth it

    def seconds(self, size: int) -> float:
        return self.target.seconds(size, self.sequences, self.context)

    def round_s(self, active: int) -> float:
        return self.rounds.seconds(active, active, self.context) if active else 0.0

    def can_pay(self) -> bool:
        """Whether drafts that are always right would be worth it, for one sequence or for all."""
        for active in {1, self.sequences}:
            one = self.round_s(active)
            for k in (1, 2, 4, 8):
                size = self.sequences + active * k  # also the tokens, where all are right
                step_s = self.seconds(max(size, self.size)) + k * one
                if max(size, self.tokens) > self.least * step_s:
                    return True
        return False

    def best(
        self,
        ahead: list[list[float]],
        reach: list[list[float]],
        limits: list[int],
        start_s: list[float],
        remaining: list[int],
    ) -> tuple[dict[int, int], float]:
        """Rounds by sequence, none where they do not pay; a step's time then over a plain one's.

        By sequence: acceptance by depth, the probability by depth that a free draft reaches it, most rounds, what the
        drafter needs before it can begin, and the tokens by which that must have paid.
        """
        asked = list(range(self.sequences))
        while asked:
            depths, rate, slower = self._best_of(asked, ahead, reach, limits)
            saved = (
                (1.0 / self.rate - 1.0 / rate) * self.sequences / max(1, len(depths))
            )  # per token of such a sequence
            stay = [i for i in asked if i in depths and remaining[i] * saved >= start_s[i]]
            if len(stay) == len(depths):
                return depths, slower
            asked = stay
        return {}, 1.0

    def _best_of(
        self, asked: list[int], ahead: list[list[float]], reach: list[list[float]], limits: list[int]
    ) -> tuple[dict[int, int], float, float]:
        """Of these sequences: rounds of each that pays, the rate then, a step's time over a plain one's."""
        steps = self._steps(asked, ahead, reach, limits)
        active = [0] * (DEEPEST + 1)
        rounds = self.rounds.side_by_side(len(asked), self.context)
        seconds = self.target.row(self.size, self.size + len(steps), self.sequences, self.context)
        tokens, spent, best, best_rate = self.tokens, 0.0, 0, self.least
        for n, (_, _, depth, gain) in enumerate(steps, 1):
            now = active[depth]
            spent += rounds[now + 1] - rounds[now]
            active[depth] = now + 1
            tokens += gain
            rate = tokens / (seconds[n] + spent)
            if rate > best_rate:
                best, best_rate = n, rate
            elif n > best + LOOK_AHEAD * len(asked) and rate < 0.9 * best_rate and self.size == self.sequences:
                break  # gains only fall from here, as no free draft covers the first of them
        depths: dict[int, int] = {}
        tokens = self.tokens
        for _, i, depth, gain in steps[:best]:
            depths[i] = depth + 1
            tokens += gain
        return depths, best_rate, tokens / best_rate / self.seconds(self.sequences)

    @staticmethod
    def _steps(
        asked: list[int], ahead: list[list[float]], reach: list[list[float]], limits: list[int]
    ) -> list[tuple[float, int, int, float]]:
        """Path's probability, sequence, depth, gain over the free draft: all that could be drafted, likeliest first."""
        steps: list[tuple[float, int, int, float]] = []
        for i in asked:
            path, free = 1.0, reach[i]
            for depth, prob in enumerate(ahead[i][: limits[i]]):
                path *= prob
                if path < UNLIKELY:
                    break
                steps.append((path, i, depth, path - min(path, free[depth]) if depth < len(free) else path))
        steps.sort(key=itemgetter(0), reverse=True)
        return steps
