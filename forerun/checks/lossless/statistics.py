"""Statistics of `forerun check lossless`: the exact law of a short answer in cells, how well samples fit it, and how
large a difference so many samples would show. Knows no engine: logits come from a callable.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

MIN_EXPECTED_SAMPLES = 5.0  # samples a cell must expect, for chi-square to hold

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Cells:
    """The law of an answer's first tokens, as probabilities of beginnings: the likeliest ones are looked into, token by
    token; what is too rare to be counted alone is one cell together."""

    probs: dict[Tokens, float]  # () stands for everything else
    expanded: dict[Tokens, Tensor]  # beginning -> distribution [V] of the next token

    def of(self, answer: Tokens) -> Tokens:
        size = 0
        while answer[:size] in self.expanded:
            size += 1
        return answer[:size] if answer[:size] in self.probs else ()


def cells(probs: Callable[[Tokens], Tensor], length: int, most: int, samples: int) -> Cells:
    """`probs`: the target's distribution [V] after a beginning of the answer. Looks into `most` beginnings, likeliest
    first, all shorter than `length`; cells that would expect fewer than a few of the samples are put together."""
    expanded: dict[Tokens, Tensor] = {}
    leaves: dict[Tokens, float] = {(): 1.0}
    while len(expanded) < most:
        short = [beginning for beginning in leaves if len(beginning) < length]
        if not short:
            break
        beginning = max(short, key=lambda b: leaves[b])
        prob, after = leaves.pop(beginning), probs(beginning).double().cpu()
        expanded[beginning] = after
        for token in (after * prob * samples >= MIN_EXPECTED_SAMPLES).nonzero()[:, 0].tolist():
            leaves[(*beginning, token)] = prob * float(after[token])
    rest = 1.0 - sum(leaves.values())
    return Cells({**leaves, (): max(rest, 0.0)}, expanded)


@dataclass(frozen=True)
class Fit:
    """Chi-square of samples against their law."""

    samples: int
    cells: int
    statistic: float
    p_value: float
    distance: float  # total variation between samples and law, most of which is probability


def fit(law: Cells, answers: Iterable[Tokens]) -> Fit:
    counts = Counter(law.of(answer) for answer in answers)
    total = sum(counts.values())
    merged, seen = _merge(law, counts, total)
    statistic = sum((n - total * p) ** 2 / (total * p) for n, p in zip(seen, merged, strict=True) if p > 0.0)
    if any(n and p <= 0.0 for n, p in zip(seen, merged, strict=True)):
        statistic = math.inf  # something came that cannot come
    distance = 0.5 * sum(abs(n / total - p) for n, p in zip(seen, merged, strict=True))
    freedom = max(1, len(merged) - 1)
    return Fit(total, len(merged), statistic, survival(statistic, freedom), distance)


def _merge(law: Cells, counts: Counter[Tokens], total: int) -> tuple[list[float], list[int]]:
    """Everything else has a cell of its own only if it expects enough; else it joins the smallest other."""
    order = sorted(law.probs, key=lambda cell: law.probs[cell], reverse=True)
    probs, seen = [law.probs[c] for c in order if c != ()], [counts[c] for c in order if c != ()]
    rest = law.probs[()]
    if rest * total >= MIN_EXPECTED_SAMPLES or not probs:
        return [*probs, rest], [*seen, counts[()]]
    probs[-1] += rest
    seen[-1] += counts[()]
    return probs, seen


def survival(statistic: float, freedom: int) -> float:
    """Chance that chi-square exceeds this."""
    if math.isinf(statistic):
        return 0.0
    return float(torch.special.gammaincc(*torch.tensor((freedom / 2.0, statistic / 2.0), dtype=torch.float64)))


def detectable(samples: int, num_cells: int, significance: float, power: float) -> float:
    """The total variation distance from the law that so many samples show with this probability, whatever its shape.

    Of all differences with a distance d, the one that chi-square sees worst has a noncentrality of 4 d^2 a sample.
    """
    freedom = max(1, num_cells - 1)
    critical = _bisect(lambda x: survival(x, freedom) <= significance, 1e6)
    needed = _bisect(lambda shift: _noncentral(critical, freedom, shift) >= power, 1e6)
    return min(1.0, math.sqrt(needed / (4.0 * samples)))


def _noncentral(statistic: float, freedom: int, shift: float) -> float:
    """Chance that noncentral chi-square exceeds this: central ones, weighed by Poisson's law."""
    half = shift / 2.0
    spread = 10.0 * math.sqrt(half) + 20.0
    first, last = max(0, int(half - spread)), int(half + spread)
    j = torch.arange(first, last + 1, dtype=torch.float64)
    log_weight = j * math.log(half) - half - torch.lgamma(j + 1.0) if half > 0 else torch.where(j > 0, -math.inf, 0.0)
    tails = torch.special.gammaincc(freedom / 2.0 + j, torch.full_like(j, statistic / 2.0))
    return float((log_weight.exp() * tails).sum())


def _bisect(reached: Callable[[float], bool], high: float) -> float:
    """Least number for which `reached` holds, of those above it all hold."""
    low = 0.0
    for _ in range(100):
        middle = (low + high) / 2.0
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high
