"""What the gate of a profile knows, from the held-out windows that its file keeps: AUC, coverage, KL at equal cost.

    python -m forerun_research.scripts.gate_windows PROFILE

Calibration leaves KL, agreement and what was uncovered of every held-out window at each share of recomputed tokens. Of
these, without a model: the AUC of `uncovered` for a KL above the median within one share, over all windows and within
each kind of text; how many windows keep their bound where all of their kind are left out of the fit; and KL with the
gate fitted on other windows, with a fixed share that costs as much, and with an oracle that knows each window's KL.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean

import numpy as np

from forerun.prefill.calibration.quality import CURVE_SHARES
from forerun.prefill.gate import fit_gate
from forerun.prefill.profile import Profile
from forerun_research.studies.intervals import auc, bootstrap, wilson

SHARES = np.array(CURVE_SHARES)
FOLDS = 5


def at_share(values: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """[windows] of values [windows, shares], each at a share of its own."""
    return np.array([np.interp(share, SHARES, row) for share, row in zip(shares, values, strict=True)])


def needed(level: float, uncovered: np.ndarray) -> np.ndarray:
    return np.array([np.interp(level, row[::-1], SHARES[::-1]) for row in uncovered])


def oracle(kl: np.ndarray, share: float) -> np.ndarray:
    """[windows] shares of the least total KL that cost as much as `share` of every window, by a price of a token."""
    low, high = 0.0, 100.0
    for _ in range(60):
        price = (low + high) / 2
        chosen = SHARES[(kl + price * SHARES).argmin(1)]
        low, high = (price, high) if chosen.mean() > share else (low, price)
    return SHARES[(kl + high * SHARES).argmin(1)]


def aucs(uncovered: np.ndarray, kl: np.ndarray, kinds: np.ndarray) -> list[tuple[str, float, float, float, float]]:
    """By share: AUC over all windows with its interval, and the mean of those within each kind."""
    rows = []
    for at, share in enumerate(CURVE_SHARES):
        seen, unsafe = uncovered[:, at], kl[:, at] > np.median(kl[:, at])
        low, high = bootstrap([seen, unsafe.astype(float)], auc)
        own = [kinds == kind for kind in np.unique(kinds)]
        within = [auc(seen[m].tolist(), (kl[m, at] > np.median(kl[m, at])).tolist()) for m in own if m.sum() >= 8]
        inside = fmean(within) if within else float("nan")
        rows.append((f"{share:.0%}", auc(seen.tolist(), unsafe.tolist()), low, high, inside))
    return rows


def left_out(uncovered: np.ndarray, kl: np.ndarray, top1: np.ndarray, kinds: np.ndarray) -> dict[str, tuple[int, int]]:
    """By kind: windows (at all shares) that keep the bound of a gate that saw none of them, and how many there are."""
    found = {}
    for kind in np.unique(kinds):
        own = kinds == kind
        gate = fit_gate(CURVE_SHARES, uncovered[~own], kl[~own], top1[~own])
        if gate is not None and own.sum() >= 8:
            bounds = np.vectorize(gate.bound)(uncovered[own])
            found[str(kind)] = int((kl[own] <= bounds).sum()), int(bounds.size)
    return found


def equal_cost(uncovered: np.ndarray, kl: np.ndarray, top1: np.ndarray) -> list[tuple[str, dict[str, float]]]:
    """By share: mean KL and its 95th percentile with a gate that was fitted on other windows, with a fixed share that
    costs as much, and with an oracle."""
    rows, fold = [], np.arange(len(kl)) % FOLDS
    for share in CURVE_SHARES[1:-1]:
        shares = np.full(len(kl), share)
        for part in range(FOLDS):
            gate = fit_gate(CURVE_SHARES, uncovered[fold != part], kl[fold != part], top1[fold != part])
            if gate is not None:
                shares[fold == part] = needed(gate.level(share), uncovered[fold == part]).clip(min=share)
        mean = float(shares.mean())
        ways = {"gate": shares, "fixed": np.full(len(kl), mean), "oracle": oracle(kl, mean)}
        row = {"share": mean}
        for way, own in ways.items():
            found = at_share(kl, own)
            row |= {way: float(found.mean()), f"{way} p95": float(np.quantile(found, 0.95))}
        rows.append((f"{share:.0%}", row))
    return rows


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="What the gate of a profile knows, from its held-out windows.")
    parser.add_argument("profile", type=Path)
    windows = Profile.load(parser.parse_args(given).profile).facts.get("windows")
    if not windows:
        print("the profile keeps no windows: calibrate again")
        return 1
    kl, top1, uncovered = (np.array(windows[name]) for name in ("kl", "top1", "uncovered"))
    kinds = np.array([kind.split()[-1] for kind in windows["kinds"]])
    print(f"{len(kl)} windows: {', '.join(f'{kind} {(kinds == kind).sum()}' for kind in np.unique(kinds))}")
    for share, value, low, high, within in aucs(uncovered, kl, kinds):
        print(f"AUC at {share}: {value:.3f} ({low:.3f} to {high:.3f}), within a kind {within:.3f}")
    for kind, (kept, count) in left_out(uncovered, kl, top1, kinds).items():
        low, high = wilson(kept, count)
        print(f"bound kept by {kind}, which the fit did not see: {kept} of {count} ({low:.3f} to {high:.3f})")
    for share, row in equal_cost(uncovered, kl, top1):
        ways = ", ".join(f"{way} {row[way]:.4f} (p95 {row[f'{way} p95']:.3f})" for way in ("fixed", "gate", "oracle"))
        print(f"KL at {share}, {row['share']:.3f} recomputed in the mean: {ways}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
