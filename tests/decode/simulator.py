"""A simulated engine: the real speculator and controller over drafters that are right or wrong by design, on a clock of
their own. No model runs and nothing sleeps.

A device runs ahead of the host: a plain step that follows a plain one is launched before that one's tokens are read, so
the host's work and drafters beside it show only where they take longer than the step. A step with a draft, and the one
after it, start when the host has done its work.

Whether a drafter is right about a position is decided beforehand, so all policies see the same text. A policy is `auto`
(every drafter, the controller decides), plain decoding, or one drafter at a fixed depth, which is what `auto` is
compared with.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from forerun.core import ROOT, Draft, SamplingParams, Usage, Verdict
from forerun.decode import speculator as speculator_module
from forerun.decode.control.controller import Controller
from forerun.decode.control.cost import CostCurve
from forerun.decode.drafter_pool import DraftTask, SpeculationState
from forerun.decode.drafters.base import MAX_CATCH_UP_TOKENS, Drafter, DraftRequest, DraftRound
from forerun.decode.sampling import Context
from forerun.decode.speculator import Speculator
from forerun.decode.verifiers import make_verifier

WRONG = 1 << 20  # added to a token that is not the text's
VOCAB = 1 << 21


@dataclass(frozen=True)
class Machine:
    """Seconds, by rows where a forward has some."""

    target: dict[int, float]
    rounds: dict[int, float]  # of the draft model
    read_s: tuple[float, float]  # of the draft model, for a prompt and for a token of it
    host_s: tuple[float, float]  # of a step, beside forwards and drafters: of the step, and of a sequence
    draft_host_s: float  # the same of a sequence with a draft
    run_s: float  # of a free drafter, for one sequence
    ahead: bool = False  # steps are launched ahead of the host
    plan_s: float = 20e-6  # of planning for a paid drafter, for one sequence
    grow_s: float = 0.0  # of making a draft of what its forward gave, for one sequence


# One H200: 8 rows cost next to nothing more, and the host's 0.3 ms show where a step is not launched ahead. Two cores:
# 8 rows take 1.7 times as long as one (docs/results.md); what the draft model's rounds take as they are, and as fast as
# its size would allow.
H200 = Machine(
    {1: 1.25e-3, 8: 1.35e-3, 16: 1.5e-3, 32: 1.9e-3, 64: 3.2e-3},
    {1: 0.6e-3, 8: 0.8e-3, 16: 0.95e-3, 64: 1.5e-3},
    read_s=(3e-3, 4e-6),
    host_s=(0.27e-3, 30e-6),
    draft_host_s=80e-6,
    run_s=50e-6,
    ahead=True,
)
# The same as measured on 2026-11-18 with the pair: rounds of the trained 0.5B are waited for, and Python around them
# takes half a millisecond
H200_HOST = Machine(
    {1: 1.23e-3, 2: 1.47e-3, 4: 1.53e-3, 8: 1.65e-3, 16: 1.83e-3, 32: 2.22e-3, 64: 2.45e-3},
    {1: 0.75e-3, 8: 0.87e-3, 16: 0.94e-3, 64: 1.46e-3},
    read_s=(4e-3, 4e-6),
    host_s=(0.27e-3, 30e-6),
    draft_host_s=0.25e-3,
    run_s=0.12e-3,
    ahead=True,
    plan_s=50e-6,
    grow_s=0.25e-3,
)
CORES = Machine(
    {1: 0.024, 2: 0.025, 4: 0.029, 8: 0.040, 16: 0.074, 64: 0.29},
    {1: 0.014, 2: 0.016, 4: 0.022, 8: 0.035, 16: 0.070, 64: 0.26},
    read_s=(0.0, 2.2e-3),
    host_s=(0.2e-3, 0.1e-3),
    draft_host_s=0.2e-3,
    run_s=100e-6,
)
FAST_CORES = replace(CORES, rounds={1: 0.009, 2: 0.010, 4: 0.012, 8: 0.017, 16: 0.030, 64: 0.11})


@dataclass(frozen=True)
class Category:
    """Texts of one kind: how often each drafter is right."""

    kind: str
    model: float  # acceptance of a draft model's token once its parent is
    block: float  # the same of a model that drafts several tokens in one forward
    lookup: tuple[float, float, int]  # share of positions with a match, acceptance there, tokens proposed
    prompt: int = 100
    tokens: int = 128


CATEGORIES = {
    "code": Category("code", 0.93, 0.80, (0.3, 0.5, 4)),
    "edits": Category("code", 0.93, 0.80, (0.9, 0.96, 10), prompt=250),
    "maths": Category("numbers", 0.88, 0.75, (0.2, 0.4, 4)),
    "chat": Category("text", 0.72, 0.55, (0.1, 0.3, 4), prompt=60),
    "roleplay": Category("text", 0.6, 0.42, (0.1, 0.2, 4), prompt=80),
    "translation": Category("text", 0.55, 0.35, (0.15, 0.15, 4), prompt=64, tokens=24),
    "summary": Category("long", 0.75, 0.55, (0.5, 0.75, 8), prompt=740),
    "questions on documents": Category("long", 0.65, 0.45, (0.3, 0.4, 5), prompt=740, tokens=64),
}


# Of the drafter that was trained, in its file: by kind, over texts of that kind, not of any one category
CARD = {kind: [[100.0 * p, 100.0]] * 8 for kind, p in (("code", 0.8), ("numbers", 0.75), ("text", 0.45), ("long", 0.5))}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@dataclass
class Text:
    """One request: prompt and answer are numbered tokens; which drafter is right where is drawn beforehand."""

    category: Category
    seed: int
    num: int = 0
    right: dict[str, list[bool]] = field(default_factory=dict)
    offers: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num = self.num or self.category.tokens
        rng, size = random.Random(self.seed), self.num + 64
        for name in ("model", "parallel"):
            accepted = self.category.model if name == "model" else self.category.block
            self.right[name] = [rng.random() < accepted for _ in range(size)]
        share, accepted, proposed = self.category.lookup
        run = 2.0 * proposed  # stretches with a match and without
        self.right["lookup"] = []
        while len(self.offers) < size:
            for inside, mean in ((False, run * (1 - share) / share), (True, run)):
                for _ in range(1 + int(rng.expovariate(1 / mean))):
                    self.offers.append(proposed if inside else 0)
                    self.right["lookup"].append(rng.random() < (accepted if inside else 0.05))

    def chain(self, name: str, at: int, count: int) -> list[int]:
        return [1000 + t if self.right[name][t] else WRONG + t for t in range(at, min(at + count, self.num + 60))]


class SimulatedDrafter(Drafter):
    """Right or wrong as its text has it; its time passes on the clock."""

    def __init__(self, name: str, world: World, paid: bool, block: int = 1) -> None:
        self.name, self.free, self.world = name, not paid, world  # type: ignore[misc]
        self.tokens_per_round, self.max_context, self.rounds = block, 1 << 30, []
        self.max_unread_tokens = 8 if block == 1 else 16

    def catch_up_tokens(self, request: DraftRequest) -> int:
        self.world.clock.now += self.world.machine.plan_s  # it is asked when rounds are planned
        return self._missing(request)

    def _missing(self, request: DraftRequest) -> int:
        return len(request.tokens) - self.world.read.get(request.seq_id, 0)

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        world, drafts = self.world, []
        self.rounds = []
        texts = [world.texts[request.seq_id] for request in requests]
        at = [len(request.tokens) - request.context.num_prompt for request in requests]
        if self.free:
            for text, here in zip(texts, at, strict=True):
                world.clock.now += world.machine.run_s
                tokens = text.chain(self.name, here, text.offers[here])
                accepted = text.category.lookup[1]
                drafts.append(Draft.chain(tokens, [accepted] * len(tokens), self.name))
            return drafts
        read = [self._read(request) for request in requests]
        depths = self._grow([request for request, whole in zip(requests, read, strict=True) if whole])
        waiting = iter(depths)
        depths = [next(waiting) if whole else 0 for whole in read]
        for request, text, here, depth in zip(requests, texts, at, depths, strict=True):
            tokens = text.chain(self.name, here, depth)
            world.clock.now += world.machine.grow_s if tokens else 0.0
            drafts.append(Draft.chain(tokens, [self._claimed(text)] * len(tokens), self.name))
            right = 0
            while right < len(tokens) and tokens[right] < WRONG:
                right += 1
            world.read[request.seq_id] += right if self.tokens_per_round == 1 else 0
        return drafts

    def _read(self, request: DraftRequest) -> bool:
        """Catch up with a sequence, a long prompt in parts; whether nothing is missing any more."""
        missing = self._missing(request)
        if missing > self.max_unread_tokens:
            start_s, token_s = self.world.machine.read_s
            missing = min(missing, MAX_CATCH_UP_TOKENS)
            self.world.clock.now += start_s + token_s * missing
        self.world.read[request.seq_id] = self.world.read.get(request.seq_id, 0) + missing
        return self._missing(request) == 0

    def _grow(self, requests: list[DraftRequest]) -> list[int]:
        """Depths, and the rounds for them pass."""
        most = [min(request.max_depth, request.max_nodes) for request in requests]
        if self.tokens_per_round > 1 and requests:
            depths = [min(n, self.tokens_per_round) for n in most]
            self._round(sum(depths) + 2 * len(requests), len(requests))
            return depths
        depths, active = [0] * len(requests), list(range(len(requests)))
        while active:
            self._round(len(active), len(active))
            for i in active:
                depths[i] += 1
            active = [i for i in active if depths[i] < most[i] and self._goes_on(requests[i], depths[i])]
        return depths

    def _goes_on(self, request: DraftRequest, depth: int) -> bool:
        claimed = self._claimed(self.world.texts[request.seq_id])
        return request.keep_drafting is None or request.keep_drafting(claimed**depth, depth)

    def _claimed(self, text: Text) -> float:
        """Its own probability of a token: draft models are too sure of themselves."""
        accepted = text.category.model if self.tokens_per_round == 1 else text.category.block
        return 1.0 - 0.75 * (1.0 - accepted)

    def _round(self, rows: int, sequences: int) -> None:
        seconds = self.world.rounds.seconds(rows, sequences)
        self.world.clock.now += seconds
        self.rounds = [*self.rounds, DraftRound(rows, sequences, seconds)]


class World:
    """An engine with simulated costs. `drafters` of a request: those of `auto` unless named."""

    def __init__(self, machine: Machine, drafters: tuple[str, ...], controller: Controller | None = None) -> None:
        self.machine, self.clock, self.names = machine, Clock(), list(drafters)
        self.target, self.rounds = CostCurve(machine.target), CostCurve(machine.rounds)
        self.texts: dict[int, Text] = {}
        self._in_flight, self._decided = False, False  # a step is; the next one is to draft
        self._device_s, self._read_at = 0.0, 0.0  # when the step in flight ends; when the last one's tokens came
        self.read: dict[int, int] = {}  # of both drafters of the draft model: they share its K/V
        runner = SimpleNamespace(decoder=SimpleNamespace(config=SimpleNamespace(vocab_size=VOCAB)))
        ctx: Any = SimpleNamespace(tokenizer=None, paid_drafters=[], remote_drafters=[], runner=runner)
        self.controller = controller or Controller(CostCurve(machine.target), {})
        self.spec = Speculator(ctx, self.controller)
        for name in drafters:
            paid, block = name != "lookup", 10 if name == "parallel" else 1
            self.spec.drafter_pool._drafters[name] = SimulatedDrafter(name, self, paid, block)
            if paid and name not in self.controller.drafters:
                curve = self.controller.drafters[name] = CostCurve(machine.rounds)
                curve.start_factor = (machine.read_s[0] + 128 * machine.read_s[1]) / curve.seconds(128)
            if paid:
                self.controller.drafters[name].tokens_per_round = block
            if name == "parallel":
                self.controller.acceptance.records[name].add_measured(CARD)

    def open(self, text: Text, named: bool = False) -> SpeculationState:
        category, seq_id = text.category, len(self.texts)
        self.texts[seq_id] = text
        params = SamplingParams(max_tokens=text.num, temperature=0.0)
        context = Context(params, [*range(category.prompt), 1000], category.prompt, seed=0)
        stats = self.controller.new_request(category.kind, category.prompt, text.num, named)
        stats.tokens = 1
        return SpeculationState(
            seq_id, context, Usage(), list(self.names), make_verifier(params.speculation), stats, False, kind_final=True
        )

    def answer(self, texts: list[Text], depth: int = 0, plain: bool = False) -> list[float]:
        """Seconds until each answer ends, all running together. `depth`: fixed, without a controller's decision."""
        with self._on_clock():
            start = self.clock.now
            live = [self.open(text) for text in texts]
            self._in_flight = self._decided = False
            ended: dict[int, float] = {}
            order = [state.seq_id for state in live]
            while live:
                self._step(live, depth, plain)
                for state in live:
                    if len(state.context.tokens) - state.context.num_prompt >= self.texts[state.seq_id].num:
                        ended[state.seq_id] = self.clock.now - start
                        self.spec.finish(state)
                live = [state for state in live if state.seq_id not in ended]
            return [ended[seq_id] for seq_id in order]

    def _step(self, live: list[SpeculationState], depth: int, plain: bool) -> None:
        """On a device that runs ahead a step is in flight when this begins, where the last two were plain."""
        drafts, in_flight = [Draft() for _ in live], self._in_flight
        self._in_flight = False
        if in_flight:  # the step that is read now was launched; is the next one to be launched too?
            self._in_flight = plain or not self._leaves(live)
        elif depth:
            drafts = self._fixed(live, depth)
        elif not plain and (self._decided or self.spec.should_draft(live, self.machine.ahead)):
            tasks = self._tasks(live, 1)
            if any(task.max_nodes > 0 for task in tasks):
                self.spec.draft(tasks)
                drafts = [task.draft for task in tasks]
        if not in_flight:
            self._decided = False
        rows = len(live) + sum(map(len, drafts))
        launched = self.machine.ahead and not depth and rows == len(live)
        if launched and not in_flight:
            self._device_s = self.clock.now + self.target.seconds(rows, len(live))
            self._in_flight = plain or not self._leaves(live)
        seconds, waited_s = self.target.seconds(rows, len(live)), None
        if launched:
            start = self.clock.now
            self.clock.now = max(start, self._device_s)
            seconds = self.clock.now - self._read_at if in_flight else seconds
            waited_s = self.clock.now - start if in_flight else 0.0
            # the next one runs since the device was free and it was launched
            self._device_s = max(self._device_s, start) + self.target.seconds(rows, len(live))
        else:
            self.clock.now += seconds
        self._read_at = self.clock.now
        if not depth and not plain:
            self.spec.observe(drafts, 0, seconds, waited_s)
        self.clock.now += self.machine.host_s[0]
        for state, draft in zip(live, drafts, strict=True):
            path, emitted = self._verified(state, draft)
            state.context.tokens.extend(emitted)
            self.clock.now += self.machine.host_s[1] + (self.machine.draft_host_s if len(draft) else 0.0)
            if not depth and not plain:
                self.spec.record_outcome(state, draft, Verdict(path, emitted[-1]), emitted)

    def _leaves(self, live: list[SpeculationState]) -> bool:
        self._decided = not self.spec.passes(len(live)) and self.spec.should_leave(self._tasks(live, 2))
        return self._decided

    def _tasks(self, live: list[SpeculationState], ahead: int) -> list[DraftTask]:
        """`ahead`: tokens of each that no draft has to predict."""
        tasks = []
        for state in live:
            left = self.texts[state.seq_id].num - (len(state.context.tokens) - state.context.num_prompt) - ahead
            tasks.append(DraftTask(state, array("i"), min(64, max(0, left))))
        return tasks

    def _verified(self, state: SpeculationState, draft: Draft) -> tuple[list[int], list[int]]:
        text, at = self.texts[state.seq_id], len(state.context.tokens) - state.context.num_prompt
        children = draft.children()
        path: list[int] = []
        node, emitted = ROOT, [1000 + at]
        while (node := next((n for n in children.get(node, ()) if draft.tokens[n] == emitted[-1]), ROOT)) != ROOT:
            path.append(node)
            emitted.append(emitted[-1] + 1)
            if at + len(emitted) >= text.num:
                break
        return path, emitted[: max(1, text.num - at)]

    def _fixed(self, live: list[SpeculationState], depth: int) -> list[Draft]:
        """Of the only drafter, always as deep."""
        drafter = self.spec.drafter_pool._drafters[self.names[0]]
        requests = [DraftRequest(state.seq_id, state.context, depth, depth, array("i")) for state in live]
        return drafter.propose(requests)

    @contextmanager
    def _on_clock(self) -> Iterator[None]:
        real = speculator_module.time
        speculator_module.time = self.clock  # type: ignore[assignment]
        try:
            yield
        finally:
            speculator_module.time = real


def plain_s(machine: Machine, texts: list[Text]) -> list[float]:
    """Seconds of each request without drafts, one after the other."""
    return [World(machine, ("lookup",)).answer([text], plain=True)[0] for text in texts]


def single_s(machine: Machine, texts: list[Text], drafters: tuple[str, ...]) -> dict[str, float]:
    """Seconds of all requests, one after the other, with each drafter alone at the depth that is best for them all."""
    depths = {"lookup": (4, 10), "model": (2, 3, 4, 6), "parallel": (3, 4, 6, 10)}
    found = {}
    for name in drafters:
        found[name] = min(sum(World(machine, (name,)).answer([t], depth=d)[0] for t in texts) for d in depths[name])
    return found


AUTO = ("lookup", "parallel")
