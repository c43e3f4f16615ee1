"""From logits to the next token, the same for a request whatever else is in its batch.

`distribution` is the target's distribution after penalties, temperature, top-k, top-p and min-p: whatever accepts or
rejects a guess must compare with this one. Randomness is a function of (seed, position), not of a shared generator, so
a request draws the same tokens alone, in any batch, and after a preemption. Knows no scheduler and no text.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.core import SamplingParams
from forerun.engine.sequence import Sequence, TokenLogprob
from forerun.models.decoder import Output

_HEAD = 1024  # likeliest tokens looked at first for top-p; a full sort only where they hold too little mass
_MASK = (1 << 64) - 1
_COLD = 1e-6  # below this a temperature is as good as none, and not yet zero in float32


@dataclass
class Sampled:
    token_id: int
    logprob: TokenLogprob | None = None


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing else (splitmix64 of both)."""
    z = (seed * 0x9E3779B97F4A7C15 + position * 0xD1342543DE82EF95 + 0x9E3779B97F4A7C15) & _MASK
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = ((z ^ (z >> shift)) * factor) & _MASK
    return ((z ^ (z >> 31)) >> 11) / (1 << 53)


def sample(output: Output, seqs: list[Sequence]) -> list[Sampled]:
    """The next token of each sequence; `output` has one row per sequence."""
    logits = output.logits  # [N, V] float32
    if all(s.params.greedy and not s.params.penalised and s.params.logprobs is None for s in seqs):
        greedy = logits.argmax(-1) if output.greedy is None else output.greedy
        return [Sampled(token) for token in greedy.tolist()]
    tokens = _choose(logits, seqs)
    return [Sampled(t, _logprob(logits[i], t, s.params)) for i, (t, s) in enumerate(zip(tokens, seqs, strict=True))]


def _choose(logits: Tensor, seqs: list[Sequence]) -> list[int]:
    shaped = penalise(logits, seqs)
    tokens = shaped.argmax(-1).tolist()
    rows = [i for i, s in enumerate(seqs) if not s.params.greedy]
    if rows:
        probs = distribution(shaped[rows], [seqs[i].params for i in rows])
        draws = [uniform(seqs[i].seed, len(seqs[i].tokens)) for i in rows]
        for i, token in zip(rows, draw(probs, draws), strict=True):
            tokens[i] = token
    return tokens


def penalise(logits: Tensor, seqs: list[Sequence]) -> Tensor:
    """Logit bias, then repetition, presence and frequency penalties, row by row; other rows are untouched."""
    rows = [i for i, s in enumerate(seqs) if s.params.penalised]
    if not rows:
        return logits
    logits = logits.clone()
    for i in rows:
        _penalise_row(logits[i], seqs[i])
    return logits


def _penalise_row(row: Tensor, seq: Sequence) -> None:
    p, device = seq.params, row.device
    if p.logit_bias:
        row[torch.tensor(list(p.logit_bias), device=device)] += torch.tensor(list(p.logit_bias.values()), device=device)
    if p.repetition_penalty != 1.0:
        ids = torch.tensor(sorted(set(seq.tokens)), device=device)
        values = row[ids]
        row[ids] = torch.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
    if (p.presence_penalty or p.frequency_penalty) and seq.num_generated:
        counts = Counter(seq.generated)
        ids = torch.tensor(list(counts), device=device)
        times = torch.tensor(list(counts.values()), dtype=row.dtype, device=device)
        row[ids] -= p.presence_penalty + p.frequency_penalty * times


def distribution(logits: Tensor, params: list[SamplingParams]) -> Tensor:
    """Probabilities [N, V] after temperature, top-k, top-p and min-p; rows are independent of each other."""
    column = lambda values: torch.tensor(values, dtype=torch.float32, device=logits.device)[:, None]  # noqa: E731
    # The likeliest at zero before dividing: a tiny temperature must not push it to infinity
    centred = logits - logits.amax(-1, keepdim=True)
    probs = torch.softmax(centred / column([max(p.temperature, _COLD) for p in params]), -1)
    cutoff = probs.amax(-1, keepdim=True) * column([p.min_p for p in params])
    if any(p.top_k or p.top_p < 1 for p in params):
        cutoff = torch.maximum(cutoff, _cutoffs(probs, params))
    probs = probs.masked_fill_(probs < cutoff, 0.0)
    return probs / probs.sum(-1, keepdim=True)


def _cutoffs(probs: Tensor, params: list[SamplingParams]) -> Tensor:
    """Least probability [N, 1] that top-k, then top-p among what top-k left, keep."""
    vocab = probs.shape[-1]
    return torch.stack([_cutoff(probs[i], p, vocab) for i, p in enumerate(params)])[:, None]


def _cutoff(row: Tensor, p: SamplingParams, vocab: int) -> Tensor:
    limit = min(p.top_k or vocab, vocab)
    head = row.topk(min(limit, _HEAD)).values
    if p.top_p < 1 and limit > _HEAD and head.sum(dtype=torch.float64) < p.top_p:
        head = row.sort(descending=True).values
    head = head if limit >= head.numel() else head[:limit]
    if p.top_p >= 1:
        return (
            head[-1]
            if p.top_k and limit <= head.numel()
            else row.topk(limit).values[-1]
            if p.top_k
            else row.new_zeros(())
        )
    mass = head.cumsum(-1, dtype=torch.float64)
    total = mass[-1] if p.top_k else 1.0
    return head[min(int((mass < p.top_p * total).sum()), head.numel() - 1)]


def draw(probs: Tensor, draws: list[float]) -> list[int]:
    """Invert the cumulative distribution: one token per row, for one number in [0, 1) each."""
    mass = probs.cumsum(-1, dtype=torch.float64)  # [N, V]
    target = torch.tensor(draws, dtype=torch.float64, device=probs.device)[:, None] * mass[:, -1:]
    return torch.searchsorted(mass, target, right=True).squeeze(-1).clamp_max_(probs.shape[-1] - 1).tolist()


def _logprob(row: Tensor, token: int, params: SamplingParams) -> TokenLogprob | None:
    """Log-probabilities under the model itself, before temperature and penalties."""
    if params.logprobs is None:
        return None
    logprobs = torch.log_softmax(row, -1)
    top = logprobs.topk(params.logprobs) if params.logprobs else None
    pairs = list(zip(top.indices.tolist(), top.values.tolist(), strict=True)) if top else []
    return TokenLogprob(token, float(logprobs[token]), pairs)
