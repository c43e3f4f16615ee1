"""Quality of drafted K/V on held-out windows, its curve against cost, and the default share of recomputed tokens.

A window is a prompt and its continuation. The prompt's first and last tokens are always recomputed; continuation tokens
are scored with the true text before them. Quality compares the target's next-token distributions over drafted K/V with
those over exact K/V; cost counts multiply-adds of matrices. Knows maps and windows; not files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.core.progress import track
from forerun.models.config import ModelConfig
from forerun.prefill.calibration.model_pair import FIRST_TOKENS, TAIL_TOKENS, DraftedWindows, ModelPair
from forerun.prefill.gate import PLAIN
from forerun.prefill.maps import Maps
from forerun.prefill.profile import CurvePoint

CURVE_SHARES = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3)  # of recomputed tokens, at which the curve is measured
MAX_DEFAULT_COST = 0.6  # of exact prefill: beyond it a default saves too little for what it loses
FALLBACK_MAX_SHARE = 0.1  # of a default where the quality is out of reach: tasks go as well as with more

QualityByKind = dict[str, list[dict[str, float]]]  # kind of window -> per share its agreement and divergence


@dataclass
class WindowQuality:
    """Of held-out windows at CURVE_SHARES: [windows, shares] each."""

    top1: np.ndarray
    kl: np.ndarray
    uncovered: np.ndarray  # attention of the tail on what stays drafted

    @classmethod
    def empty(cls) -> WindowQuality:
        return cls(*(np.zeros((0, len(CURVE_SHARES))) for _ in range(3)))

    def add(self, columns: Sequence[tuple[Tensor, Tensor, Tensor]]) -> None:
        """Some windows: for each share agreement, KL and `uncovered`, [windows] each."""
        for name, values in zip(("top1", "kl", "uncovered"), zip(*columns, strict=True), strict=True):
            new = torch.stack([value.float().cpu() for value in values], 1).numpy().astype(np.float64)
            setattr(self, name, np.concatenate((getattr(self, name), new)))

    def record(self) -> dict[str, list[list[float]]]:
        names = ("top1", "kl", "uncovered")
        return {name: [[float(f"{v:.4g}") for v in row] for row in getattr(self, name)] for name in names}


@dataclass
class DraftQuality:
    """Per window and continuation token, [N, ahead] each."""

    kl: Tensor
    same: Tensor  # whether the likeliest token is that of exact prefill
    right: Tensor  # whether the likeliest token is that of the text
    exact_right: Tensor  # the same of exact prefill

    @property
    def agreement(self) -> float:
        return float(self.same.float().mean())

    @property
    def divergence(self) -> float:
        return float(self.kl.mean())


def evaluate(pair: ModelPair, maps: Maps, windows: Tensor, ahead: int, share: float, batch: int = 4) -> DraftQuality:
    """Windows [N, T] end with `ahead` continuation tokens; `share` of each prompt is recomputed."""
    parts = [quality_at(pair.draft(maps, rows, ahead), share) for rows in windows.split(batch)]
    names = ("kl", "same", "right", "exact_right")
    return DraftQuality(*(torch.cat([getattr(part, name) for part in parts]) for name in names))


@torch.no_grad()
def quality_at(drafted: DraftedWindows, share: float) -> DraftQuality:
    """Of windows whose target recomputes this share of the prompt, chosen by its own tail."""
    return compare(drafted, drafted.recompute(drafted.choose(share)))


@torch.no_grad()
def compare(drafted: DraftedWindows, x: Tensor) -> DraftQuality:
    """Next-token distributions at hidden states x [B, R, hidden], which end with the continuation's, against those of
    exact prefill and against the text."""
    found, ahead, target = [], drafted.ahead, drafted.pair.target
    predicting = slice(-ahead - 1, -1)
    exact, tokens = drafted.exact.hidden[-1][:, predicting], drafted.tokens[:, -ahead:]
    for p, q, text in zip(exact, x[:, predicting], tokens, strict=True):
        wanted, given = (F.log_softmax(target.logits(h).float(), -1) for h in (p, q))
        kl = F.kl_div(given, wanted, log_target=True, reduction="none").sum(-1)
        best, ours = wanted.argmax(-1), given.argmax(-1)
        found.append((kl, ours == best, ours == text, best == text))
    return DraftQuality(*(torch.stack(column) for column in zip(*found, strict=True)))


# -- quality against cost ----------------------------------------------------------------------------------------------


def reading_cost(target: ModelConfig, draft: ModelConfig | None, base: int, top: int) -> float:
    """A token read by the source, in tokens of the target's prefill, without the maps; a draft runs `top` layers."""
    return base / target.num_layers if draft is None else top * draft.layer_macs / target.macs


