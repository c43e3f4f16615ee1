"""Whether one more round of a drafter that runs a model is worth it, asked while a draft grows.

What is common to the sequences that are drafted for side by side is worked out once. Knows acceptance and costs, no
drafter's workings.
"""

from __future__ import annotations

import math

from forerun.decode.control.acceptance import DEPTHS, Record
from forerun.decode.control.cost import DEEPEST, LOOK_AHEAD, CostCurve

_HALVINGS = 7


class SharedCosts:
    """One sequence's share of a step's costs, where `sequences` are drafted for side by side.

    `nodes` are verified for them in any case.
    """

    def __init__(self, target: CostCurve, rounds: CostCurve, sequences: int, context: int, nodes: int) -> None:
        self.round_s = rounds.seconds(sequences, sequences, context) / sequences
        self.verify_s: list[float] = []  # of the target, by depth
        self._target, self._sequences, self._context, self._nodes = target, sequences, context, nodes
        self.extend(LOOK_AHEAD + 1)

    def extend(self, depth: int) -> None:
        """Work `verify_s` out as far as this."""
        each = self._sequences
        for k in range(len(self.verify_s), depth + 1):
            self.verify_s.append(self._target.seconds(each * (1 + k) + self._nodes, each, self._context) / each)


class Worth:
    """Follows one chain while it is drafted.

    A round has to beat the rate that drafting for this text gives: by what recent steps gave and by what this one
    promises so far, as one alone is too late when the text changes and the other calls every doubtful step a success.
    """

    __slots__ = ("_costs", "_depth", "_factor", "_path", "_raw", "_recent", "_record", "_rounds", "_tokens")

    def __init__(self, record: Record, factor: float, costs: SharedCosts, recent: float) -> None:
        """`factor`: this request's odds over the usual; `recent`: tokens per second, 0 where there are none."""
        self._record, self._factor, self._costs, self._recent = record, factor, costs, recent
        self._raw, self._path, self._tokens, self._depth, self._rounds = 1.0, 1.0, 1.0, 0, 0

    def __call__(self, prob: float, depth: int) -> bool:
        """Given the drafter's own probability of the path down to this depth."""
        self._follow(prob, depth)
        if depth >= DEEPEST:
            return False
        costs, last = self._costs, min(depth + LOOK_AHEAD, DEEPEST)
        if len(costs.verify_s) <= max(last, self._depth):
            costs.extend(max(last, self._depth))
        verify_s, round_s = costs.verify_s, costs.round_s
        rate = self._tokens / (verify_s[self._depth] + self._rounds * round_s)
        if self._recent:
            rate = math.sqrt(rate * self._recent)
        path = self._path if depth == self._depth else min(1.0, prob * self._path / max(self._raw, 1e-9))
        usual, factor = self._record.by_depth(), self._factor
        gain = 0.0
        # Not only the next round: costs have steps, and the first round into one can look worse than the second.
        for k in range(depth, last):
            ahead = usual[k if k < DEPTHS else -1]
            path *= ahead * factor / (1.0 - ahead + ahead * factor)
            gain += path
            if gain > rate * (verify_s[k + 1] - verify_s[depth] + (k + 1 - depth) * round_s):
                return True
        return False

    def least(self) -> list[float]:
        """The same as numbers, for chains that go on by themselves on a device: after so many tokens, the path's least
        probability that is worth another round. The path is taken to be as sure everywhere."""
        return [self._threshold(depth) for depth in range(1, DEEPEST)]

    def _threshold(self, depth: int) -> float:
        low, high = 0.0, 1.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            trial = Worth(self._record, self._factor, self._costs, self._recent)
            trial._rounds = depth - 1
            low, high = (low, middle) if trial(middle, depth) else (middle, high)
        return high

    def _follow(self, prob: float, depth: int) -> None:
        """Take in a round: one token more, several where it began with another drafter's, or a side branch."""
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
    """In place of a `Worth` where a drafter is only being tried."""
    return depth < 1
