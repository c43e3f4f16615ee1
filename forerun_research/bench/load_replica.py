"""One replica of a simulation: the engine's own scheduler, pacer and prefix tree on pages without K/V, and steps that
take as long as measured costs say.

So which prompts a step has, how long their pieces are, which wait and what is cached are the engine's rules,
not a picture of them. Knows no clock, no other replica and no router.
"""

from __future__ import annotations

import random
from array import array
from collections import defaultdict
from dataclasses import dataclass, fields
from itertools import count
from typing import Any

import torch

from forerun.cache.pool import PagePool
from forerun.cache.prefix import PrefixTree
from forerun.core import SamplingParams
from forerun.decode.control.cost import CostCurve
from forerun.engine.pace import TIMED_TOKENS, StepPacer
from forerun.engine.scheduler import Scheduler
from forerun.engine.sequence import Phase, Request, ScheduledSequence, Sequence
from forerun.llm import STEP_TOKENS
from forerun_research.bench.load_targets import ReplayedAnswer

MAX_PIECE_TOKENS = STEP_TOKENS["cpu"]  # of prompts in one step
PAGE_TOKENS = 16
TIMED_ROWS = 16  # answers from whose steps the pacer starts
LEAST_SHARE = 0.5  # of what such steps take on average: none takes less
NEAR_TOKENS = 832  # of a text: reading K/V of what lies beyond them may cost more, as caches do not hold it
RESTED_S = 1.0  # without a step: after so long nothing of K/V is in caches
FACTORS = ("intake_factor", "prompts_beside_answers", "answers_beside_prompts")  # of a replica's costs, in no unit
FIRST_NUMBER = 1 << 24  # of made-up tokens: no vocabulary is as large


@dataclass(frozen=True)
class ReplicaCosts:
    """Seconds of a step's parts."""

    step_s: float
    row_s: float
    prompt_token_s: float
    attention_s: float  # of one prompt token, for each token before it
    answer_attention_s: float = 0.0  # of one token of an answer, for each token before it
    encode_s: float = 0.0  # template and tokenizer, for each token of a prompt
    request_s: float = 0.0  # of each request, before its first step
    several_s: float = 0.0  # of a step that runs more than one token, of answers or prompts: kernels are others then
    # Of all that attend to one text in a step together, for each computed token of it: reading its K/V
    near_attention_s: float = 0.0
    far_attention_s: float = 0.0  # the same, for tokens beyond NEAR_TOKENS of the text
    cold_attention_s: float = 0.0  # the same, in addition, for those that were not read for a while
    # How much longer steps take while a request is taken in, and that beside steps: both are Python of one process
    intake_factor: float = 1.0
    # Replicas on one machine: as how many that do the same as a replica one counts that does the other, for one that
    # only decodes and for one that computes a prompt
    prompts_beside_answers: float = 1.0
    answers_beside_prompts: float = 1.0
    spread: tuple[float, ...] = (0.0,)  # by which steps differ from their mean, long ones by no more than short ones

    def toward(self, other: ReplicaCosts, share: float) -> ReplicaCosts:
        """On the straight line from these to those."""

        def between(name: str) -> float:
            own, their = getattr(self, name), getattr(other, name)
            return max(0.0, own + share * (their - own))

        values: dict[str, Any] = {name: between(name) for name in (*self._seconds(), *FACTORS)}
        return ReplicaCosts(**values, spread=self.spread if share < 0.5 else other.spread)

    def scaled(self, factor: float) -> ReplicaCosts:
        """Of a machine that is so many times slower."""
        values: dict[str, Any] = {name: factor * getattr(self, name) for name in self._seconds()}
        values |= {name: getattr(self, name) for name in FACTORS}
        return ReplicaCosts(**values, spread=tuple(factor * seconds for seconds in self.spread))

    def reading_s(self, tokens: float) -> float:
        """Reading K/V of so many tokens of one text."""
        return self.near_attention_s * min(tokens, NEAR_TOKENS) + self.far_attention_s * max(0.0, tokens - NEAR_TOKENS)

    @classmethod
    def _seconds(cls) -> list[str]:
        return [f.name for f in fields(cls) if f.name.endswith("_s")]

    def curve(self) -> CostCurve:
        """As the engine's pacer starts with."""
        rows = {n: self.step_s + n * self.row_s + self.several_s * (n > 1) for n in (1, TIMED_ROWS)}
        tokens_s = self.step_s + self.several_s + TIMED_TOKENS * self.prompt_token_s
        rows[TIMED_TOKENS] = max(rows[TIMED_ROWS], tokens_s)
        return CostCurve({n: max(seconds, 1e-9) for n, seconds in rows.items()}, 0.0, self.attention_s)


@dataclass(frozen=True)
class StepParts:
    """What a step computes."""

    rows: int = 0  # answers, one token each
    contexts: int = 0  # tokens before those, over all of them
    tokens: int = 0  # of prompts
    attended: float = 0.0  # tokens before those, over all of them
    near: int = 0  # computed tokens that some of all attend to, of the first NEAR_TOKENS of their texts
    far: int = 0  # and of those beyond

    cold: float = 0.0  # of all these, as many as were not read in the step before, or that was long ago

    @classmethod
    def of(cls, batch: list[ScheduledSequence], warm: set[int], rest_s: float) -> StepParts:
        """`warm`: pages that were read in the step before, which ended so long ago."""
        answers, prompts = [s for s in batch if s.decodes], [s for s in batch if not s.decodes]
        pages, cut = [_computed_pages(scheduled) for scheduled in batch], NEAR_TOKENS // PAGE_TOKENS
        near, all_read = {page for own in pages for page in own[:cut]}, {page for own in pages for page in own}
        cold = len(all_read - warm) + len(all_read & warm) * min(1.0, rest_s / RESTED_S)
        return cls(
            len(answers),
            sum(s.seq.computed for s in answers),
            sum(s.count for s in prompts),
            sum(s.count * (s.seq.computed + s.count / 2) for s in prompts),
            PAGE_TOKENS * len(near),
            PAGE_TOKENS * len(all_read - near),
            PAGE_TOKENS * cold,
        )

    def seconds(self, costs: ReplicaCosts) -> float:
        answers = costs.row_s * self.rows + costs.answer_attention_s * self.contexts
        prompts = costs.prompt_token_s * self.tokens + costs.attention_s * self.attended
        read = (
            costs.near_attention_s * self.near + costs.far_attention_s * self.far + costs.cold_attention_s * self.cold
        )
        return costs.step_s + answers + prompts + read + costs.several_s * (self.rows + self.tokens > 1)


