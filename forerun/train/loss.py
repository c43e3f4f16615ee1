"""The loss of every kind of drafter: cross entropy to the target's own distributions, where the draft is still of use.

A row at depth j counts by the target's probability of the j tokens before it, which is the chance that a draft gets
there (PARD-2). The head's gradient is written out, some rows at a time: logits of all rows would not fit in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from forerun.prefill.calibration.dense import DenseModel
from forerun.train.layout import RowLayout

LOSS_IDS = 65_535  # first token ids that the loss compares: rarer ones would triple its cost
TEXT_WEIGHT = 0.4  # of the text's own rows: the draft model predicts those well before any training
CHUNK_ROWS = 4096  # of logits at a time
ODDS_RANGE = (1e-4, 1.0 - 1e-4)  # of a probability whose odds are read: bf16 knows no more


@dataclass
class Teaching:
    """The target's distributions over windows [B, length]."""

    probs: Tensor  # [B, length, columns] of the ids that are compared; further columns are zero
    log_next: Tensor  # [B, length] log probability of the token that follows in the text
    best: Tensor  # [B, length] column of the likeliest token; -1: it is none of the ids
    hidden: list[Tensor] = field(default_factory=list)  # [B, length, hidden] at the depths that were asked for
    kv: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # of layers: K (rotated), V [B, Hkv, length, D]


@torch.no_grad()
def teach(
    target: DenseModel,
    tokens: Tensor,
    following: Tensor,
    ids: Tensor,
    extra_columns: int = 0,
    depths: Sequence[int] = (),
    kv_layers: Sequence[int] = (),
) -> Teaching:
    """`following`: the token after each position, [B, length]. `ids`: [columns] those that are compared."""
    activations = target.trace(tokens, keep_kv=bool(kv_layers))
    traced, positions = activations.hidden, torch.arange(tokens.shape[1], device=tokens.device)
    head = (target.embed if target.config.tie_embeddings else target.weights["head"])[:LOSS_IDS]
    flat, wanted = target._norm(traced[-1], "final_norm").flatten(0, 1), following.flatten()
    probs = torch.zeros(len(flat), len(ids) + extra_columns, dtype=target.dtype, device=flat.device)
    log_next = torch.full((len(flat),), -12.0, device=flat.device)  # of tokens beyond the ids
    best, column = torch.empty_like(wanted), torch.full((len(head),), -1, device=flat.device)
    column[ids] = torch.arange(len(ids), device=flat.device)
    for lo in range(0, len(flat), CHUNK_ROWS):
        part = slice(lo, lo + CHUNK_ROWS)
        logs = (flat[part] @ head.T).log_softmax(-1, dtype=torch.float32)
        probs[part, : len(ids)] = (logs if len(ids) == len(head) else logs[:, ids]).exp().to(probs.dtype)
        best[part] = column[logs.argmax(-1)]
        inside = wanted[part] < len(head)
        found = logs.gather(1, wanted[part].clamp(max=len(head) - 1)[:, None])[:, 0]
        log_next[part] = torch.where(inside, found, log_next[part])
    hidden, kv = [traced[depth] for depth in depths], []
    for i in kv_layers:
        k, v = activations.kv[i]
        kv.append((target.rotate(k, positions, i), v.unflatten(-1, (-1, target.config.head_dim)).transpose(1, 2)))
    shape = tokens.shape
    return Teaching(probs.view(*shape, -1), log_next.view(shape), best.view(shape), hidden, kv)


def row_weights(log_next: Tensor, layout: RowLayout) -> Tensor:
    """[B, rows]: the target's probability of the tokens between a mask's start and itself."""
    before = torch.nn.functional.pad(log_next.cumsum(1), (1, 0))  # [B, length + 1], of the tokens before a position
    weights = (before[:, layout.positions] - before[:, layout.starts]).exp()
    weights[:, : layout.length] = TEXT_WEIGHT
    return weights


@dataclass
class Outcome:
    loss: Tensor  # [] left on the device: reading it waits
    accepted: Tensor  # [B, rows] 1 where a row's likeliest token is the target's: a greedy answer accepts it
    weights: Tensor  # [B, rows] of the loss, 1 together
    odds: Tensor | None = None  # [B, rows] logarithm of the odds of a row's likeliest token, by its own distribution


def backward(
    hidden: Tensor,
    head: Tensor,
    teaching: Teaching,
    layout: RowLayout,
    by_depth: Tensor | None = None,
    learned: Tensor | None = None,
) -> Outcome:
    """Adds the loss's gradient to everything `hidden` [B, rows, width] depends on. `by_depth` [depths, 2] collects
    agreement of the likeliest tokens, by depth: hits and rows. `learned`: [columns, r] a parameter that stands beside
    the head and reads the last r values of a row."""
    batch, rows = hidden.shape[:2]
    weights = row_weights(teaching.log_next, layout).flatten()
    weights = weights / weights.sum()
    first = torch.arange(batch, device=hidden.device)[:, None] * teaching.log_next.shape[1]
    source = (first + layout.positions).flatten()  # of each row, where the teaching has its distribution
    flat, wanted, best = hidden.detach().flatten(0, 1), teaching.probs.flatten(0, 1), teaching.best.flatten()
    gradient, total = torch.empty_like(flat), torch.zeros((), device=flat.device)
    accepted, odds = torch.empty(len(flat), device=flat.device), torch.empty(len(flat), device=flat.device)
    if learned is not None:
        head = torch.cat((head, learned.detach().to(head.dtype)), 1)
        learned.grad = torch.zeros_like(learned) if learned.grad is None else learned.grad
    own = torch.zeros(layout.length, dtype=torch.long, device=flat.device)
    depths = torch.cat((own, layout.depths)).repeat(batch) if by_depth is not None else None
    for lo in range(0, batch * rows, CHUNK_ROWS):
        part = slice(lo, lo + CHUNK_ROWS)
        target = wanted[source[part]]  # [rows, columns]
        logs = (flat[part] @ head.T).log_softmax(-1, dtype=torch.float32)
        mass = target.sum(-1, keepdim=True, dtype=torch.float32)  # below 1 where the target's token is no column
        total -= (weights[part] * (logs * target).sum(-1)).sum()
        top = logs.max(-1)
        accepted[part] = hits = (top.indices == best[source[part]]).float()
        odds[part] = top.values.exp().clamp(*ODDS_RANGE).logit()
        if by_depth is not None and depths is not None:
            by_depth.index_add_(0, depths[part], torch.stack((hits, torch.ones_like(hits)), 1))
        probs = logs.exp_()
        change = probs.mul_(mass).sub_(target).mul_(weights[part, None]).to(head.dtype)
        gradient[part] = change @ head
        if learned is not None and learned.grad is not None:
            learned.grad += (change.T @ flat[part, -learned.shape[1] :]).float()
    hidden.backward(gradient.view_as(hidden))
    return Outcome(total, accepted.view(batch, rows), weights.view(batch, rows), odds.view(batch, rows))
