"""How good drafted K/V is: what the target says over it, beside what it says over exact K/V, token by token.

The definitions are those every figure of speculative prefill uses: a prompt whose first and last tokens are always
recomputed, then continuation tokens scored with the true text in front of them. Knows maps and windows; not files.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.prefill.calibration.dense import LayerActivations
from forerun.prefill.calibration.model_pair import FIRST, TAIL, DenseTailAttention, ModelPair, choose, with_ends
from forerun.prefill.maps import Maps


@dataclass
class DraftQuality:
    """Per window and continuation token, [N, ahead] each."""

    kl: Tensor
    same: Tensor  # the likeliest token is that of exact prefill
    right: Tensor  # the likeliest token is that of the text
    exact_right: Tensor

    @property
    def agreement(self) -> float:
        return float(self.same.float().mean())

    @property
    def divergence(self) -> float:
        return float(self.kl.mean())


@torch.no_grad()
def score(
    pair: ModelPair, maps: Maps, windows: Tensor, ahead: int, share: float, by_tail: bool = True, batch: int = 4
) -> DraftQuality:
    """Windows [N, T] end with `ahead` continuation tokens. `by_tail`: choose what to recompute by the target's own tail
    over drafted K/V, not by the source's attention."""
    parts = [_score(pair, maps, w.to(pair.target.device).long(), ahead, share, by_tail) for w in windows.split(batch)]
    return DraftQuality(
        *(torch.cat([getattr(p, name) for p in parts]) for name in ("kl", "same", "right", "exact_right"))
    )


def _score(pair: ModelPair, maps: Maps, tokens: Tensor, ahead: int, share: float, by_tail: bool) -> DraftQuality:
    stop = tokens.shape[1]
    end = stop - ahead - TAIL
    exact = pair.target.trace(tokens, keep_kv=False)
    features, tail_attention = pair.read(tokens, slice(end, end + TAIL), exact)
    drafted = maps(features.to(maps.down.dtype)).to(pair.target.dtype)
    if by_tail:
        tail_attention = tail_attention_over_draft(pair, exact, drafted, end)
    rows = with_ends(choose(tail_attention, end, share), end, stop)
    x = pair.recompute(exact, drafted, rows)[:, -ahead - 1 : -1]
    wanted = exact.hidden[-1][:, -ahead - 1 : -1]
    return compare(pair, wanted, x, tokens[:, -ahead:])


def tail_attention_over_draft(pair: ModelPair, exact: LayerActivations, drafted: Tensor, end: int) -> Tensor:
    """What the target's own tail looks at over drafted K/V."""
    few = torch.zeros(drafted.shape[0], 0, dtype=torch.int64, device=drafted.device)
    tail_attention = DenseTailAttention(slice(FIRST, FIRST + TAIL), pair.target.config.scale)
    pair.recompute(exact, drafted, with_ends(few, end, end + TAIL), tail_attention)
    return tail_attention.mean(drafted)


def compare(pair: ModelPair, exact: Tensor, drafted: Tensor, tokens: Tensor) -> DraftQuality:
    """Next-token distributions at hidden states [B, N, hidden] against each other and against the text [B, N]."""
    found = []
    for p, q, text in zip(exact, drafted, tokens, strict=True):
        wanted, given = (F.log_softmax(pair.target.logits(h).float(), -1) for h in (p, q))
        kl = F.kl_div(given, wanted, log_target=True, reduction="none").sum(-1)
        best, ours = wanted.argmax(-1), given.argmax(-1)
        found.append((kl, ours == best, ours == text, best == text))
    return DraftQuality(*(torch.stack(column) for column in zip(*found, strict=True)))
