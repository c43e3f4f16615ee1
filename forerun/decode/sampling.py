"""From logits to the next token, the same for a request whatever else is in its batch.

`distribution` is the target's distribution after penalties, grammar, temperature, top-k, top-p and min-p: the one that
drafts are verified against. Randomness is a function of (seed, position, stream), not of a shared generator, so a
request draws the same tokens alone, in any batch, with any draft, and after a preemption. Knows no scheduler and no
text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from forerun.core import SamplingParams, TokenLogprob
from forerun.models.cpu.rows import draw as draw_at_once
from forerun.models.decoder import likeliest

_TOP_P_TOKENS = 1024  # most probable tokens sorted first for top-p; all of them only where these hold too little mass
_MASK = (1 << 64) - 1
_MIN_TEMPERATURE = 1e-6  # below this a temperature samples as greedily, and 1 / temperature leaves float32
ACCEPT_STREAM = 1  # random numbers of a position that verifiers accept and reject with; stream 0 draws answers
DRAFT_STREAM = 2  # random numbers of a position that drafters draw with


class Constraint(Protocol):
    """The tokens that a grammar allows in the answer of one sequence; see decode/grammar.py."""

    def allowed(self, path: Sequence[int]) -> Tensor:
        """Which tokens may follow the answer so far and then `path`: [V] bool on the CPU."""


class Futures(ABC):
    """A constraint that also has the probability that the answer can be completed after each token: sampling then draws
    from the model conditioned on the grammar; see decode/trie_answer.py."""

    @abstractmethod
    def futures(self, path: Sequence[int]) -> Tensor:
        """Logarithms [V] float64 on the CPU, -inf for tokens that are not allowed. Where sampling is greedy: of the
        likeliest completion, at temperature 1."""


@dataclass
class Context:
    """All that shapes a sequence's next token beside the logits. `tokens` is the sequence's own list, not a copy."""

    params: SamplingParams
    tokens: list[int]  # prompt and answer so far
    num_prompt: int
    seed: int
    constraint: Constraint | None = None
    _bias: Tensor | None = field(default=None, init=False, repr=False, compare=False)

    def bias(self, logits: Tensor) -> Tensor:
        """The logit bias of every token [V], made once: made for each row, 49,000 biases took all answers' time."""
        if self._bias is None or self._bias.shape != logits.shape or self._bias.device != logits.device:
            values = torch.tensor(list(self.params.logit_bias.values()), dtype=logits.dtype, device=logits.device)
            made = torch.zeros_like(logits)
            made[torch.tensor(list(self.params.logit_bias), device=logits.device)] = values
            self._bias = made
        return self._bias

    @property
    def plain(self) -> bool:
        """Whether the next token is the argmax of the logits as they are."""
        return self.params.greedy and not self.shaped

    @property
    def shaped(self) -> bool:
        """Whether logits are changed by penalties, logit bias or a grammar."""
        return self.params.penalised or self.constraint is not None


@dataclass
class Row:
    """One row of logits: what follows a context and, in a draft, the tokens of a path after it."""

    context: Context
    path: Sequence[int] = ()

    @property
    def position(self) -> int:
        return len(self.context.tokens) + len(self.path)


def uniform(seed: int, position: int, stream: int = 0) -> float:
    """A number in [0, 1) that is a function of its arguments only (splitmix64 of all three). Stream 0 draws answers;
    further numbers at the same position come from other streams."""
    z = (seed * 0x9E3779B97F4A7C15 + position * 0xD1342543DE82EF95 + 0x9E3779B97F4A7C15) & _MASK
    z ^= (stream * 0xA0761D6478BD642F) & _MASK
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = ((z ^ (z >> shift)) * factor) & _MASK
    return ((z ^ (z >> 31)) >> 11) / (1 << 53)


class Rng(Protocol):
    """Randomness in the two forms that verifiers and drafters need."""

    def flip(self, prob: float) -> bool:
        """True with this probability."""

    def pick(self, weights: Tensor) -> int:
        """An index, with probability proportional to its weight."""


class SeededRng:
    """The random numbers of one step of one sequence, different from those of every other step and stream."""

    def __init__(self, seed: int, position: int, stream: int = ACCEPT_STREAM) -> None:
        self._seed, self._position, self._stream, self._count = seed, position, stream, 0

    def flip(self, prob: float) -> bool:
        return self._next() < prob

    def pick(self, weights: Tensor) -> int:
        return int(draw(weights[None], [self._next()])[0])

    def _next(self) -> float:
        self._count += 1
        return uniform(self._seed, self._position, (self._count << 8) + self._stream)


def choose(logits: Tensor, rows: list[Row]) -> list[int]:
    """The next token of each row: the most probable, or drawn with the random number of its position."""
    params = [row.context.params for row in rows]
    numbers = [0.0 if p.greedy else uniform(r.context.seed, r.position) for p, r in zip(params, rows, strict=True)]
    return choose_by_number(shape(logits, rows), params, numbers).tolist()


def choose_by_number(shaped: Tensor, params: list[SamplingParams], numbers: list[float]) -> Tensor:
    """The same from shaped logits [N, V] and a number in [0, 1) for each row: [N] int64, where the logits are. Waits
    for no device where all parameters are `sync_free`."""
    drawn = [i for i, p in enumerate(params) if not p.greedy]
    if not drawn:
        return likeliest(shaped)
    if len(drawn) == len(params):
        return _drawn(shaped, params, numbers)
    where = torch.tensor(drawn).to(shaped.device, non_blocking=True)
    found = _drawn(shaped[where], [params[i] for i in drawn], [numbers[i] for i in drawn])
    return likeliest(shaped).index_copy_(0, where, found)


