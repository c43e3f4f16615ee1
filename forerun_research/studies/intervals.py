"""How sure a figure is: Wilson intervals of shares, bootstrap intervals of anything, and the area under a ROC curve.

Numbers in, numbers out; the bootstrap draws with a fixed seed, so that a report of the same results is the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

BOOTSTRAP_DRAWS = 2000
_Z = 1.959964  # of a 95% interval


def wilson(hits: float, count: int) -> tuple[float, float]:
    """The 95% interval of a share of which `hits` of `count` were seen; sensible at 0 and 1 too."""
    if not count:
        return 0.0, 1.0
    share, z2 = hits / count, _Z * _Z
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = _Z * math.sqrt(share * (1 - share) / count + z2 / (4 * count * count)) / (1 + z2 / count)
    return max(0.0, middle - half), min(1.0, middle + half)


def bootstrap(
    columns: Sequence[Sequence[float] | np.ndarray],
    figure: Callable[..., float] = lambda values: float(values.mean()),
    seed: int = 0,
) -> tuple[float, float]:
    """The 95% interval of a figure of columns whose rows belong together: rows are drawn with replacement."""
    arrays = [np.asarray(column, dtype=np.float64) for column in columns]
    count = len(arrays[0])
    if count < 2:
        return math.nan, math.nan
    draw = np.random.default_rng(seed)
    found = []
    for _ in range(BOOTSTRAP_DRAWS):
        rows = draw.integers(0, count, count)
        value = figure(*(array[rows] for array in arrays))
        if math.isfinite(value):
            found.append(value)
    if not found:
        return math.nan, math.nan
    low, high = np.quantile(found, [0.025, 0.975])
    return float(low), float(high)


def relative(scores: Sequence[float], exact: Sequence[float]) -> tuple[float, float, float]:
    """Scores as a share of exact prefill's on the same prompts, with its interval; nan where exact scores nothing."""

    def share(ours: np.ndarray, theirs: np.ndarray) -> float:
        return float(ours.mean() / theirs.mean()) if theirs.mean() else math.nan

    ours, theirs = np.asarray(scores, dtype=np.float64), np.asarray(exact, dtype=np.float64)
    return (share(ours, theirs), *bootstrap([ours, theirs], share))


def auc(signal: Sequence[float], unsafe: Sequence[bool]) -> float:
    """The probability that an unsafe case has the larger signal than a safe one, ties counting half; nan without
    both."""
    values, marks = np.asarray(signal, dtype=np.float64), np.asarray(unsafe, dtype=bool)
    bad, good = values[marks], values[~marks]
    if not len(bad) or not len(good):
        return math.nan
    wins = (bad[:, None] > good[None]).sum() + 0.5 * (bad[:, None] == good[None]).sum()
    return float(wins / (len(bad) * len(good)))
