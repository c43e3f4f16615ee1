"""What a forward costs: seconds against its tokens, its sequences and their context.

A curve starts from a few timed forwards and is corrected by every step that follows. Knows no model and no drafter,
only numbers.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

STEP_NOISE_SHARE = 0.05  # by which steps vary on a quiet machine
MAX_LOG_ERROR = 0.3  # of one observation, in log seconds: more is caused by the operating system
NEW_SIZE_RATE, KNOWN_SIZE_RATE = 0.25, 0.02  # learning rate of one size: at first, and after many observations
COMMON_RATE = 0.05  # learning rate of the factor of all sizes: another program, a warmer processor
MIN_LOG_CONTEXT_FACTOR = -3.5  # of context of many sequences over that of one: at least a thirtieth
REBUILD_OBSERVATIONS = 16  # between two rebuilds of the table
MAX_TABLE_TOKENS = 1024  # above, seconds are computed one by one

PRIOR_SLOWDOWN, PRIOR_SLOWDOWN_STEPS = 1.15, 2  # by a server on the same memory bus, before a step beside it was timed
PROBED_STEPS = 6  # that steps count for which were timed beside a server before the first request
MAX_LOG_SLOWDOWN = 0.7  # of one step
# Of steps beside a server on the same memory bus, from which the two take turns. They are timed beside single rounds;
# reading a prompt slows them more: with 3 to 20% timed, single answers still fell to 0.72 of plain (docs/log.md)
TURNS_SLOWDOWN = 0.03
# The same of steps beside a prompt that is read: 1.2, 1.4 and 1.8 times as long in three runs (docs/results.md)
READING_SLOWDOWN = 0.45

MAX_ROUNDS = 16  # of a paid drafter in one step
LOOKAHEAD_ROUNDS = 3  # within which a further round must pay: costs have steps
TIMED_TOKENS = (1, 2, 4, 8, 16, 32, 64)  # of the forwards that are timed at the start
TIMED_CONTEXTS = (32, 512)  # tokens before them
TIMED_STARTS = (128, 512)  # of prompts that a paid drafter reads; more is read in parts


class ServerRounds(NamedTuple):
    """Of a draft server: tokens that one round drafts at most, one after the other, and what each of them after the
    first adds to it, as a share of a round for one."""

    tokens: int = 1
    slope: float = 0.0

    def seconds(self, depth: int, round_s: float) -> float:
        """Of drafting so deep; `round_s`: of a round for one token."""
        rounds, rest = divmod(depth, self.tokens)
        whole = 1.0 + self.slope * (self.tokens - 1)
        return round_s * (rounds * whole + (1.0 + self.slope * (rest - 1) if rest else 0.0))


class Slowdown:
    """How many times as long the target's steps take while a draft server computes: one on the same machine shares its
    memory bus (1.2 to 1.8 on two cores), one elsewhere costs nothing."""

    def __init__(self, shares_memory: bool) -> None:
        self._log, self._steps = math.log(PRIOR_SLOWDOWN if shares_memory else 1.0), PRIOR_SLOWDOWN_STEPS
        self.shares_memory = shares_memory
        self.round_s = self.way_s = 0.0  # of the server for a token, and of the way to it and back; 0: not known
        self.rounds = ServerRounds()

    def observe(self, expected_s: float, seconds: float) -> None:
        """Of a plain step, against what it takes while the server does nothing."""
        error = max(-MAX_LOG_SLOWDOWN, min(MAX_LOG_SLOWDOWN, math.log(seconds / expected_s)))
        self._steps += 1
        self._log += max(COMMON_RATE, 1.0 / self._steps) * (error - self._log)

    def measured(self, expected_s: float, seconds: float) -> None:
        """The same of several steps before any request: in place of what is assumed."""
        self._log, self._steps = 0.0, 0
        for _ in range(PROBED_STEPS):
            self.observe(expected_s, seconds)

    def draft_s(self, depth: int) -> float:
        """Until a draft so deep is here."""
        return self.way_s + self.rounds.seconds(depth, self.round_s)

    @property
    def extra(self) -> float:
        """Of a step, as a share of it."""
        return max(0.0, math.exp(self._log) - 1.0)

    @property
    def extra_reading(self) -> float:
        """The same while the server reads a prompt, before one was read."""
        return max(self.extra, READING_SLOWDOWN) if self.takes_turns else self.extra

    @property
    def takes_turns(self) -> bool:
        """Whether the server should compute while the target waits, and never beside its steps. One whose round gives
        all of a draft, and is shorter than a step, is waited for anyway."""
        slow = self.extra >= TURNS_SLOWDOWN or self.rounds.tokens > 1
        return self.shares_memory and self.round_s > 0.0 and slow


class CostCurve:
    """Seconds of one forward. Sizes in between are interpolated, larger ones follow the last slope."""

    def __init__(
        self, points: dict[int, float], per_context: float = 0.0, per_context_token: float = 0.0, base_context: int = 0
    ) -> None:
        """`points`: tokens -> seconds of one sequence at `base_context`; the others: seconds per entry of context."""
        if not points or any(size < 1 or not 0.0 < s < math.inf for size, s in points.items()):
            raise ValueError(f"a cost curve needs positive sizes and seconds, got {points!r:.200}")
        self.per_context, self.per_context_token = per_context, per_context_token
        self.tokens_per_round = 1  # of a drafter's rounds: depth that one adds to a draft at most
        self.recent = False  # whether a forward was observed since the last of the target
        self.per_branch = 0.0  # seconds of a side branch of a tree, beside its tokens
        self.start_factor = 1.0  # of a drafter: what it took to read a prompt, over what the curve has for its tokens
        self.reading: CostCurve | None = None  # of a drafter: prompts, where they run through other kernels
        self._sizes = sorted(points)
        timed = [points[n] - base_context * (per_context + n * per_context_token) for n in self._sizes]
        # Noise only ever adds time, so a size that took longer than a larger one is the one that is wrong.
        for i in range(len(timed) - 2, -1, -1):
            timed[i] = min(timed[i], timed[i + 1])
        floor = 0.1 * min(points.values())
        self._logs = [math.log(max(seconds, floor)) for seconds in timed]
        self._timed = dict(zip(self._sizes, self._logs, strict=True))
        self._visits = {size: 2 for size in self._sizes}
        self._common = 0.0  # log of the factor between now and when the points were timed
        self._around: dict[int, float] = {}  # log of the factor of context, by number of sequences (to a factor of two)
        self._spread = STEP_NOISE_SHARE
        self._pending = 0
        self.version = 0  # changes whenever `seconds` may
        self._table: list[float] = []  # seconds by tokens, without context
        self._slope = 0.0
        self._build()

    @classmethod
    def measure(
        cls, time_forward: Callable[[int, int], float], sizes: Sequence[int], contexts: Sequence[int]
    ) -> CostCurve:
        """Time every size at the first context, and two sizes at each further one."""
        sizes = sorted(set(sizes))
        base = contexts[0]
        points = {size: time_forward(size, base) for size in sizes}
        small, large = sizes[0], sizes[len(sizes) // 2]
        slopes: dict[int, list[float]] = {small: [], large: []}
        for context in contexts[1:]:
            if context > base:
                for size, found in slopes.items():
                    found.append(max(0.0, time_forward(size, context) - points[size]) / (context - base))
        if not slopes[small]:
            return cls(points)
        at_small, at_large = (min(slopes[size]) for size in (small, large))  # noise only adds
        by_token = max(0.0, at_large - at_small) / (large - small) if large > small else 0.0
        return cls(points, max(0.0, at_small - small * by_token), by_token, base)

    @classmethod
    def within(cls, time_forward: Callable[[int, int], float], limit: int) -> CostCurve:
        """`measure` at a few sizes and contexts of at most `limit` tokens in all."""
        sizes = [size for size in TIMED_TOKENS if size <= max(1, limit // 4)]
        contexts = sorted({min(context, limit - sizes[-1]) for context in TIMED_CONTEXTS})
        return cls.measure(time_forward, sizes, contexts)

    def seconds(self, tokens: int, sequences: int = 1, context: int = 0) -> float:
        """Of one forward: tokens of all sequences, number of sequences, and their mean context in entries."""
        table = self._table
        base = table[tokens] if tokens < len(table) else self._beyond(tokens)
        return base + context * self._context_factor(sequences) * (
            sequences * self.per_context + tokens * self.per_context_token
        )

    def start_s(self, tokens: int) -> float:
        """Of a drafter that reads so many tokens before its first round, a long prompt in parts; 0 for none."""
        parts, rest = divmod(tokens, TIMED_STARTS[-1])
        return self.start_factor * (parts * self._read_s(TIMED_STARTS[-1]) + (self._read_s(rest) if rest else 0.0))

    def _read_s(self, tokens: int) -> float:
        curve = self if self.reading is None or tokens <= TIMED_TOKENS[-1] else self.reading
        return curve.seconds(tokens)

    def seconds_range(self, first: int, last: int, sequences: int = 1, context: int = 0) -> list[float]:
        """`seconds` of every number of tokens from `first` to `last`."""
        context_s = context * self._context_factor(sequences)
        around, each = context_s * sequences * self.per_context, context_s * self.per_context_token
        return [s + around + tokens * each for tokens, s in enumerate(self._without_context(first, last), first)]

    def one_token_each(self, last: int, context: int = 0) -> list[float]:
        """`seconds` of 0 to `last` sequences with one token each; 0 for none."""
        each = context * self._context_factor(last) * (self.per_context + self.per_context_token)
        return [0.0, *[s + n * each for n, s in enumerate(self._without_context(1, last), 1)]]

    def observe(self, tokens: int, sequences: int, context: int, seconds: float) -> None:
        """Correct the curve by a step that held nothing but these tokens."""
        if tokens < 1 or not 0.0 < seconds < math.inf:
            return
        around = context * (sequences * self.per_context + tokens * self.per_context_token)
        around *= self._context_factor(sequences)
        expected = math.exp(self._log_at(tokens) + self._common) + around
        error = math.log(seconds / expected)
        # The median of the observations counts, not their mean: errors are cut to about their usual size.
        limit = min(MAX_LOG_ERROR, 2.0 * self._spread)
        cut = max(-limit, min(limit, error))
        self._spread += 0.05 * (max(STEP_NOISE_SHARE, min(MAX_LOG_ERROR, abs(error))) - self._spread)
        place = bisect_left(self._sizes, tokens)
        if place == len(self._sizes) or self._sizes[place] != tokens:
            if tokens >= MAX_TABLE_TOKENS:
                return
            self._logs.insert(place, self._log_at(tokens))
            self._sizes.insert(place, tokens)
        visits = self._visits[tokens] = self._visits.get(tokens, 0) + 1
        if sequences > 1:
            # Context was timed for one sequence; many read theirs at once, in less than as many times as long. Blamed
            # on the forward alone, steps of 64 sequences once made it free, and every decision after them wrong.
            share, size = around / expected, sequences.bit_length()
            known = self._around.get(size, 0.0) + NEW_SIZE_RATE * share * cut
            self._around[size] = min(0.0, max(MIN_LOG_CONTEXT_FACTOR, known))
            cut *= 1.0 - share
        self._common += COMMON_RATE * cut
        self._logs[place] += max(KNOWN_SIZE_RATE, NEW_SIZE_RATE / visits) * cut
        self._pending += 1
        if self._pending >= REBUILD_OBSERVATIONS:
            self._build()

    def _context_factor(self, sequences: int) -> float:
        return math.exp(self._around.get(sequences.bit_length(), 0.0)) if self._around else 1.0

    def follow(self, drift: float) -> None:
        """Count a change of all forwards' speed that another curve has seen, where this one's forwards do not run: a
        curve that was timed in a busy moment would else rule a drafter out for good."""
        self._common += drift
        self._pending += 1
        if self._pending >= REBUILD_OBSERVATIONS:
            self._build()

    def points(self) -> dict[int, float]:
        """Seconds at every size that was timed or observed, without context."""
        return {size: self.seconds(size) for size in self._sizes}

    @property
    def observations(self) -> int:
        return sum(self._visits.values()) - 2 * len(self._timed)

    @property
    def drift(self) -> float:
        """Log of the factor between observed seconds and those first timed."""
        return self._common

    def record(self) -> dict[str, Any]:
        """All there is to know, as JSON can hold it."""
        return {
            "points": {str(size): seconds for size, seconds in self.points().items()},
            "per_context": self.per_context,
            "per_context_token": self.per_context_token,
            "per_branch": self.per_branch,
            "start_factor": self.start_factor,
            "reading": None if self.reading is None else self.reading.record(),
        }

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> CostCurve:
        points = {int(size): float(seconds) for size, seconds in record["points"].items()}
        curve = cls(points, float(record["per_context"]), float(record["per_context_token"]))
        curve.per_branch, curve.start_factor = float(record["per_branch"]), float(record.get("start_factor", 1.0))
        curve.reading = cls.from_record(record["reading"]) if record.get("reading") else None
        return curve

    def _log_at(self, tokens: int) -> float:
        """Log seconds, before the common factor: straight lines in seconds between sizes."""
        sizes, logs = self._sizes, self._logs
        i = bisect_left(sizes, tokens)
        if i < len(sizes) and sizes[i] == tokens:
            return logs[i]
        if i == 0 or len(sizes) == 1:  # below the smallest, or nothing to draw a line through
            return logs[0]
        if i == len(sizes):
            return math.log(self._beyond(tokens)) - self._common
        low, high = math.exp(logs[i - 1]), math.exp(logs[i])
        share = (tokens - sizes[i - 1]) / (sizes[i] - sizes[i - 1])
        return math.log(low + share * (high - low))

    def _beyond(self, tokens: int) -> float:
        return self._table[-1] + self._slope * (tokens - len(self._table) + 1)

    def _without_context(self, first: int, last: int) -> list[float]:
        """Seconds of `first` to `last` tokens, without context."""
        table, slope = self._table, self._slope
        found = table[first : last + 1]
        if last >= len(table):
            top, end = table[-1], len(table) - 1
            found += [top + slope * (tokens - end) for tokens in range(max(first, end + 1), last + 1)]
        return found

    def _build(self) -> None:
        """Seconds of every size up to the largest, never falling: sizes that fall are pooled with their neighbours."""
        self._pending = 0
        self.version += 1
        values: list[tuple[float, float, int]] = []  # log seconds, weight, how many sizes
        for size, value in zip(self._sizes, self._logs, strict=True):
            weight, count = float(self._visits[size]), 1
            while values and values[-1][0] > value:
                before, heavy, many = values.pop()
                value = (value * weight + before * heavy) / (weight + heavy)
                weight, count = weight + heavy, count + many
            values.append((value, weight, count))
        pooled = [math.exp(value + self._common) for value, _, count in values for _ in range(count)]
        sizes = self._sizes
        table = [pooled[0]] * (sizes[0] + 1)
        for i in range(1, len(sizes)):
            step = (pooled[i] - pooled[i - 1]) / (sizes[i] - sizes[i - 1])
            table.extend(pooled[i - 1] + step * n for n in range(1, sizes[i] - sizes[i - 1] + 1))
        self._table = table
        # The slope goes on from a wide stretch: two neighbouring sizes may lie on one step of the curve.
        half = sizes[-1] // 2
        self._slope = (table[-1] - table[half]) / (sizes[-1] - half)
