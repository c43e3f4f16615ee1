"""How deep a paid drafter should draft for each sequence of a batch: rounds that make the tokens per second largest.

Planned before anything is drafted, from acceptance by depth and measured seconds. Knows no acceptance records.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from math import inf
from operator import itemgetter, mul

from forerun.decode.control.cost import LOOKAHEAD_ROUNDS, MAX_ROUNDS, CostCurve
from forerun.decode.control.selection import Selection

UNREAD_TOKENS = 2  # of a sequence that run along in a round of several tokens, where its drafts are not known yet
DRAFTED_ROWS_SHARE = 0.65  # of a sequence's rows in a launch of a draft model; the others are what was accepted before
MIN_PATH_PROB = 0.02  # deeper nodes of a path below this are not planned for: they cost more than they can gain


@dataclass(slots=True)
class Depths:
    """What a plan came to."""

    rounds: dict[int, int]  # by sequence; none where no round pays
    rate: float  # tokens per second then
    slowdown: float  # seconds of the step over a plain one's
    gains: dict[int, float]  # tokens by which each sequence gains over the free draft


class DepthPlan:
    """The tokens per second of a batch as a paid drafter adds rounds to it."""

    def __init__(self, target: CostCurve, rounds: CostCurve, context: int, free: Selection, host_s: float) -> None:
        """`free`: the step as it is without the drafter; `host_s`: of a step with it, beside forwards."""
        self.target, self.rounds, self.context, self.free, self.host_s = target, rounds, context, free, host_s
        self.sequences, self.size, self.tokens = len(free.gains), free.size, sum(free.gains)
        self.rate = self.tokens / free.seconds

    def round_s(self, active: int) -> float:
        """Of one round for so many sequences; one that drafts several tokens runs a row for each."""
        block = self.rounds.tokens_per_round
        rows = active if block == 1 else active * (block + UNREAD_TOKENS)
        return self.rounds.seconds(rows, active, self.context) if active else 0.0

    def token_s(self, probs: list[float]) -> float:
        """Of a sequence with this acceptance by depth, where the drafter drafts for all and no free drafter does."""
        n, block, best = self.sequences, self.rounds.tokens_per_round, inf
        path = tokens = 1.0
        for depth, prob in enumerate(probs, 1):
            path *= prob
            tokens += path
            drafting_s = depth * self.round_s(n) if block == 1 else self.rounds.seconds(n * (depth + UNREAD_TOKENS), n)
            seconds = self.target.seconds(n * (1 + depth), n, self.context) + drafting_s + self.host_s
            best = min(best, seconds / tokens)
        return best

    def loss_s(self, probs: list[float], ratio: float = 1.0) -> float:
        """What a step loses in which the drafter runs for one sequence alone, one row for each of these probabilities
        of acceptance by depth, where so many times as many tokens come in its time as these promise."""
        path, tokens = 1.0, self.tokens
        for prob in probs:
            path *= prob
            tokens += path
        forward_s = self.target.seconds(self.size + len(probs), self.sequences, self.context)
        return max(0.0, forward_s + self.round_s(1) + self.host_s - ratio * tokens / self.rate)

    def best(
        self,
        ahead: list[list[float]],
        reach: list[list[float]],
        limits: list[int],
        start_s: list[float],
        remaining: list[float],
    ) -> Depths:
        """By sequence: acceptance by depth, the probability by depth that a free draft reaches it, most rounds, what
        the drafter has to save for what it reads before its first round, and the tokens by which that must be."""
        rows = list(range(self.sequences))
        while rows:
            found = self._best_of(rows, ahead, reach, limits)
            share = self.sequences / max(1, len(found.rounds))  # of what the batch saves, for each drafted sequence
            paying = []
            for i in found.rounds:
                if remaining[i] * (1.0 / self.rate - 1.0 / found.rate) * share >= start_s[i]:
                    paying.append(i)
            if len(paying) == len(found.rounds):
                return found
            rows = paying
        return Depths({}, self.rate, 1.0, {})

    def _best_of(
        self, rows: list[int], ahead: list[list[float]], reach: list[list[float]], limits: list[int]
    ) -> Depths:
        nodes, block = self._nodes(rows, ahead, reach, limits), self.rounds.tokens_per_round
        active = [0] * (MAX_ROUNDS + 1)  # sequences in each round
        rounds = self.rounds.one_token_each(len(rows), self.context)
        seconds = self.target.seconds_range(self.size, self.size + len(nodes), self.sequences, self.context)
        tokens, spent, best, best_rate = self.tokens, 0.0, 0, self.rate
        for n, (_, _, depth, gain) in enumerate(nodes, 1):
            now = active[depth]
            active[depth] = now + 1
            tokens += gain
            if block == 1:
                spent += rounds[now + 1] - rounds[now]
            else:  # one round: its masks, and the tokens that the step before accepted
                spent = self.rounds.seconds(n + round(tokens), active[0], self.context)
            rate = tokens / (seconds[n] + spent + self.host_s)
            if rate > best_rate:
                best, best_rate = n, rate
            elif n > best + LOOKAHEAD_ROUNDS * len(rows) and rate < 0.9 * best_rate and self.size == self.sequences:
                break  # gains only fall from here, as no free draft covers the first of them
        depths, gains, tokens = dict[int, int](), dict[int, float](), self.tokens
        for _, i, depth, gain in nodes[:best]:
            depths[i] = depth + 1
            gains[i] = gains.get(i, 0.0) + gain
            tokens += gain
        plain_s = self.target.seconds(self.sequences, self.sequences, self.context)
        return Depths(depths, best_rate, tokens / best_rate / plain_s, gains)

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
                # Free drafts know the text, a model what such texts say: where one is wrong the other may be right
                nodes.append((path, i, depth, path * (1.0 - free[depth]) if depth < len(free) else path))
        nodes.sort(key=itemgetter(0), reverse=True)
        return nodes


class StepPlan(DepthPlan):
    """The same where steps follow each other on a device: they draft for all sequences, as deep as rows of a launch
    allow, and take what such steps take."""

    def __init__(self, plan: DepthPlan, step_s: float, rows: int) -> None:
        super().__init__(plan.target, plan.rounds, plan.context, plan.free, plan.host_s)
        self.step_s, self.depth = step_s, int(rows * DRAFTED_ROWS_SHARE)

    def token_s(self, probs: list[float]) -> float:
        return self.step_s / (1.0 + sum(accumulate(probs[: self.depth], mul)))

    def loss_s(self, probs: list[float], ratio: float = 1.0) -> float:
        tokens, path = self.tokens, 1.0
        for prob in probs:
            path *= prob
            tokens += path
        return max(0.0, self.step_s - ratio * tokens / self.rate)

    def best(
        self,
        ahead: list[list[float]],
        reach: list[list[float]],
        limits: list[int],
        start_s: list[float],
        remaining: list[float],
    ) -> Depths:
        rows = list(range(self.sequences))
        gains, depths = dict.fromkeys(rows, 0.0), dict.fromkeys(rows, 0)
        for path, i, depth, _ in self._nodes(rows, ahead, reach, [min(limit, self.depth) for limit in limits]):
            gains[i], depths[i] = gains[i] + path, max(depths[i], depth + 1)
        if any(read_s and not left for read_s, left in zip(start_s, remaining, strict=True)):
            return Depths({}, self.rate, 1.0, {})  # it is too early to read for one of them, and all draft together
        rate, plain_s = (self.tokens + sum(gains.values())) / self.step_s, self.sequences / self.rate
        saved_s = sum(remaining) * (1.0 / self.rate - 1.0 / rate)
        if rate <= self.rate or saved_s < sum(start_s) or not all(depths.values()):
            return Depths({}, self.rate, 1.0, {})
        return Depths(depths, rate, self.step_s / plain_s, gains)


def min_path_probs(
    target: CostCurve, rounds: CostCurve, sequences: int, context: int, ahead: list[float], rate: float
) -> list[float]:
    """After 1, 2, ... drafted tokens of a sequence: the least probability of their path for which another round beats
    `rate`, the batch's tokens per second. Up to LOOKAHEAD_ROUNDS count together: costs have steps, and the first round
    into one can look worse than the second."""
    last = MAX_ROUNDS - 1 + LOOKAHEAD_ROUNDS
    verify_s = [target.seconds(sequences * (1 + k), sequences, context) / sequences for k in range(last + 1)]
    round_s = rounds.seconds(sequences, sequences, context) / sequences
    found = []
    for depth in range(1, MAX_ROUNDS):
        least, path, gain = 2.0, 1.0, 0.0
        for more in range(1, LOOKAHEAD_ROUNDS + 1):
            path *= ahead[min(depth + more, len(ahead)) - 1]
            gain += path
            cost_s = verify_s[depth + more] - verify_s[depth] + more * round_s
            least = min(least, rate * cost_s / max(gain, 1e-9))
        found.append(least)
    return found
