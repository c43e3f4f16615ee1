"""Whether and how deep a paid drafter should draft, by what it costs and by how often its tokens are accepted.

Plans one step before anything is drafted (`DepthPlan`), and single rounds of a drafter that does not pay (`Probes`).
Knows no acceptance records, only probabilities and seconds.
"""

from __future__ import annotations

from operator import itemgetter

from forerun.decode.control.acceptance import RequestStats
from forerun.decode.control.cost import LOOKAHEAD_ROUNDS, MAX_ROUNDS, CostCurve
from forerun.decode.control.selection import Selection

MIN_GAIN_PER_DOUBLING = 0.01  # of the rate, for every doubling of the batch: less would be lost in variance
UNREAD_TOKENS = 2  # of a sequence that run along in a round of several tokens, where its drafts are not known yet
MIN_PATH_PROB = 0.02  # deeper nodes of a path below this are not planned for: they cost more than they can gain
PROBE_TIME_SHARE = 0.015  # of all time, the most that probes may lose: well inside the 5% that drafting may cost
MAX_SAVED_PROBES = 4.0  # probes that may be saved up for; also the credit of a drafter that is new


class DepthPlan:
    """The tokens per second of a batch as a paid drafter adds rounds to it."""

    def __init__(self, target: CostCurve, rounds: CostCurve, context: int, free: Selection) -> None:
        """`free`: the step as it is without the drafter."""
        self.target, self.rounds, self.context, self.free = target, rounds, context, free
        self.sequences, self.size, self.tokens = len(free.gains), free.size, sum(free.gains)
        self.rate = self.tokens / free.seconds
        self.min_rate = self.rate * (1.0 + MIN_GAIN_PER_DOUBLING * self.sequences.bit_length())  # worth drafting for

    def seconds(self, size: int) -> float:
        return self.target.seconds(size, self.sequences, self.context)

    def round_s(self, active: int) -> float:
        """Of one round for so many sequences; one that drafts several tokens runs a row for each."""
        block = self.rounds.tokens_per_round
        rows = active if block == 1 else active * (block + UNREAD_TOKENS)
        return self.rounds.seconds(rows, active, self.context) if active else 0.0

    def can_pay(self) -> bool:
        """Whether drafts that are always accepted would be worth it, for one sequence or for all."""
        for active in {1, self.sequences}:
            one = self.round_s(active)
            for k in (1, 2, 4, 8):
                size = self.sequences + active * k  # also the tokens, where all are accepted
                step_s = self.seconds(max(size, self.size)) + -(-k // self.rounds.tokens_per_round) * one
                if max(size, self.tokens) > self.min_rate * step_s:
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
        """Rounds by sequence, none where they do not pay; and how many times as long as a plain step it then takes.

        By sequence: acceptance by depth, the probability by depth that a free draft reaches it, most rounds, what the
        drafter needs before its first round, and the tokens by which that must have paid.
        """
        rows = list(range(self.sequences))
        while rows:
            depths, rate, slowdown = self._best_of(rows, ahead, reach, limits)
            saved_s = (1.0 / self.rate - 1.0 / rate) * self.sequences / max(1, len(depths))  # per token of a sequence
            paying = [i for i in rows if i in depths and remaining[i] * saved_s >= start_s[i]]
            if len(paying) == len(depths):
                return depths, slowdown
            rows = paying
        return {}, 1.0

    def _best_of(
        self, rows: list[int], ahead: list[list[float]], reach: list[list[float]], limits: list[int]
    ) -> tuple[dict[int, int], float, float]:
        """Of these sequences: rounds of each that pays, the rate then, a step's time over a plain one's."""
        nodes, block = self._nodes(rows, ahead, reach, limits), self.rounds.tokens_per_round
        active = [0] * (MAX_ROUNDS + 1)  # sequences in each round
        rounds = self.rounds.one_token_each(len(rows), self.context)
        seconds = self.target.seconds_range(self.size, self.size + len(nodes), self.sequences, self.context)
        tokens, spent, best, best_rate = self.tokens, 0.0, 0, self.min_rate
        for n, (_, _, depth, gain) in enumerate(nodes, 1):
            now = active[depth]
            active[depth] = now + 1
            tokens += gain
            if block == 1:
                spent += rounds[now + 1] - rounds[now]
            else:  # one round: its masks, and the tokens that the step before accepted
                spent = self.rounds.seconds(n + round(tokens), active[0], self.context)
            rate = tokens / (seconds[n] + spent)
            if rate > best_rate:
                best, best_rate = n, rate
            elif n > best + LOOKAHEAD_ROUNDS * len(rows) and rate < 0.9 * best_rate and self.size == self.sequences:
                break  # gains only fall from here, as no free draft covers the first of them
        depths: dict[int, int] = {}
        tokens = self.tokens
        for _, i, depth, gain in nodes[:best]:
            depths[i] = depth + 1
            tokens += gain
        return depths, best_rate, tokens / best_rate / self.seconds(self.sequences)

    @staticmethod
    def _nodes(
        rows: list[int], ahead: list[list[float]], reach: list[list[float]], limits: list[int]
    ) -> list[tuple[float, int, int, float]]:
        """(path probability, sequence, depth, gain over the free draft) of all that could be drafted, most probable
        first."""
        nodes: list[tuple[float, int, int, float]] = []
        for i in rows:
            path, free = 1.0, reach[i]
            for depth, prob in enumerate(ahead[i][: limits[i]]):
                path *= prob
                if path < MIN_PATH_PROB:
                    break
                nodes.append((path, i, depth, path - min(path, free[depth]) if depth < len(free) else path))
        nodes.sort(key=itemgetter(0), reverse=True)
        return nodes


class Probes:
    """Single rounds of a drafter that does not pay, to notice when it starts to: the seconds they may lose, by drafter.

    A small share of all time is saved up for them, so that the loss does not show. Without probes a drafter that was
    poor for one text would never run for the next.
    """

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
