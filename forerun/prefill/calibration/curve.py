"""Quality against cost on held-out text, and the share of recomputed tokens that is worth its cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from forerun.core.progress import track
from forerun.prefill.calibration.cost import whole_cost
from forerun.prefill.calibration.evaluate import DraftQuality, compare, tail_attention_over_draft
from forerun.prefill.calibration.model_pair import TAIL, ModelPair, choose, with_ends
from forerun.prefill.maps import Maps
from forerun.prefill.profile import CurvePoint

SHARES = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3)
MOST_COST = 0.6  # of exact prefill: beyond it a default saves too little for what it loses
ENOUGH = 0.1  # share that a default recomputes where the quality is out of reach: tasks go as well as with more
PLAIN = "plain"

Kinds = dict[str, list[dict[str, float]]]  # kind of window -> per share its agreement and divergence


def measure(
    pair: ModelPair,
    maps: Maps,
    windows: Tensor,
    kinds: Sequence[str],
    ahead: int,
    reading: float,
    batch: int,
    tick: Callable[[], None],
    quiet: bool,
) -> tuple[list[CurvePoint], Kinds]:
    """The curve over windows of plain text, and the figures of every kind of window. `tick` is called in between."""
    same: dict[float, list[Tensor]] = {share: [] for share in SHARES}
    kl: dict[float, list[Tensor]] = {share: [] for share in SHARES}
    for rows in track(windows.split(batch), "measuring quality", quiet):
        for share, scored in _scored(pair, maps, rows.to(pair.target.device).long(), ahead):
            same[share].append(scored.same.float().mean(1).cpu())
            kl[share].append(scored.kl.mean(1).cpu())
        tick()
    marks = {kind: torch.tensor([k == kind for k in kinds]) for kind in sorted(set(kinds))}
    found: Kinds = {kind: [] for kind in marks}
    for share in SHARES:
        agreement, divergence = torch.cat(same[share]), torch.cat(kl[share])
        for kind, mark in marks.items():
            figures = {"top1": float(agreement[mark].mean()), "kl": float(divergence[mark].mean())}
            found[kind].append({"share": share, **figures})
    plain = found.get(PLAIN) or next(iter(found.values()))
    prompt = windows.shape[1] - ahead
    costs = [whole_cost(pair.target.config, maps, reading, pair.alone, share, prompt) for share in SHARES]
    return [CurvePoint(p["share"], c, p["top1"], p["kl"]) for p, c in zip(plain, costs, strict=True)], found


@torch.no_grad()
def _scored(pair: ModelPair, maps: Maps, tokens: Tensor, ahead: int) -> Iterator[tuple[float, DraftQuality]]:
    """As `evaluate.score`, for all shares after one exact pass."""
    stop = tokens.shape[1]
    end = stop - ahead - TAIL
    exact = pair.target.trace(tokens, keep_kv=False)
    features, _ = pair.read(tokens, slice(0, 0), exact)
    drafted = maps(features.to(maps.down.dtype)).to(pair.target.dtype)
    tail_attention = tail_attention_over_draft(pair, exact, drafted, end)
    for share in SHARES:
        x = pair.recompute(exact, drafted, with_ends(choose(tail_attention, end, share), end, stop))
        yield share, compare(pair, exact.hidden[-1][:, -ahead - 1 : -1], x[:, -ahead - 1 : -1], tokens[:, -ahead:])


def best_share(curve: Sequence[CurvePoint], quality: float) -> tuple[float, bool]:
    """The smallest share that reaches the quality at a sensible cost; else the best of those up to ENOUGH, since more
    would cost every prompt and still not hold what was asked. Whether it reaches."""
    sensible = [p for p in curve if p.cost <= MOST_COST] or [min(curve, key=lambda p: p.cost)]
    good = [p for p in sensible if p.top1 >= quality]
    if good:
        return min(good, key=lambda p: p.share).share, True
    modest = [p for p in sensible if p.share <= ENOUGH] or [min(sensible, key=lambda p: p.share)]
    return max(modest, key=lambda p: (p.top1, -p.share)).share, False
