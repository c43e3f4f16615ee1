"""How far an answer over drafted K/V is expected to be from exact prefill's, from what its tail attends to.

What can be seen while a prompt is drafted is `uncovered`: the share of the attention of the prompt's last tokens that
falls on drafted K/V which stays drafted. The KL to exact prefill grows with it, so that a non-decreasing curve is
fitted to held-out windows, and a margin over it that all but MISSING_SHARE of other held-out windows keep (split
conformal prediction). The ranking by which tokens are recomputed is known before any of them is, so that a
prompt of which too much would stay uncovered takes more of the same ranking in the same pass. Runs no model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MISSING_SHARE = 0.05  # of prompts like the calibration's whose KL may exceed its bound
MIN_WINDOWS = 20  # on either side of the split; of fewer a quantile of 95% says nothing
MAX_KNOTS = 32  # of the curve
PLAIN = "plain"  # kind of the windows that are text as it was found
# of prompts, by what a share leaves uncovered: only those beyond it have more recomputed. To recompute less of easy and
# more of all other prompts at equal cost was worse: what is left uncovered says how much is lost, not what more wins
DEEPEN_QUANTILE = 0.9


@dataclass(frozen=True)
class GateLevel:
    """Where a share of the tokens is recomputed: how much may stay uncovered before more are, and what comes of it."""

    share: float
    uncovered: float
    mean_share: float  # recomputed in the mean over calibration's windows, and their quality
    top1: float
    kl: float


@dataclass(frozen=True)
class DamageGate:
    """`knots`, `kl`: the fitted curve, both non-decreasing; `margin`: its bound over the curve."""

    knots: tuple[float, ...]
    kl: tuple[float, ...]
    margin: float
    windows: int  # that it was fitted on, on both sides of the split
    levels: tuple[GateLevel, ...] = ()  # from the smallest share to the largest: no prompt has more recomputed

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> DamageGate:
        levels = tuple(GateLevel(**level) for level in record["levels"])
        return cls(tuple(record["knots"]), tuple(record["kl"]), record["margin"], record["windows"], levels)

    @property
    def max_share(self) -> float:
        return self.levels[-1].share

    def level(self, share: float) -> float:
        """How much may stay uncovered where this share is recomputed."""
        return float(np.interp(share, [at.share for at in self.levels], [at.uncovered for at in self.levels]))

    def predict(self, uncovered: float) -> float:
        """Mean KL (nats) of the answer's next-token distributions to exact prefill's."""
        return float(np.interp(uncovered, self.knots, self.kl))

    def bound(self, uncovered: float) -> float:
        """The KL that 95% of prompts like the calibration's keep."""
        return self.margin * self.predict(uncovered)

    def knows(self, uncovered: float) -> bool:
        """Whether calibration has seen as much left uncovered."""
        return uncovered <= self.knots[-1]


def gate_of(windows: dict[str, Any], shares: Sequence[float]) -> DamageGate | None:
    """From the windows that a profile keeps; only those of text as it was found, where they are enough.

    Windows that were made to copy or to recall are damaged by other rules. With them the shipped pair's bound at 10%
    was 0.80 in the mean and kept by 120 of 120 prompts of other texts, without them it is 0.29 and kept by 117; the
    prediction 0.12 and 0.07, the KL itself 0.07.
    """
    plain = np.array([kind.split()[0] == PLAIN for kind in windows["kinds"]], dtype=bool)
    if plain.sum() < 2 * MIN_WINDOWS:
        plain[:] = True
    uncovered, kl, top1 = (np.array(windows[name], dtype=np.float64)[plain] for name in ("uncovered", "kl", "top1"))
    return fit_gate(shares, uncovered, kl, top1)


def fit_gate(
    shares: Sequence[float], uncovered: np.ndarray, kl: np.ndarray, top1: np.ndarray, least: int = MIN_WINDOWS
) -> DamageGate | None:
    """From held-out windows at several shares, [windows, shares] each: even ones for the curve, odd ones for the
    margin. None where there are too few."""
    if len(uncovered) < 2 * least:
        return None
    knots, values = _knots(*isotonic(uncovered[::2].ravel(), kl[::2].ravel()))
    curve = np.interp(uncovered[1::2], knots, values)
    ratios = (kl[1::2] / curve.clip(min=1e-6)).ravel()
    margin = conformal_quantile(ratios, MISSING_SHARE, kl.shape[1])
    levels = tuple(_level(share, np.asarray(shares), uncovered, kl, top1) for share in shares)
    return DamageGate(
        tuple(knots.round(5).tolist()), tuple(values.round(6).tolist()), round(margin, 4), len(kl), levels
    )


def _level(share: float, shares: np.ndarray, uncovered: np.ndarray, kl: np.ndarray, top1: np.ndarray) -> GateLevel:
    at = [np.interp(share, shares, row) for row in uncovered]
    level = float(np.quantile(at, DEEPEN_QUANTILE))
    needed = [max(share, float(np.interp(level, row[::-1], shares[::-1]))) for row in uncovered]
    means = [
        float(np.mean([np.interp(n, shares, row) for n, row in zip(needed, rows, strict=True)])) for rows in (top1, kl)
    ]
    return GateLevel(share, round(level, 5), round(float(np.mean(needed)), 5), round(means[0], 5), round(means[1], 6))


def isotonic(x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The non-decreasing step function nearest to the points (pool adjacent violators): x in order, and its values."""
    order = np.argsort(x, kind="stable")
    xs, blocks = np.asarray(x, dtype=np.float64)[order], list[tuple[float, int]]()
    for value in np.asarray(y, dtype=np.float64)[order].tolist():
        mean, count = value, 1
        while blocks and blocks[-1][0] >= mean:
            before, size = blocks.pop()
            mean, count = (before * size + mean * count) / (size + count), size + count
        blocks.append((mean, count))
    return xs, np.repeat([mean for mean, _ in blocks], [count for _, count in blocks])


def conformal_quantile(values: np.ndarray, missing: float, each: int = 1) -> float:
    """The value that a new one exceeds with a probability of at most `missing`; `each`: so many values that follow one
    another come from one window, and count as one."""
    count = len(values) // each
    rank = min(len(values), math.ceil((count + 1) * (1.0 - missing) * len(values) / max(1, count)))
    return float(np.sort(values)[rank - 1])


def _knots(xs: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The middle of each step of an isotonic fit and the ends, at most MAX_KNOTS, strictly increasing."""
    starts = np.flatnonzero(np.diff(values, prepend=-np.inf))
    ends = np.append(starts[1:], len(values))
    middles = [(float(xs[a:b].mean()), float(values[a])) for a, b in zip(starts, ends, strict=True)]
    points = [(float(xs[0]), middles[0][1]), *middles, (float(xs[-1]), middles[-1][1])]
    kept: list[tuple[float, float]] = []
    for x, value in points:
        if not kept or x > kept[-1][0] + 1e-5:
            kept.append((x, value))
    if len(kept) > MAX_KNOTS:
        kept = [kept[i] for i in np.linspace(0, len(kept) - 1, MAX_KNOTS).round().astype(int)]
    return np.array([x for x, _ in kept]), np.array([value for _, value in kept])