def total_cost(target: ModelConfig, maps: Maps, reading: float, alone: bool, share: float, prompt: int) -> float:
    """Reading, maps and recomputing, the first tokens and the tail included, as a share of exact prefill.

    `alone`: recomputed tokens of a source that is the target start where its reading ended.
    """
    recomputed = min(1.0, share + (FIRST_TOKENS + TAIL_TOKENS) / prompt)
    left = 1.0 - maps.base / target.num_layers if alone else 1.0
    return reading + maps.macs / target.macs + recomputed * left


def measure_curve(
    pair: ModelPair,
    maps: Maps,
    windows: Tensor,
    kinds: Sequence[tuple[str, ...]],
    ahead: int,
    reading: float,
    batch: int,
    stop: Callable[[], bool | None],
    quiet: bool,
) -> tuple[list[CurvePoint], QualityByKind, WindowQuality]:
    """The curve over windows of plain text, the figures of every kind of window, of which each may have several, and
    those of every window. `stop` is asked after each batch; what is measured by then counts."""
    each = WindowQuality.empty()
    for rows in track(windows.split(batch), "measuring quality", quiet):
        drafted = pair.draft(maps, rows, ahead)  # one exact pass for all shares
        columns = []
        for share in CURVE_SHARES:
            chosen = drafted.choose(share)
            quality = compare(drafted, drafted.recompute(chosen))
            columns.append((quality.same.float().mean(1), quality.kl.mean(1), drafted.uncovered(chosen)))
        each.add(columns)
        if stop():
            break
    kinds = kinds[: len(each.kl)]
    marks = {kind: np.array([kind in window for window in kinds]) for kind in sorted(set().union(*kinds))}
    found: QualityByKind = {kind: [] for kind in marks}
    for at, share in enumerate(CURVE_SHARES):
        for kind, mark in marks.items():
            figures = {"top1": float(each.top1[mark, at].mean()), "kl": float(each.kl[mark, at].mean())}
            found[kind].append({"share": share, **figures, "windows": int(mark.sum())})
    plain = found.get(PLAIN) or next(iter(found.values()))
    prompt = windows.shape[1] - ahead
    costs = [total_cost(pair.target.config, maps, reading, pair.alone, share, prompt) for share in CURVE_SHARES]
    return [CurvePoint(p["share"], c, p["top1"], p["kl"]) for p, c in zip(plain, costs, strict=True)], found, each


def default_share(curve: Sequence[CurvePoint], quality: float) -> tuple[float, bool]:
    """The smallest share that reaches the quality within MAX_DEFAULT_COST, and whether any does. Where none does: the
    best one up to FALLBACK_MAX_SHARE, since more would cost every prompt and still not reach the quality."""
    sensible = [p for p in curve if p.cost <= MAX_DEFAULT_COST] or [min(curve, key=lambda p: p.cost)]
    good = [p for p in sensible if p.top1 >= quality]
    if good:
        return min(good, key=lambda p: p.share).share, True
    modest = [p for p in sensible if p.share <= FALLBACK_MAX_SHARE] or [min(sensible, key=lambda p: p.share)]
    return max(modest, key=lambda p: (p.top1, -p.share)).share, False