def _computed_pages(scheduled: ScheduledSequence) -> array[int]:
    """Those with K/V that the sequence's next tokens attend to."""
    return scheduled.seq.pages[: -(-scheduled.seq.computed // PAGE_TOKENS)]


class TokenNumbers:
    """Made-up tokens, of all replicas together."""

    def __init__(self) -> None:
        self._next = count(FIRST_NUMBER)
        self._documents: dict[str, list[int]] = defaultdict(list)

    def new(self, length: int) -> list[int]:
        return [next(self._next) for _ in range(length)]

    def document(self, name: str, length: int) -> list[int]:
        """The first tokens of a document."""
        own = self._documents[name]
        own += self.new(length - len(own))
        return own[:length]


@dataclass(frozen=True)
class _NoKV:
    num_layers: int = 0
    num_kv_heads: int = 1
    head_dim: int = 1
    kv_size: int = 1


class SimulatedReplica:
    def __init__(self, name: str, costs: ReplicaCosts, cache_tokens: int, max_running: int, draw: int = 0) -> None:
        self.name = name
        pool = PagePool(_NoKV(), -(-cache_tokens // PAGE_TOKENS), PAGE_TOKENS, torch.float32, torch.device("cpu"))
        pacer = StepPacer(costs.curve)
        self._scheduler = Scheduler(pool, PrefixTree(pool), None, max_running, MAX_PIECE_TOKENS, None, pacer)
        self._answers: dict[Sequence, ReplayedAnswer] = {}
        self._batch: list[ScheduledSequence] = []
        self._draw = random.Random(f"{name} {draw}")
        self._rank = 0.0  # of the step that runs, among such steps by their seconds
        self._step: tuple[ReplicaCosts, float] | None = None  # costs that were asked for last, what it takes at those
        self.parts = StepParts()  # of that step
        self.left = 0.0  # of that step, as a share of it; 0: none runs
        self._began = 0.0
        self._ended, self._warm = -RESTED_S, set[int]()  # when the step before did, and pages with K/V that it had
        self.unanswered = 0  # requests that were sent here, those that are being encoded too
        self.sent = 0  # tokens of their prompts
        self.routed: dict[str, int] = {}  # tokens of texts that were sent here, as the router knows them

    @property
    def idle(self) -> bool:
        """Whether it has nothing to compute."""
        return self._scheduler.idle

    @property
    def has_prompts(self) -> bool:
        """Whether it computes one, or will in its next step."""
        waits = self._scheduler.waiting or any(seq.phase is not Phase.DECODING for seq in self._scheduler.running)
        return bool(waits) or self.parts.tokens > 0

    def add(self, answer: ReplayedAnswer, prompt: list[int], max_tokens: int, now: float) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, speculation="off")
        request = Request(prompt, params, lambda event: None, packed=array("i", prompt), streamed=True, arrived=now)
        seq = Sequence(request, 0, 0)
        self._answers[seq] = answer
        self._scheduler.add(seq)

    def begin_step(self, now: float) -> None:
        self._batch, self._began = self._scheduler.schedule(), now
        self.parts = StepParts.of(self._batch, self._warm, now - self._ended)
        self.left, self._rank, self._step = 1.0, self._draw.random(), None

    def step_s(self, costs: ReplicaCosts) -> float:
        """Of the step that runs, at these costs."""
        if self._step is None or self._step[0] is not costs:
            seconds = self.parts.seconds(costs)
            spread = costs.spread[int(self._rank * len(costs.spread))]
            self._step = costs, max(LEAST_SHARE * seconds, seconds + spread)
        return self._step[1]

    def finish_step(self, now: float, numbers: TokenNumbers) -> list[tuple[ReplayedAnswer, list[int]]]:
        """Answers that ended with it, and all of their tokens."""
        self.left, self.parts, self._ended, self._warm, ended = 0.0, StepParts(), now, set(), []
        for scheduled in self._batch:
            seq, samples = scheduled.seq, scheduled.samples
            seq.computed += scheduled.count
            self._warm.update(_computed_pages(scheduled))
            if seq.phase is Phase.PREFILLING:
                seq.enter_next()
                (self._scheduler.publish if seq.phase is Phase.DECODING else self._scheduler.publish_pages)(seq)
            if not samples:
                continue
            seq.tokens += numbers.new(1)
            self._answers[seq].token_times.append(now)
            if seq.num_generated < seq.params.max_tokens:
                self._scheduler.trim(seq)
                continue
            answer = self._answers.pop(seq)
            answer.cached_tokens = seq.usage.cached_tokens
            self._scheduler.finish(seq)
            ended.append((answer, seq.tokens))
        if self._scheduler.work.paced:
            self._scheduler.pacer.observe(self._scheduler.work, 0, now - self._began)
        return ended
