"""Two siblings at once: the probability to accept each of two tokens drawn without replacement.

Trying them in the order they were drawn accepts less than possible. Here the token with the highest ratio of target
probability to draft probability is tried first, whichever was drawn first; a token that is drafted too often is thus
left for pairs that have nothing better. Of three such orders the one that accepts most is used: nearly the best that
any lossless rule can do with two siblings (see docs/log.md), and computed with sums along the order. Rare tokens all
come last, so that only few are sorted.

How it stays exact: `first` and `second` are the probabilities that a token is tried first, or second after the first
was rejected, over all pairs that could have been drawn. A token is accepted with the share of that which the target's
probability allows, which adds up to no more than that probability, and the rest is `left`. So it must be fixed before
drawing that there are two, and the order must not depend on what was drawn.
"""

from __future__ import annotations

import torch
from torch import Tensor

ORDER_EXPONENTS = (0.0, -0.2, 0.2)  # of the draft probability, a further factor in each of the three orders


class _Order:
    """Tokens in the order they are tried, and how often each is; all [H]."""

    def __init__(self, head: Tensor, wanted: Tensor, prob: Tensor, odds: Tensor, tail: Tensor, tail_odds: Tensor):
        self.head, self.wanted = head, wanted
        # y and z are drawn, in either order, with probability odds[y] * prob[z] + odds[z] * prob[y]
        self.first = odds * (_after(prob) + tail) + prob * (_after(odds) + tail_odds)
        # how often a token that is tried first is rejected
        passed = torch.where(self.first > wanted, 1.0 - wanted / self.first, 0.0)
        self.second = prob * _before(passed * odds) + odds * _before(passed * prob)
        self.passed_prob, self.passed_odds = float((passed * prob).sum()), float((passed * odds).sum())
        self.accepted = float(torch.minimum(wanted, self.first + self.second).sum())

    def place(self, token: int) -> int | None:
        found = (self.head == token).nonzero()
        return int(found[0, 0]) if len(found) else None

    def share_first(self, place: int) -> float:
        return _share(float(self.wanted[place]), float(self.first[place]))


class SiblingPair:
    """`wanted` [V]: target probabilities, at most one in sum; `proposal` [V]: the distribution of both tokens."""

    def __init__(self, wanted: Tensor, proposal: Tensor, rare: float) -> None:
        mass = float(proposal.sum(dtype=torch.float64))
        head = (proposal >= rare * mass).nonzero()[:, 0]
        raw, wants = proposal[head].double(), wanted[head].double()
        self.wanted = wanted
        self.tail = proposal.double() / mass  # [V] rare tokens
        self.tail[head] = 0.0
        self.tail_odds = self.tail / (1.0 - self.tail)
        prob, odds = raw / mass, raw / _others(proposal, head, raw, mass)  # odds: drawn first to not drawn first
        rest = self.tail.sum(), self.tail_odds.sum()
        orders = []
        for exponent in ORDER_EXPONENTS:
            by = (wants / prob * prob**exponent).argsort(descending=True, stable=True)
            orders.append(_Order(head[by], wants[by], prob[by], odds[by], *rest))
        self.order = max(orders, key=lambda order: order.accepted)

    def shares(self, tokens: list[int]) -> list[tuple[int, float]]:
        """(index in `tokens`, probability to accept it) in the order to try them."""
        a, b = (self.order.place(token) for token in tokens)
        if a is None and b is None:
            return [(0, 0.0), (1, 0.0)]  # two rare ones: so improbable that both are rejected
        if a is None or (b is not None and b < a):
            assert b is not None
            return [(1, self.order.share_first(b)), (0, self._share_second(a, tokens[0]))]
        return [(0, self.order.share_first(a)), (1, self._share_second(b, tokens[1]))]

    def left(self) -> Tensor:
        """The residual [V] once both are rejected."""
        order = self.order
        left = (self.wanted - self.tail * order.passed_odds - self.tail_odds * order.passed_prob).clamp_min_(0.0)
        left[order.head] = (order.wanted - order.first - order.second).clamp_min(0.0)
        return left

    def _share_second(self, place: int | None, token: int) -> float:
        order = self.order
        if place is not None:
            return _share(float(order.wanted[place] - order.first[place]), float(order.second[place]))
        tried = float(self.tail[token]) * order.passed_odds + float(self.tail_odds[token]) * order.passed_prob
        return _share(float(self.wanted[token]), tried)


def _share(wanted: float, tried: float) -> float:
    return min(1.0, max(0.0, wanted / tried)) if tried > 0.0 else 0.0


def _others(proposal: Tensor, head: Tensor, raw: Tensor, mass: float) -> Tensor:
    """Mass of all tokens but each of the head [H]. Where one has nearly all of it, subtraction would leave noise."""
    others = mass - raw
    if len(raw) and float(raw.max()) > 0.5 * mass:
        most = int(raw.argmax())
        rest = proposal.clone()
        rest[head[most]] = 0.0
        others[most] = rest.sum(dtype=torch.float64)
    return others


def _after(x: Tensor) -> Tensor:
    sums = x.flip(0).cumsum(0).flip(0)
    return torch.cat((sums[1:], sums.new_zeros(min(1, len(x)))))


def _before(x: Tensor) -> Tensor:
    sums = x.cumsum(0)
    return torch.cat((sums.new_zeros(min(1, len(x))), sums[:-1]))
