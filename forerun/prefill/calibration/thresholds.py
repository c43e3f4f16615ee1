"""Thresholds of the checks: the worst value of each signal and layer that still goes with a good answer.

The signals are those of `prefill/checks.py`, taken from the same kind of spans, but here on held-out windows whose
exact answers are known. The windows over which the stated quality holds define which values are harmless. A prompt has
several spans of many layers and signals, and one bad span costs it another round of recomputing, so limits are widened
until almost all such windows pass as wholes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.core.progress import track
from forerun.prefill.calibration.model_pair import FIRST_TOKENS, DraftedWindows, ModelPair, take_rows, with_ends
from forerun.prefill.calibration.quality import compare
from forerun.prefill.checks import COSINES, SIGNALS, Scores
from forerun.prefill.maps import Maps
from forerun.prefill.plan import Policy, span_starts, window_sums

HARMLESS_QUANTILE = 0.98  # of the values of good windows: the first limits
MIN_PASSING_SHARE = 0.98  # of good windows whose spans all pass
WIDENING_FACTOR = 1.05  # of the limits, at a time
MAX_WIDENINGS = 60


@dataclass
class WindowSignals:
    """Of some windows: the signals of their checks, and the quality of their answers."""

    values: dict[str, Tensor]  # signal -> [N, layers, spans]
    kl: Tensor  # [N]
    agreement: Tensor  # [N]


def choose_thresholds(
    pair: ModelPair,
    maps: Maps,
    windows: Tensor,
    ahead: int,
    share: float,
    quality: float,
    stop: Callable[[], bool | None],
    quiet: bool,
) -> dict[str, list[float]]:
    """Signal -> worst value that passes, layer by layer; `kl`: one for all. `stop` is asked after each window."""
    seen = []
    for rows in track(windows.split(1), "choosing thresholds", quiet):  # each has its checks elsewhere
        seen.append(measure_signals(pair, maps, rows, ahead, share))
        if stop():
            break
    kl, agreement = (torch.cat([getattr(s, name) for s in seen]) for name in ("kl", "agreement"))
    # a quality that the drafts do not reach at this share cannot be required: it would only fail good prompts
    good = harmless_windows(kl, agreement, min(quality, float(agreement.mean())))
    values = {signal: torch.cat([s.values[signal] for s in seen])[good] for signal in SIGNALS}
    return {"kl": [round(float(kl[good].quantile(HARMLESS_QUANTILE)), 6)]} | limits_for(values, pair.base)


def limits_for(values: dict[str, Tensor], base: int) -> dict[str, list[float]]:
    """For good windows with these values [N, layers, spans]: limits that most values keep, widened until
    MIN_PASSING_SHARE of the windows pass as prompts do."""
    errors = {signal: 1.0 - v if signal in COSINES else v for signal, v in values.items()}
    by_layer = {signal: e.transpose(0, 1).flatten(1) for signal, e in errors.items()}  # [layers, values]
    worst = {signal: e.quantile(HARMLESS_QUANTILE, 1).nan_to_num(0.0) for signal, e in by_layer.items()}  # [layers]
    windows, _, spans = values["key"].shape
    finite = np.ones(spans, dtype=bool)
    scored = [Scores({s: v[n].numpy() for s, v in values.items()}, base, finite=finite) for n in range(windows)]
    limits: dict[str, list[float]] = {}
    for step in range(MAX_WIDENINGS):
        limits = {signal: _rounded(signal, WIDENING_FACTOR**step * limit) for signal, limit in worst.items()}
        passing = [scores.passed(limits, Policy().failing).all() for scores in scored]
        if sum(passing) >= MIN_PASSING_SHARE * len(passing):
            break
    return limits


def _rounded(signal: str, error: Tensor) -> list[float]:
    """Rounded towards worse values, so that rounding fails no window."""
    if signal in COSINES:
        return [math.floor(1e5 * (1.0 - e)) / 1e5 for e in error.tolist()]
    return [math.ceil(1e5 * e) / 1e5 for e in error.tolist()]


def harmless_windows(kl: Tensor, agreement: Tensor, quality: float) -> Tensor:
    """Windows, the least divergent first, as many as agree with exact prefill in the mean as stated; at least half."""
    order = kl.argsort()
    means = agreement[order].cumsum(0) / torch.arange(1, len(order) + 1)
    enough = (means >= quality).nonzero().flatten()
    count = max((len(order) + 1) // 2, int(enough[-1]) + 1 if len(enough) else 0)
    return order[:count]


@torch.no_grad()
def measure_signals(pair: ModelPair, maps: Maps, window: Tensor, ahead: int, share: float) -> WindowSignals:
    """Of a window [1, T] that ends with `ahead` continuation tokens."""
    drafted = pair.draft(maps, window, ahead)
    chosen = drafted.choose(share)[0]
    positions = check_positions(drafted.end, chosen)
    rows = torch.cat((chosen, positions)).unique()[None]
    x, values = recompute_checked(drafted, rows, positions)
    quality = compare(drafted, x)
    return WindowSignals(values, quality.kl.mean(1).cpu(), quality.same.float().mean(1).cpu())


def check_positions(end: int, chosen: Tensor) -> Tensor:
    """Entries of the check spans that a plan takes, [spans * span]."""
    wanted = np.zeros(end, dtype=bool)
    wanted[chosen.cpu().numpy()] = True
    starts = span_starts(window_sums(wanted, Policy().span), FIRST_TOKENS, end, Policy())
    return (torch.tensor(starts)[:, None] + torch.arange(Policy().span)).flatten().to(chosen.device)


def recompute_checked(drafted: DraftedWindows, chosen: Tensor, positions: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """As `DraftedWindows.recompute`, with the signals [B, layers, spans] of the rows at `positions`, which are among
    those recomputed: what they compute against what was drafted for them."""
    pair, layers = drafted.pair, drafted.pair.target.config.num_layers
    rows = with_ends(chosen, drafted.end, drafted.tokens.shape[1])
    at = torch.searchsorted(rows, positions.expand(len(rows), -1).contiguous())  # [B, C]
    values = {s: torch.full((len(rows), layers, Policy().spans), float(s in COSINES)) for s in SIGNALS}

    def row_hook(i: int, x: Tensor, qkv: tuple[Tensor, Tensor, Tensor], guess: Tensor) -> None:
        for signal, value in _signals(pair, i, x, qkv, guess[:, positions], at, positions).items():
            values[signal][:, i] = value.cpu()

    return drafted.recompute(chosen, row_hook), values


def _signals(
    pair: ModelPair, i: int, x: Tensor, qkv: tuple[Tensor, Tensor, Tensor], guess: Tensor, at: Tensor, positions: Tensor
) -> dict[str, Tensor]:
    """Signals of one layer, [B, spans] each: `guess` [B, C, 2, kv] was drafted for the rows `at`."""
    q, k, v = qkv
    found: dict[str, Tensor] = {}
    for signal, true, drafted in (
        ("key", take_rows(k, at), guess[:, :, 0]),
        ("value", take_rows(v, at), guess[:, :, 1]),
    ):
        apart, norm = (_by_span(y.float().square().sum(-1)).sum(-1) for y in (drafted - true, true))
        found[signal] = (apart / norm.clamp_min(1e-20)).sqrt()
    if i + 1 < pair.target.config.num_layers:  # the engine's rows leave the pass before the last layer's attention
        found |= {s: _by_span(c).mean(-1) for s, c in _cosines(pair, i, x, (q, k, v), guess, at, positions).items()}
    return found


def _cosines(
    pair: ModelPair, i: int, x: Tensor, qkv: tuple[Tensor, Tensor, Tensor], guess: Tensor, at: Tensor, positions: Tensor
) -> dict[str, Tensor]:
    """[B, C] each: attention of the rows `at` over the first entries and the check spans, computed and drafted."""
    target, config = pair.target, pair.target.config
    q, k, v = qkv
    keys = torch.cat((torch.arange(FIRST_TOKENS, device=positions.device), positions))
    visible = keys <= positions[:, None]  # [C, FIRST_TOKENS + C]
    window = config.windows[i]
    if window is not None:
        visible &= keys > positions[:, None] - window
    query = target.rotate(take_rows(q, at), positions, i)
    outs = []
    for own in ((take_rows(k, at), take_rows(v, at)), (guess[:, :, 0], guess[:, :, 1])):
        key, value = (torch.cat((y[:, :FIRST_TOKENS], mine), 1) for y, mine in zip((k, v), own, strict=True))
        value = value.unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            query, target.rotate(key, keys, i), value, attn_mask=visible, scale=config.scale, enable_gqa=True
        )
        outs.append(out.transpose(1, 2).flatten(2).float())  # [B, C, Hq * D]
    streams = [take_rows(x, at).float() + target.attention_residual(out.to(x.dtype), i).float() for out in outs]
    return {
        "attention": F.cosine_similarity(outs[0], outs[1], dim=-1),
        "hidden": F.cosine_similarity(streams[0], streams[1], dim=-1),
    }


def _by_span(values: Tensor) -> Tensor:
    """[B, C] -> [B, spans, entries of each]."""
    return values.unflatten(1, (Policy().spans, -1))
