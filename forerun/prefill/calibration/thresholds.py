"""How bad a check may look while the answer is still good: limits per signal and layer, from held-out text.

The signals are those of `prefill/checks.py`, taken from the same kind of spans, but here on whole windows whose answers
are known: the windows over which the stated quality holds say which values are harmless. A prompt has several spans of
many layers and signals, and one bad span costs it a repair, so limits are stretched until almost all such windows pass
as wholes.
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
from forerun.prefill.calibration.dense import LayerActivations
from forerun.prefill.calibration.evaluate import compare, tail_attention_over_draft
from forerun.prefill.calibration.model_pair import FIRST, TAIL, ModelPair, choose, with_ends
from forerun.prefill.checks import COSINES, SIGNALS, Scores
from forerun.prefill.maps import Maps
from forerun.prefill.plan import Policy

HARMLESS = 0.98  # share of the values of good windows that pass
PASSING = 0.98  # share of good windows whose spans all pass
STRETCH = 1.05  # by so much limits are widened at a time
STEPS = 60  # at most


@dataclass
class Seen:
    """Of some windows: what the checks said, and how the answer was."""

    values: dict[str, Tensor]  # signal -> [N, layers, spans]
    kl: Tensor  # [N]
    agreement: Tensor  # [N]


def thresholds(
    pair: ModelPair,
    maps: Maps,
    windows: Tensor,
    ahead: int,
    share: float,
    quality: float,
    tick: Callable[[], None],
    quiet: bool,
) -> dict[str, list[float]]:
    """Signal -> worst value that passes, layer by layer; `kl`: one for all. `tick` is called in between."""
    seen = []
    for rows in track(windows.split(1), "choosing thresholds", quiet):  # each has its checkpoints elsewhere
        seen.append(look(pair, maps, rows.to(pair.target.device).long(), ahead, share))
        tick()
    kl, agreement = (torch.cat([getattr(s, name) for s in seen]) for name in ("kl", "agreement"))
    # more than the drafts give at this share cannot be held, and to ask for it would only send good prompts back
    good = harmless(kl, agreement, min(quality, float(agreement.mean())))
    values = {signal: torch.cat([s.values[signal] for s in seen])[good] for signal in SIGNALS}
    # what good answers are apart anyway
    return {"kl": [round(float(kl[good].quantile(HARMLESS)), 6)]} | limits_for(values, pair.base)


def limits_for(values: dict[str, Tensor], base: int) -> dict[str, list[float]]:
    """For good windows with these values [N, layers, spans]: limits that most values keep, widened until PASSING of the
    windows keep them by the rule that prompts are judged by."""
    errors = {signal: 1.0 - v if signal in COSINES else v for signal, v in values.items()}
    by_layer = {signal: e.transpose(0, 1).flatten(1) for signal, e in errors.items()}  # [layers, values]
    worst = {signal: e.quantile(HARMLESS, 1).nan_to_num(0.0) for signal, e in by_layer.items()}  # [layers]
    spans = np.ones(values["key"].shape[2], dtype=bool)
    told = [Scores({s: v[n].numpy() for s, v in values.items()}, base, finite=spans) for n in range(len(values["key"]))]
    limits: dict[str, list[float]] = {}
    for step in range(STEPS):
        limits = {signal: _rounded(signal, STRETCH**step * limit) for signal, limit in worst.items()}
        passing = [scores.passed(limits, Policy().failing).all() for scores in told]
        if sum(passing) >= PASSING * len(passing):
            break
    return limits


def _rounded(signal: str, error: Tensor) -> list[float]:
    """Away from what is good, so that rounding fails nobody."""
    if signal in COSINES:
        return [math.floor(1e5 * (1.0 - e)) / 1e5 for e in error.tolist()]
    return [math.ceil(1e5 * e) / 1e5 for e in error.tolist()]


def harmless(kl: Tensor, agreement: Tensor, quality: float) -> Tensor:
    """Windows, the least divergent first, as many as agree with exact prefill in the mean as stated; at least half."""
    order = kl.argsort()
    means = agreement[order].cumsum(0) / torch.arange(1, len(order) + 1)
    enough = (means >= quality).nonzero().flatten()
    count = max((len(order) + 1) // 2, int(enough[-1]) + 1 if len(enough) else 0)
    return order[:count]


@torch.no_grad()
def look(pair: ModelPair, maps: Maps, tokens: Tensor, ahead: int, share: float) -> Seen:
    """A window [1, T] that ends with `ahead` continuation tokens."""
    stop = tokens.shape[1]
    end = stop - ahead - TAIL
    exact = pair.target.trace(tokens, keep_kv=False)
    features, _ = pair.read(tokens, slice(0, 0), exact)
    drafted = maps(features.to(maps.down.dtype)).to(pair.target.dtype)
    tail_attention = tail_attention_over_draft(pair, exact, drafted, end)
    chosen = choose(tail_attention, end, share)[0]
    places = checkpoints(end, chosen)
    rows = with_ends(torch.cat((chosen, places)).unique()[None], end, stop)
    x, values = _recompute(pair, exact, drafted, rows, places)
    scored = compare(pair, exact.hidden[-1][:, -ahead - 1 : -1], x[:, -ahead - 1 : -1], tokens[:, -ahead:])
    return Seen(values, scored.kl.mean(1).cpu(), scored.same.float().mean(1).cpu())


def checkpoints(end: int, chosen: Tensor) -> Tensor:
    """Entries of the checkpoints that a plan takes, [spans * span]: in each part of the prompt the span with the most
    tokens that are recomputed anyway, of equals the one in the middle."""
    spans, span = Policy().spans, Policy().span
    wanted = torch.zeros(end, device=chosen.device)
    wanted[chosen] = 1.0
    gain = wanted.unfold(0, span, 1).sum(-1)  # [starts]
    edges = [FIRST + i * (end - FIRST) // spans for i in range(spans + 1)]
    places = []
    for left, right in zip(edges, edges[1:], strict=False):
        at = torch.arange(left, right - span + 1, device=chosen.device)
        off = (at - (left + right - span) / 2).abs() / end  # below 1
        places.append(at[(gain[at] - off).argmax()] + torch.arange(span, device=chosen.device))
    return torch.cat(places)


def _recompute(
    pair: ModelPair, exact: LayerActivations, drafted: Tensor, rows: Tensor, places: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """As `Pair.recompute`, comparing what the rows at `places` compute with what was drafted for them."""
    target, config = pair.target, pair.target.config
    values = {s: torch.full((len(rows), config.num_layers, Policy().spans), float(s in COSINES)) for s in SIGNALS}
    parts = drafted.unflatten(-1, (pair.mapped, 2, config.kv_size))
    everyone = torch.arange(drafted.shape[1], device=rows.device)
    at = torch.searchsorted(rows, places.expand(len(rows), -1).contiguous())  # [B, C]
    x = _rows(exact.hidden[pair.base], rows)
    for i in range(pair.base, config.num_layers):
        q, k, v = target.project(x, i)
        guess = parts[:, :, i - pair.base]  # [B, T, 2, kv]
        found = _signals(pair, i, x, (q, k, v), guess[:, places], at, places)
        for signal, value in found.items():
            values[signal][:, i] = value.cpu()
        spread = rows[..., None].expand(-1, -1, config.kv_size)
        k, v = guess[:, :, 0].scatter(1, spread, k), guess[:, :, 1].scatter(1, spread, v)
        q, k = target.rotate(q, rows, i), target.rotate(k, everyone, i)
        x = target.finish(x, target.masked(q, k, v, rows, i), i)
    return x, values


def _rows(x: Tensor, at: Tensor) -> Tensor:
    """Rows [B, C] of [B, R, n]."""
    return x.gather(1, at[..., None].expand(-1, -1, x.shape[-1]))


def _signals(
    pair: ModelPair, i: int, x: Tensor, qkv: tuple[Tensor, Tensor, Tensor], guess: Tensor, at: Tensor, places: Tensor
) -> dict[str, Tensor]:
    """Signals of one layer, [B, spans] each: `guess` [B, C, 2, kv] was drafted for the rows `at`."""
    q, k, v = qkv
    found: dict[str, Tensor] = {}
    for signal, true, drafted in (("key", _rows(k, at), guess[:, :, 0]), ("value", _rows(v, at), guess[:, :, 1])):
        apart, norm = (_by_span(y.float().square().sum(-1)).sum(-1) for y in (drafted - true, true))
        found[signal] = (apart / norm.clamp_min(1e-20)).sqrt()
    if i + 1 < pair.target.config.num_layers:  # the engine's rows leave before the last layer's attention
        found |= {s: _by_span(c).mean(-1) for s, c in _cosines(pair, i, x, (q, k, v), guess, at, places).items()}
    return found


def _cosines(
    pair: ModelPair, i: int, x: Tensor, qkv: tuple[Tensor, Tensor, Tensor], guess: Tensor, at: Tensor, places: Tensor
) -> dict[str, Tensor]:
    """[B, C] each: attention of the rows `at` over the first entries and the checkpoints, computed and drafted."""
    target, config = pair.target, pair.target.config
    q, k, v = qkv
    keys = torch.cat((torch.arange(FIRST, device=places.device), places))
    visible = keys <= places[:, None]  # [C, FIRST + C]
    window = config.window(i)
    if window is not None:
        visible &= keys > places[:, None] - window
    query = target.rotate(_rows(q, at), places, i)
    outs = []
    for own in ((_rows(k, at), _rows(v, at)), (guess[:, :, 0], guess[:, :, 1])):
        key, value = (torch.cat((y[:, :FIRST], mine), 1) for y, mine in zip((k, v), own, strict=True))
        value = value.unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            query, target.rotate(key, keys, i), value, attn_mask=visible, scale=config.scale, enable_gqa=True
        )
        outs.append(out.transpose(1, 2).flatten(2).float())  # [B, C, Hq * D]
    streams = [_rows(x, at).float() + _added(pair, i, out.to(x.dtype)).float() for out in outs]
    return {
        "attention": F.cosine_similarity(outs[0], outs[1], dim=-1),
        "hidden": F.cosine_similarity(streams[0], streams[1], dim=-1),
    }


def _added(pair: ModelPair, i: int, out: Tensor) -> Tensor:
    """What an attention output adds to the stream."""
    weights, config = pair.target.weights, pair.target.config
    h = F.linear(out, weights[f"layers.{i}.o"])
    return (
        F.rms_norm(h, h.shape[-1:], weights[f"layers.{i}.post_attn_norm"], config.norm_eps) if config.post_norms else h
    )


def _by_span(values: Tensor) -> Tensor:
    """[B, C] -> [B, spans, entries of each]."""
    return values.unflatten(1, (Policy().spans, -1))
