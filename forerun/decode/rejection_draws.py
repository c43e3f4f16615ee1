"""Answers of a grammar with too many texts to score them all, drawn exactly from the model conditioned on the grammar.

A tree of prefixes is explored with the model. `bound` of a prefix is the probability, as far as it is known, that the
model would complete it within the grammar: 1 where the model has not run yet, else the sum over allowed tokens of
probability times bound. An answer is drawn along the bounds. Where it gets to a prefix that had not run, the true
value becomes known: the draw goes on with the probability of the new bound over the old, else all starts again with
the tighter bounds. Every answer then comes out of a try with its own probability over one common number, so what comes
out is exact (adaptive rejection sampling; "Grammar-aligned decoding", Park et al. 2024, estimates the same quantity).
The number of tokens that may run is limited: after that the answer follows the bounds alone, and `error` is how far
its distribution may be from the exact one. Greedy answers are the likeliest whole answer, by best-first search.

Each forward also runs the likeliest prefixes that have not run, which costs little and saves tries. Knows no engine:
log-probabilities come from a callable.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from forerun.decode.grammar import DeadEnd
from forerun.decode.sampling import Rng

LOOK_AHEAD_ROWS = 8  # prefixes of one forward: about the cost of one on a CPU
MAX_LOOK_AHEAD_TOKENS = 1024  # that run for one answer; a row of probabilities is kept of each


class Prefix:
    """Tokens of an answer. Once the model has run: what may follow, with probabilities."""

    __slots__ = ("bound", "children", "log_reach", "number", "parent", "path", "probs", "tokens")

    def __init__(self, parent: Prefix | None, path: list[int], log_reach: float) -> None:
        self.parent, self.path = parent, path
        self.log_reach = log_reach  # log-probability of the path under the model
        self.number = -1  # in the order of running; the root's is 0
        self.bound = 1.0
        self.tokens: np.ndarray | None = None  # allowed next tokens, ends among them; None: the model has not run
        self.probs = np.zeros(0)
        self.children: dict[int, Prefix] = {}  # by place in `tokens`; not of ends

    def weights(self) -> np.ndarray:
        found = self.probs.copy()
        for place, child in self.children.items():
            found[place] *= child.bound
        return found


class RejectionDraws:
    """`allowed`: which tokens may follow a path, [V] bool. `logprobs`: the model's after prefixes, [N, V], each after
    its `parent` has run. Answers have `max_tokens` at most, their end included."""

    def __init__(
        self,
        allowed: Callable[[Sequence[int]], Tensor],
        logprobs: Callable[[list[Prefix]], Tensor],
        end_ids: Sequence[int],
        max_tokens: int,
        rows_per_draw: int = MAX_LOOK_AHEAD_TOKENS,
        look_ahead_rows: int = LOOK_AHEAD_ROWS,
    ) -> None:
        self._allowed, self._logprobs, self._end_ids = allowed, logprobs, frozenset(end_ids)
        self._max_tokens, self._rows_per_draw, self._look_ahead_rows = max_tokens, rows_per_draw, look_ahead_rows
        self.rows = self.tries = 0
        self._max_rows = rows_per_draw  # up to which this draw may try again
        self.exact = True  # of the last draw
        self._open: list[tuple[float, int, Prefix]] = []  # prefixes that have not run, the likeliest first
        self._ticket = itertools.count()
        self.root = Prefix(None, [], 0.0)
        self._run(self.root)

    def draw(self, rng: Rng) -> list[int]:
        """One answer with its end."""
        self.exact, self._max_rows = True, self.rows + self._rows_per_draw
        while True:
            if self.root.bound <= 0.0:
                raise _no_answer(self._max_tokens)
            self.tries += 1
            found = self._try(rng)
            if found is not None:
                return found

    def _try(self, rng: Rng) -> list[int] | None:
        here = self.root
        while True:
            if here.tokens is None:
                over = self.rows >= self._max_rows
                self._run(here, alone=over)
                if here.bound <= 0.0 or not (over or rng.flip(here.bound)):  # it was 1
                    return None
                self.exact = self.exact and not over
            assert here.tokens is not None
            place = rng.pick(torch.from_numpy(here.weights()))
            token = int(here.tokens[place])
            if token in self._end_ids:
                return [*here.path, token]
            here = self._child(here, place)

    def best(self) -> list[int]:
        """The likeliest answer."""
        found, score = list[int](), -math.inf
        if self.root.bound <= 0.0:
            raise _no_answer(self._max_tokens)
        ends = [self.root]
        while True:
            for prefix in ends:
                assert prefix.tokens is not None
                for token, prob in zip(prefix.tokens.tolist(), prefix.probs.tolist(), strict=True):
                    reached = prefix.log_reach + (math.log(prob) if prob > 0.0 else -math.inf)
                    if token in self._end_ids and reached > score:
                        found, score = [*prefix.path, token], reached
            likeliest = self._pop()
            self.exact = likeliest is None or likeliest.log_reach <= score
            if likeliest is None and not found:
                raise _no_answer(self._max_tokens)
            if likeliest is None or self.exact:
                return found
            if self.rows >= self._max_rows:
                return found or self._follow(likeliest)
            ends = self._run(likeliest)

    def _follow(self, here: Prefix) -> list[int]:
        """A prefix completed by the likeliest allowed token at a time."""
        while True:
            if here.tokens is None:
                self._run(here, alone=True)
            if here.bound <= 0.0 or here.tokens is None:
                raise _no_answer(self._max_tokens)
            place = int(here.weights().argmax())
            if int(here.tokens[place]) in self._end_ids:
                return [*here.path, int(here.tokens[place])]
            here = self._child(here, place)

    @property
    def error(self) -> float:
        """How far in total variation answers may be from exact ones once no more tries are made: the share of
        the probability that prefixes hold after which the model has not run."""
        known: dict[int, float] = {}
        for prefix in sorted(self._ran(), key=lambda each: -each.number):  # children ran after their parents
            found = prefix.probs.copy()
            for place, child in prefix.children.items():
                found[place] *= known.get(id(child), 0.0)
            assert prefix.tokens is not None
            visited = np.zeros(len(found), dtype=bool)
            visited[list(prefix.children)] = True
            found[~visited & ~np.isin(prefix.tokens, list(self._end_ids))] = 0.0
            known[id(prefix)] = float(found.sum())
        return max(0.0, 1.0 - known[id(self.root)] / self.root.bound) if self.root.bound > 0.0 else 0.0

    def _ran(self) -> list[Prefix]:
        found, pending = list[Prefix](), [self.root]
        while pending:
            prefix = pending.pop()
            if prefix.tokens is not None:
                found.append(prefix)
                pending += prefix.children.values()
        return found

    def _run(self, wanted: Prefix, alone: bool = False) -> list[Prefix]:
        """Run the model after a prefix and, with it, after the likeliest others; returns all of them."""
        batch = [wanted]
        while not alone and len(batch) < self._look_ahead_rows and (other := self._pop()) is not None:
            if other is not wanted:
                batch.append(other)
        for prefix, row in zip(batch, self._logprobs(batch), strict=True):
            prefix.number = self.rows
            self.rows += 1
            self._record(prefix, row)
        return batch

    def _record(self, prefix: Prefix, row: Tensor) -> None:
        try:
            allowed = self._allowed(prefix.path).nonzero()[:, 0]
        except DeadEnd:
            allowed = torch.zeros(0, dtype=torch.int64)
        tokens = allowed.numpy()
        if len(prefix.path) + 1 >= self._max_tokens:  # room for nothing but an end
            tokens = tokens[np.isin(tokens, list(self._end_ids))]
        prefix.tokens = tokens
        prefix.probs = row[torch.from_numpy(tokens).to(row.device)].double().exp().cpu().numpy()
        for place in np.argsort(-prefix.probs)[: self._look_ahead_rows].tolist():
            if int(tokens[place]) not in self._end_ids and prefix.probs[place] > 0.0:
                self._child(prefix, place)
        above: Prefix | None = prefix
        while above is not None:
            above.bound = float(above.weights().sum())
            above = above.parent

    def _child(self, prefix: Prefix, place: int) -> Prefix:
        if place not in prefix.children:
            assert prefix.tokens is not None
            log_reach = prefix.log_reach + math.log(max(float(prefix.probs[place]), 1e-300))
            child = Prefix(prefix, [*prefix.path, int(prefix.tokens[place])], log_reach)
            prefix.children[place] = child
            heapq.heappush(self._open, (-log_reach, next(self._ticket), child))
        return prefix.children[place]

    def _pop(self) -> Prefix | None:
        while self._open:
            prefix = heapq.heappop(self._open)[2]
            if prefix.tokens is None:
                return prefix
        return None


def _no_answer(max_tokens: int) -> DeadEnd:
    hint = "raise max_tokens, or let the grammar have shorter answers"
    return DeadEnd(f"no answer of the grammar has a probability above 0 within {max_tokens} tokens", hint)
