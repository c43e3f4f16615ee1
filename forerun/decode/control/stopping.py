"""Whether one more round of a paid drafter is worth it, evaluated while a draft grows.

The costs that the sequences of a step share are computed once. Knows acceptance and costs, no drafter's workings.
"""

from __future__ import annotations

import math

from forerun.decode.control.acceptance import TRACKED_DEPTHS, DrafterRecord
from forerun.decode.control.cost import LOOKAHEAD_ROUNDS, MAX_ROUNDS, CostCurve

THRESHOLD_BISECTIONS = 7  # of a threshold on a path's probability: to within 0.8%


class SharedCosts:
    """One sequence's share of a step's costs, where `sequences` are drafted together."""

    def __init__(self, target: CostCurve, rounds: CostCurve, sequences: int, context: int) -> None:
        self.round_s = rounds.seconds(sequences, sequences, context) / sequences
        self.verify_s: list[float] = []  # of the target, by depth
        self._target, self._sequences, self._context = target, sequences, context
        self.extend(LOOKAHEAD_ROUNDS + 1)

    def extend(self, depth: int) -> None:
        """Compute `verify_s` up to this depth."""
        each = self._sequences
        for k in range(len(self.verify_s), depth + 1):
            self.verify_s.append(self._target.seconds(each * (1 + k), each, self._context) / each)


class StoppingRule:
    """Follows one chain while it is drafted.

    A round has to beat the rate that drafting gives for this text: the geometric mean of what recent steps gave and of
    what this one promises so far. The first alone is too late when the text changes, the second alone counts every
    doubtful step as a success.
    """

    __slots__ = ("_costs", "_depth", "_factor", "_path", "_raw", "_recent", "_record", "_rounds", "_tokens")

    def __init__(self, record: DrafterRecord, factor: float, costs: SharedCosts, recent: float) -> None:
        """`factor`: this request's odds over the usual; `recent`: tokens per second, 0 where there are none."""
        self._record, self._factor, self._costs, self._recent = record, factor, costs, recent
        self._raw, self._path, self._tokens, self._depth, self._rounds = 1.0, 1.0, 1.0, 0, 0

    def __call__(self, prob: float, depth: int) -> bool:
        """Whether to run another round, given the drafter's own probability of the path down to this depth."""
        self._extend_path(prob, depth)
        if depth >= MAX_ROUNDS:
            return False
        costs, last = self._costs, min(depth + LOOKAHEAD_ROUNDS, MAX_ROUNDS)
        if len(costs.verify_s) <= max(last, self._depth):
            costs.extend(max(last, self._depth))
        verify_s, round_s = costs.verify_s, costs.round_s
        rate = self._tokens / (verify_s[self._depth] + self._rounds * round_s)
        if self._recent:
            rate = math.sqrt(rate * self._recent)
        path = self._path if depth == self._depth else min(1.0, prob * self._path / max(self._raw, 1e-9))
        usual, factor = self._record.usual_by_depth(), self._factor
        gain = 0.0
        # Not only the next round: costs have steps, and the first round into one can look worse than the second.
        for k in range(depth, last):
            ahead = usual[k if k < TRACKED_DEPTHS else -1]
            path *= ahead * factor / (1.0 - ahead + ahead * factor)
            gain += path
            if gain > rate * (verify_s[k + 1] - verify_s[depth] + (k + 1 - depth) * round_s):
                return True
        return False

    def min_path_probs(self) -> list[float]:
        """The same as numbers, for chains that are drafted on a device: after so many tokens, the least probability of
        the path that is worth another round. All tokens of a path are taken to be equally probable."""
        return [self._threshold(depth) for depth in range(1, MAX_ROUNDS)]

    def _threshold(self, depth: int) -> float:
        low, high = 0.0, 1.0
        for _ in range(THRESHOLD_BISECTIONS):
            middle = (low + high) / 2
            trial = StoppingRule(self._record, self._factor, self._costs, self._recent)
            trial._rounds = depth - 1
            low, high = (low, middle) if trial(middle, depth) else (middle, high)
        return high

    def _extend_path(self, prob: float, depth: int) -> None:
        """Add what a round gave: one token, several where it began with another drafter's, or none on this path where
        it was a side branch."""
        self._rounds += depth > 0
        more = depth - self._depth
        if more <= 0:
            return
        raw = min(1.0, prob / self._raw) if self._raw > 0.0 else 0.0
        if more > 1:
            raw **= 1.0 / more
        for above in range(self._depth, depth):
            self._path *= self._record.prob(raw, above == 0, self._factor)
            self._tokens += self._path
        self._raw, self._depth = prob, depth


def first_round_only(prob: float, depth: int) -> bool:
    """The stopping rule of a probe."""
    return depth < 1
