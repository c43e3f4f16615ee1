"""What a drafter learns of the texts it drafts, token by token: which ones follow which, and how far to trust that.

Counts of what followed the last one to four tokens, in the answers and prompts of this engine, are mixed into what a
pass says of a position. How much they weigh is learnt for each length of context and number of counts by the
likelihood of tokens that came later (expectation maximisation, one step a token), so habits that mislead lose their
weight; and they are used only while their likeliest tokens were right more often than the drafter's own. Bounded: the
oldest contexts are forgotten. Drafts are verified, so no answer changes. Knows tokens; no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from forerun.errors import BadDrafter

MAX_ORDER = 4  # tokens of context
MAX_CONTEXTS = 1 << 16  # about 20 MB
MAX_FOLLOWERS = 8  # of a context
MAX_NEW_TOKENS = 512  # that are read at once: of a prompt the last
FIRST_WEIGHT = 0.1  # of the counts, before anything is known
STEADY = 30.0  # observations that the first weight counts as
MEMORY = 0.998  # of a position in what the next one is compared with: some hundred tokens
MIN_GAIN = 2.0  # likeliest tokens that were right, above the drafter's own, before habits are used
UNKNOWN_PROB = 1e-4  # of a token that a pass does not rank: what is left is shared by thousands

TABLE, WEIGHTS = "adapter.habits", "adapter.habit_weights"  # in a drafter's file
Ranked = Sequence[tuple[int, float]]  # tokens with their probabilities, the most probable first
Bucket = tuple[int, int, bool]  # tokens of context, how often it was met (at most 3), whether one token followed always


class Said(Protocol):
    """What a pass says of the positions to come."""

    depth: int

    def top(self, depth: int, before: int) -> Ranked:
        """The most probable tokens at a position, after the token `before`."""
        ...


@dataclass
class _HeldPass:
    """Of one sequence: what a pass said of the positions from `length` on."""

    length: int
    said: Said


class OnlineHabits:
    def __init__(self, learning: bool = True) -> None:
        """`learning`: False: it only uses what was learnt before."""
        self.learning = learning
        self._followers: dict[tuple[int, ...], dict[int, int]] = {}
        self._weights: dict[Bucket, tuple[float, float]] = {}  # and how many observations it stands on
        self._passes: dict[int, _HeldPass] = {}
        self._read: dict[int, int] = {}  # by sequence: tokens that are counted
        self.gain = 0.0  # likeliest tokens that were right with habits, less those without; recent ones count most
        self.stats = {"seen": 0, "right": 0, "right_without": 0}

    @property
    def active(self) -> bool:
        return self.gain >= MIN_GAIN

    # -- drafting ------------------------------------------------------------------------------------------------------

    def mix(self, tail: Sequence[int], ranked: Ranked) -> Ranked:
        """The likeliest tokens after `tail`, where a pass alone says `ranked`."""
        found = self._expected(tail)
        return ranked if found is None else self._mixed(*found, ranked)

    def _mixed(self, bucket: Bucket, counts: dict[int, int], ranked: Ranked) -> Ranked:
        weight, total = self._weights.get(bucket, (FIRST_WEIGHT, 0.0))[0], sum(counts.values())
        probs = {token: (1.0 - weight) * prob for token, prob in ranked}
        for token, count in counts.items():
            probs[token] = probs.get(token, 0.0) + weight * count / total
        return sorted(probs.items(), key=lambda item: -item[1])

    def _expected(self, tail: Sequence[int]) -> tuple[Bucket, dict[int, int]] | None:
        """Of the longest context that was met before."""
        for order in range(min(MAX_ORDER, len(tail)), 0, -1):
            counts = self._followers.get(tuple(tail[len(tail) - order :]))
            if counts:
                return (order, min(3, sum(counts.values())), len(counts) == 1), counts
        return None

    # -- learning ------------------------------------------------------------------------------------------------------

    def observe(self, seq_id: int, tokens: list[int], said: Said) -> None:
        """A pass after these tokens of a sequence; those since the last one are learnt from."""
        if not self.learning:
            return
        self._learn(seq_id, tokens)
        self._passes[seq_id] = _HeldPass(len(tokens), said)

    def finish(self, seq_id: int, tokens: list[int]) -> None:
        if seq_id in self._passes:
            self._learn(seq_id, tokens)
            del self._passes[seq_id], self._read[seq_id]

    def _learn(self, seq_id: int, tokens: list[int]) -> None:
        last = self._passes.get(seq_id)
        if last is not None:
            for depth in range(min(last.said.depth, len(tokens) - last.length)):
                at = last.length + depth
                ranked = last.said.top(depth, tokens[at - 1])
                self._judge(tokens[max(0, at - MAX_ORDER) : at], ranked, tokens[at])
        first = max(self._read.get(seq_id, 1), len(tokens) - MAX_NEW_TOKENS)
        for at in range(first, len(tokens)):
            self._count(tokens[max(0, at - MAX_ORDER) : at], tokens[at])
        self._read[seq_id] = len(tokens)

    def _judge(self, tail: list[int], ranked: Ranked, came: int) -> None:
        """A token came where a pass said `ranked`: how much the counts of its context are to weigh from now on."""
        found = self._expected(tail)
        if found is None or not ranked:
            return
        bucket, counts = found
        with_habits = self._mixed(bucket, counts, ranked)[0][0] == came
        without = ranked[0][0] == came
        self.gain = MEMORY * self.gain + with_habits - without
        self.stats["seen"] += 1
        self.stats["right"] += with_habits
        self.stats["right_without"] += without
        weight, steps = self._weights.get(bucket, (FIRST_WEIGHT, 0.0))
        counted = weight * counts.get(came, 0) / sum(counts.values())
        drafted = (1.0 - weight) * dict(ranked).get(came, UNKNOWN_PROB)
        steps += 1.0
        weight += (counted / (counted + drafted) - weight) / (STEADY + steps)
        self._weights[bucket] = weight, steps

    def _count(self, tail: list[int], came: int) -> None:
        for order in range(1, len(tail) + 1):
            context = tuple(tail[len(tail) - order :])
            counts = self._followers.pop(context, None) or {}
            counts[came] = counts.get(came, 0) + 1
            if len(counts) > MAX_FOLLOWERS:
                del counts[min((token for token in counts if token != came), key=counts.__getitem__)]
            self._followers[context] = counts  # the last ones met are forgotten last
        while len(self._followers) > MAX_CONTEXTS:
            del self._followers[next(iter(self._followers))]

    # -- files ---------------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """What a drafter's file holds of it; nothing where it is of no use."""
        if not self.active:
            return {}
        rows = [
            [*[-1] * (MAX_ORDER - len(context)), *context, token, count]
            for context, counts in self._followers.items()
            for token, count in counts.items()
        ]
        weights = [float(value) for bucket, known in self._weights.items() for value in (*bucket, *known)]
        table = torch.tensor(rows, dtype=torch.int32).view(-1, MAX_ORDER + 2)
        return {TABLE: table, WEIGHTS: torch.tensor([self.gain, *weights])}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Go on with what an earlier process learnt."""
        table, known = tensors.get(TABLE), tensors.get(WEIGHTS)
        if table is None or known is None:
            return
        if table.ndim != 2 or table.shape[1] != MAX_ORDER + 2 or len(known) % 5 != 1:
            raise BadDrafter(
                "the drafter's habits have other shapes than they can have", "copy it anew, or train again"
            )
        for *context, token, count in table.tolist():
            self._followers.setdefault(tuple(t for t in context if t >= 0), {})[token] = count
        self.gain, *values = known.tolist()
        for order, met, one, weight, steps in zip(*(iter(values),) * 5, strict=True):
            self._weights[int(order), int(met), bool(one)] = weight, steps
