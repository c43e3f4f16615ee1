"""How many prompt tokens a step may run beside streams, so that the gap between two tokens of a stream stays bounded.

A step with prompt tokens may take `GAP_STEPS` times as long as one without, or the least gap of the device, whichever
is longer. What prompt tokens cost comes from the target's cost curve at first, and is then learnt from every step that
ran some beside streams. Knows numbers only: neither sequences nor models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from forerun.decode.control.cost import CostCurve

GAP_STEPS = 3.0  # planned; the goal is that no gap is longer than 4 median steps, and steps vary by a quarter
MIN_GAP_S = {"cpu": 0.0, "cuda": 0.025}  # a GPU's steps are so short that pieces of three steps would be too small
MIN_CHUNK_TOKENS = 2  # of a step beside streams, whatever they cost: prompts go on
FIRST_CHUNK_TOKENS = {"cpu": 64, "cuda": 512}  # at most, before any step was timed; later twice the largest that was
TIMED_TOKENS = 64  # the largest of the cost curve's timed forwards
SLOWER_RATE, FASTER_RATE = 0.5, 0.15  # of one observation: a chunk that is too large is felt by every stream
MAX_CHANGE = 1.0  # by one observation, as a share of what was expected: more is caused by the operating system
MAX_DRAFT_NODES = 1 << 20  # of a step without streams: what pays is decided elsewhere
# Of a step with drafts and streams, or its gap, whichever is longer: answers that were given before are drafted whole,
# and eight of them at once took steps of more than a second
MAX_DRAFT_STEP_S = 0.5
CHUNK_UNIT, CONTEXT_UNIT = 8, 1000  # tokens, entries of context: so that what is learnt is of one size


@dataclass(frozen=True)
class StepWork:
    """What a step runs."""

    streams: int  # sequences that decode, one token each
    tokens: int  # of prompts
    prompt_context: int  # entries that those attend to, on average
    paced: bool = False  # some of the streams are read as they come
    untimed: bool = False  # no step without prompt tokens has told yet what these sequences take


class _LearntCosts:
    """Seconds as a sum of parts, each with a cost. Learnt by normalised least mean squares: each cost changes by its
    part in what was observed."""

    def __init__(self, *prior: float) -> None:
        self.costs, self._least = list(prior), [0.01 * cost for cost in prior]

    def seconds(self, *parts: float) -> float:
        return sum(part * cost for part, cost in zip(parts, self.costs, strict=True))

    def observe(self, seconds: float, *parts: float, slower_rate: float) -> None:
        expected = self.seconds(*parts)
        error = max(-MAX_CHANGE * expected, min(MAX_CHANGE * expected, seconds - expected))
        pairs = list(zip(self.costs, self._least, strict=True))
        own = [p if error > 0 or cost > least else 0.0 for p, (cost, least) in zip(parts, pairs, strict=True)]
        step = (slower_rate if error > 0 else FASTER_RATE) * error / (sum(part * part for part in own) or 1.0)
        self.costs = [max(least, cost + step * p) for p, (cost, least) in zip(own, pairs, strict=True)]


class StepPacer:
    """`curve`: the target's costs, read when the first step is planned. `max_gap_s`: a bound of the user's own; 0: by
    the rule."""

    def __init__(self, curve: Callable[[], CostCurve], device: str = "cpu", max_gap_s: float = 0.0) -> None:
        self._curve, self._max_gap_s, self._min_gap_s = curve, max_gap_s, MIN_GAP_S[device]
        self._most = FIRST_CHUNK_TOKENS[device]

    @cached_property
    def _step(self) -> _LearntCosts:
        """Of a step of streams alone: parts are 1 and their number. What their context costs is part of both."""
        one, many = (self._curve().seconds(streams, streams) for streams in (1, 16))
        return _LearntCosts(one, (many - one) / 15)

    @cached_property
    def _token(self) -> _LearntCosts:
        """Of one prompt token: parts are its share of CHUNK_UNIT, 1, and CONTEXT_UNITs that it attends to."""
        curve = self._curve()
        token = (curve.seconds(TIMED_TOKENS) - curve.seconds(1)) / (TIMED_TOKENS - 1)
        return _LearntCosts(0.0, max(token, 1e-9), curve.per_context_token * CONTEXT_UNIT)

    def step_s(self, streams: int) -> float:
        """Seconds of a step that runs one token of each of so many streams, drafting included."""
        return self._step.seconds(1.0, streams)

    def gap_s(self, streams: int) -> float:
        """How long a step beside so many streams may take."""
        return self._max_gap_s or max(GAP_STEPS * self.step_s(streams), self._min_gap_s)

    def room_s(self, streams: int) -> float:
        """Seconds for the prompt tokens of a step beside so many streams."""
        return self.gap_s(streams) - self.step_s(streams) - self._token.costs[0] * CHUNK_UNIT

    def token_s(self, prompt_context: float) -> float:
        """Seconds of a prompt token after so many others, beside what a chunk costs by itself."""
        _, token, attention = self._token.costs
        return token + attention * prompt_context / CONTEXT_UNIT

    def prompt_tokens(self, streams: int, prompt_context: int, most: int) -> int:
        """Tokens of one prompt, up to `most`, that a step beside so many streams may run after so many others."""
        room = self.room_s(streams)
        fits = max(0.0, room / self.token_s(prompt_context))
        fits = max(0.0, room / self.token_s(prompt_context + fits / 2))
        return min(most, self._most, max(MIN_CHUNK_TOKENS, int(fits)))

    def draft_nodes(self, work: StepWork) -> int:
        """Nodes of drafts that fit into a step, too: beside prompts half as many as those have tokens."""
        if not work.paced:
            return MAX_DRAFT_NODES
        if work.tokens:
            return work.tokens // 2
        longest = self._max_gap_s or max(MAX_DRAFT_STEP_S, self.gap_s(work.streams))
        return max(work.streams, int((longest - self.step_s(work.streams)) / self.token_s(0)))

    def observe(self, work: StepWork, nodes: int, seconds: float) -> None:
        """What a whole step took that also verified so many nodes of drafts. Steps without streams are not timed, as
        devices may still be at work, nor are drafts alone: what counts is a plain step."""
        tokens = work.tokens + nodes
        if not work.streams or (nodes and not work.tokens):
            return
        if not tokens:
            self._step.observe(seconds, 1.0, work.streams, slower_rate=FASTER_RATE)
            return
        self._most = max(self._most, 2 * work.tokens)
        context = (work.prompt_context + work.tokens / 2) * work.tokens / tokens / CONTEXT_UNIT
        parts, step_s = (CHUNK_UNIT / tokens, 1.0, context), self.step_s(work.streams)
        if work.untimed:  # a stream that has just begun may attend to far more than those before it
            tokens_s = tokens * self._token.seconds(*parts)
            share = step_s**2 / (step_s**2 + tokens_s**2)  # whichever of both is more of the step is likelier wrong
            seen = step_s + share * (seconds - step_s - tokens_s)
            self._step.observe(seen, 1.0, work.streams, slower_rate=SLOWER_RATE)
            step_s = seen
        self._token.observe((seconds - step_s) / tokens, *parts, slower_rate=SLOWER_RATE)