def _drawn(logits: Tensor, params: list[SamplingParams], numbers: list[float]) -> Tensor:
    if all(not p.top_k and p.top_p >= 1 and not p.min_p for p in params):
        found = draw_at_once(logits, [max(p.temperature, _MIN_TEMPERATURE) for p in params], numbers)
        if found is not None:
            return found
    return draw(distribution(logits, params), numbers)


def sync_free(params: SamplingParams) -> bool:
    """Whether a token can be drawn without knowing on the host how many tokens top-p keeps."""
    return params.greedy or params.top_p >= 1 or 0 < (params.top_k or 0) <= _TOP_P_TOKENS


def shape(logits: Tensor, rows: list[Row]) -> Tensor:
    """Logit bias, penalties and grammar masks, row by row; other rows are untouched."""
    if not any(row.context.shaped for row in rows):
        return logits
    logits = logits.clone()
    seen: dict[int, tuple[set[int], Tensor]] = {}
    for i, row in enumerate(rows):
        if row.context.params.penalised:
            _penalise(logits[i], row, seen)
        if row.context.constraint is not None:
            allowed = row.context.constraint.allowed(row.path).to(logits.device)
            logits[i].masked_fill_(~allowed, float("-inf"))
        if isinstance(constraint := row.context.constraint, Futures):
            # divided by the temperature later on; greedy answers compare whole answers at temperature 1
            scale = row.context.params.temperature or 1.0
            logits[i] += scale * constraint.futures(row.path).to(logits.device, logits.dtype)
    return logits


def _penalise(logits: Tensor, row: Row, seen: dict[int, tuple[set[int], Tensor]]) -> None:
    """`seen`: the tokens of the batch's contexts, which the rows of a draft share."""
    p, context, device = row.context.params, row.context, logits.device
    if p.logit_bias:
        logits += context.bias(logits)
    if p.repetition_penalty != 1.0:
        if id(context) not in seen:
            tokens = set(context.tokens)
            seen[id(context)] = tokens, torch.tensor(list(tokens), dtype=torch.long, device=device)
        tokens, ids = seen[id(context)]
        if more := [token for token in {*row.path} if token not in tokens]:
            ids = torch.cat((ids, torch.tensor(more, device=device)))
        values = logits[ids]
        logits[ids] = torch.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
    if p.presence_penalty or p.frequency_penalty:
        counts = Counter([*context.tokens[context.num_prompt :], *row.path])
        if counts:
            ids = torch.tensor(list(counts), device=device)
            times = torch.tensor(list(counts.values()), dtype=logits.dtype, device=device)
            logits[ids] -= p.presence_penalty + p.frequency_penalty * times


def distribution(logits: Tensor, params: list[SamplingParams]) -> Tensor:
    """Probabilities [N, V] after temperature, top-k, top-p and min-p; rows are independent of each other."""
    column = lambda values: torch.tensor(values, dtype=torch.float32, device=logits.device)[:, None]  # noqa: E731
    # The maximum at zero before dividing: a tiny temperature must not push it to infinity
    centred = logits - logits.amax(-1, keepdim=True)
    probs = torch.softmax(centred / column([max(p.temperature, _MIN_TEMPERATURE) for p in params]), -1)
    cutoff = probs.amax(-1, keepdim=True) * column([p.min_p for p in params])
    if any(p.top_k or p.top_p < 1 for p in params):
        cutoffs = torch.stack([_cutoff(row, p) for row, p in zip(probs, params, strict=True)])
        cutoff = torch.maximum(cutoff, cutoffs[:, None])
    probs = probs.masked_fill_(probs < cutoff, 0.0)
    return probs / probs.sum(-1, keepdim=True)


def _cutoff(row: Tensor, p: SamplingParams) -> Tensor:
    """Least probability that top-k, then top-p among what top-k left, keep."""
    limit = min(p.top_k or row.numel(), row.numel())
    head = row.topk(min(limit, _TOP_P_TOKENS)).values
    if p.top_p < 1 and limit > _TOP_P_TOKENS and head.sum(dtype=torch.float64) < p.top_p:
        head = row.sort(descending=True).values
    head = head if limit >= head.numel() else head[:limit]
    if p.top_p >= 1:
        if not p.top_k:
            return row.new_zeros(())
        return head[-1] if limit <= head.numel() else row.topk(limit).values[-1]
    mass = head.cumsum(-1, dtype=torch.float64)
    total = mass[-1] if p.top_k else 1.0
    last = (mass < p.top_p * total).sum().clamp_max_(head.numel() - 1)
    return head.gather(0, last[None])[0]


def draw(probs: Tensor, draws: list[float]) -> Tensor:
    """Invert the cumulative distribution: one token per row [N], for one number in [0, 1) each."""
    mass = probs.cumsum(-1, dtype=torch.float64)  # [N, V]
    target = torch.tensor(draws, dtype=torch.float64, device=probs.device)[:, None] * mass[:, -1:]
    return torch.searchsorted(mass, target, right=True).squeeze(-1).clamp_max_(probs.shape[-1] - 1)


def logprob(logits: Tensor, token: int, params: SamplingParams) -> TokenLogprob | None:
    """Log-probabilities under the model itself, before temperature and penalties; None unless requested."""
    if params.logprobs is None:
        return None
    logprobs = torch.log_softmax(logits, -1)
    top = logprobs.topk(params.logprobs) if params.logprobs else None
    pairs = list(zip(top.indices.tolist(), top.values.tolist(), strict=True)) if top else []
    return TokenLogprob(token, float(logprobs[token]), pairs)
