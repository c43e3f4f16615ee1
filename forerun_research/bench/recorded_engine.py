"""Recorded answers on a simulated clock: the real speculator, controller, free drafters and loop of steps on a device.

An answer's tokens and what a draft model proposes at each of them were recorded once (`recorded_decisions`); here they
come again in the time that a machine's measured costs say, with any drafter and any decision. A device runs ahead of
the host as in the engine: its steps follow each other, and what the host does beside them shows only where it takes
longer. Knows no model.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from forerun.core import ROOT, Draft, SamplingParams, Speculation, Usage, Verdict
from forerun.core.drafted import DraftedStart, DraftedTokens, rows_of
from forerun.decode import speculator as speculator_module
from forerun.decode.control.controller import Controller
from forerun.decode.control.cost import CostCurve
from forerun.decode.device_drafting import DeviceDrafting
from forerun.decode.drafter_pool import DraftTask, SpeculationState
from forerun.decode.drafters import find
from forerun.decode.drafters.base import MAX_CATCH_UP_TOKENS, DraftRequest, DraftRound
from forerun.decode.drafters.parallel import ParallelDrafter
from forerun.decode.sampling import Context
from forerun.decode.speculator import Speculator
from forerun.engine import draft_ahead
from forerun.engine.draft_ahead import DraftAhead
from forerun.engine.sequence import Phase
from forerun.text.tokenizer import Tokenizer

FREE = ("lookup", "copy", "suffix")
BLOCK = 12  # tokens of a draft in one forward
VOCAB = 1 << 21
ACCOUNT_S = 50e-6  # of a drafted step on a device, that the host takes for its tokens
ROWS_ALONE = 31  # drafted tokens of a sequence in one forward of a device


@dataclass(frozen=True)
class Machine:
    """Seconds, by rows where a forward has some."""

    target: dict[int, float]
    rounds: dict[int, float]  # of the draft model
    read_s: tuple[float, float]  # of the draft model, for a pass and for a token of it
    host_s: float  # of a plain step beside its forward
    draft_host_s: float  # and of a draft more
    run_s: float  # of a free drafter
    plan_s: float
    grow_s: float  # of a tree out of what a forward gave
    step_s: float = 0.0  # of a step that drafts on a device, which then runs ahead of the host
    tree: str = "plain"  # of the recorded ones: with a Markov head or without


# As measured in November 2026 (docs/results.md); what reading takes on the H200 is a guess
H200 = Machine(
    {1: 1.20e-3, 2: 1.40e-3, 4: 1.45e-3, 8: 1.5e-3, 16: 1.55e-3, 32: 1.9e-3, 64: 2.45e-3},
    {1: 0.55e-3, 8: 0.58e-3, 16: 0.6e-3, 32: 0.8e-3, 64: 1.46e-3, 128: 2e-3},
    (2.5e-3, 4e-6), 0.17e-3, 0.25e-3, 0.10e-3, 0.06e-3, 0.25e-3, step_s=2.27e-3,
)  # fmt: skip
CORES = Machine(
    {1: 33.0e-3, 2: 33.4e-3, 4: 34.7e-3, 5: 37.9e-3, 8: 47e-3, 11: 62.2e-3, 16: 82.8e-3, 32: 0.165, 64: 0.33},
    {1: 11.0e-3, 2: 11.2e-3, 4: 11.9e-3, 5: 12.7e-3, 8: 15.8e-3, 11: 21e-3, 16: 27.3e-3, 32: 54e-3, 64: 0.108},
    (2e-3, 1.6e-3), 0.3e-3, 0.3e-3, 0.15e-3, 0.1e-3, 0.3e-3, tree="markov",
)  # fmt: skip

# Two cores of another CPU (Zen 5), as `bench speculate` had them at its end on 2026-11-19; reading from draft times
ZEN5 = Machine(
    {1: 24.5e-3, 2: 27.0e-3, 4: 28.9e-3, 8: 30.6e-3, 10: 35.5e-3, 13: 42.9e-3, 16: 49.4e-3, 32: 91e-3, 64: 0.181},
    {1: 5.6e-3, 2: 6.1e-3, 4: 8.2e-3, 8: 9.6e-3, 12: 12.4e-3, 16: 14.9e-3, 23: 22.3e-3, 32: 32.6e-3, 64: 44e-3},
    (2e-3, 0.6e-3), 0.3e-3, 0.25e-3, 0.10e-3, 0.06e-3, 0.2e-3, tree="markov",
)  # fmt: skip


@dataclass
class RecordedAnswer:
    """One answer. `drafts`: by tokens of the answer so far, and by kind of tree: tokens, parents, probabilities, in the
    order in which a tree grows."""

    category: str
    prompt: list[int]
    answer: list[int]
    drafts: dict[int, dict[str, tuple[list[int], list[int], list[float]]]]
    max_tokens: int = 128

    def tree(self, at: int, kind: str, nodes: int, depth: int) -> Draft:
        draft, found = Draft(), self.drafts.get(at)
        if found is None:
            return draft
        places, depths = {ROOT: ROOT}, {ROOT: 0}
        for node, (token, parent, prob) in enumerate(zip(*found[kind], strict=True)):
            if len(draft) < nodes and parent in places and depths[parent] < depth:
                depths[node] = depths[parent] + 1
                places[node] = draft.add(token, places[parent], prob, ParallelDrafter.name)
        return draft

    def accepted(self, draft: Draft, at: int) -> tuple[list[int], list[int]]:
        """The tokens that a step with this draft gives, and the path that was right."""
        children, path, tokens, node = draft.children(), list[int](), [self.answer[at]], ROOT
        while at + len(tokens) < len(self.answer):
            right = [n for n in children.get(node, ()) if draft.tokens[n] == tokens[-1]]
            if not right:
                break
            node = right[0]
            path.append(node)
            tokens.append(self.answer[at + len(tokens)])
        return tokens, path


@dataclass(eq=False)
class RecordedSequence:
    """A recorded answer that is given again: as much of an engine's sequence as drafting asks for."""

    id: int
    recorded: RecordedAnswer
    params: SamplingParams
    tokens: list[int]
    spec_state: SpeculationState | None = None
    phase: Phase = Phase.DECODING
    usage: Usage = field(default_factory=Usage)
    pages: array[int] = field(default_factory=lambda: array("i"))
    seconds: float = 0.0  # that it took
    log: list[tuple[int, float, str, int]] = field(default_factory=list)  # by step: tokens so far, seconds, why, new

    @property
    def num_sampled(self) -> int:
        return len(self.tokens) - len(self.recorded.prompt)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def wait(self, until: float) -> None:
        self.now = max(self.now, until)


class RecordedDrafter(ParallelDrafter):
    """Drafts what was recorded, in the time of the machine."""

    def __init__(self, engine: RecordedEngine, outcomes: dict[str, list[list[float]]]) -> None:
        self._engine, self._valid = engine, dict[int, int]()
        self.tokens_per_round, self.outcomes, self.rounds, self.stops_on_device = BLOCK, outcomes, [], False
        self.max_context = 1 << 30
        self.steps = RecordedDevice(engine) if engine.machine.step_s else None  # type: ignore[assignment]

    def catch_up_tokens(self, request: DraftRequest) -> int:
        self._engine.clock.now += self._engine.machine.plan_s
        return len(request.tokens) - self._valid.get(request.seq_id, 0)

    def read_up(self, request: DraftRequest, most: int) -> list[int] | None:
        if not self._read(request, min(most, self.max_unread_tokens)):
            return None
        return request.tokens[self._valid[request.seq_id] :]

    def _read(self, request: DraftRequest, most: int) -> bool:
        machine, engine = self._engine.machine, self._engine
        valid = self._valid.setdefault(request.seq_id, 0)
        if (missing := len(request.tokens) - valid) > most:
            count = min(missing - 1, MAX_CATCH_UP_TOKENS)
            few = machine.step_s and count <= max(machine.target) // 2  # one launch
            start_s, token_s = machine.read_s
            engine.clock.now += engine.rounds.seconds(count) if few else start_s + token_s * count
            self._valid[request.seq_id] = valid + count
        return len(request.tokens) - self._valid[request.seq_id] <= most

    def ran(self, seq_id: int, tokens: int) -> None:
        self._valid[seq_id] = tokens

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        engine, self.rounds = self._engine, []
        ready = [request for request in requests if self._read(request, self.max_unread_tokens)]
        if ready:
            depths = [min(request.max_depth, request.max_nodes, BLOCK) for request in ready]
            unread = [len(request.tokens) - self._valid[request.seq_id] for request in ready]
            rows = sum(unread) + sum(depths) - len(ready)
            seconds = engine.rounds.seconds(rows, len(ready))
            self.rounds = [DraftRound(rows, len(ready), seconds)]
            engine.clock.now += seconds + engine.machine.grow_s * len(ready)
        drafts = {}
        for request in ready:
            self._valid[request.seq_id] = len(request.tokens)
            recorded, at = engine.recorded[request.seq_id], len(request.tokens) - request.context.num_prompt
            depth = min(request.max_depth, request.max_nodes, BLOCK)
            drafts[request.seq_id] = recorded.tree(at, engine.machine.tree, request.max_nodes, depth)
        return [drafts.get(request.seq_id, Draft()) for request in requests]

    def finish(self, seq_id: int, tokens: list[int], num_prompt: int) -> None:
        self._valid.pop(seq_id, None)


class RecordedDevice:
    """Steps that draft without the host."""

    def __init__(self, engine: RecordedEngine) -> None:
        self._engine, self._at = engine, dict[int, int]()  # by sequence, tokens of its answer

    def prepare(self) -> None:
        pass

    def begin(self, starts: Seq[DraftedStart], depth: int, nodes: int) -> None:
        self._at = {seq.id: seq.num_sampled for seq in self._engine.running}
        self._nodes = min(nodes, rows_of(len(starts)) - 1)

    def send_pages(self, pages: Seq[Seq[int]]) -> None:
        pass

    def launch(self) -> Any:
        engine, found = self._engine, []
        for seq_id, at in self._at.items():
            recorded = engine.recorded[seq_id]
            draft = recorded.tree(at, engine.machine.tree, self._nodes, BLOCK)
            over = at >= len(recorded.answer)  # an answer that has ended has a step too many on its way
            tokens = [0] if over else recorded.accepted(draft, at)[0]
            self._at[seq_id] = at + len(tokens)
            found.append(DraftedTokens(tokens, len(draft), BLOCK))
        end = engine.launched(engine.machine.step_s)

        def read() -> list[DraftedTokens]:
            engine.clock.wait(end)
            return found

        return SimpleNamespace(read=read)


class RecordedEngine:
    """An engine's steps, and as much of a scheduler as steps on a device ask for."""

    def __init__(
        self, machine: Machine, outcomes: dict[str, list[list[float]]], tokenizer: Tokenizer | None = None
    ) -> None:
        self.machine, self.clock, self.free_at = machine, Clock(), 0.0  # when the device will be
        self.target, self.rounds = CostCurve(machine.target), CostCurve(machine.rounds)
        self.recorded: dict[int, RecordedAnswer] = {}
        self.running: list[RecordedSequence] = []
        self.waiting: list[RecordedSequence] = []
        self._in_flight: tuple[list[RecordedSequence], float, float] | None = None  # who, until when, since when
        self._draft_next, self._last_read = False, 0.0
        self.controller = Controller(CostCurve(machine.target), {ParallelDrafter.name: self._round_costs()})
        config = SimpleNamespace(decoder=SimpleNamespace(config=SimpleNamespace(vocab_size=VOCAB)))
        ctx: Any = SimpleNamespace(
            tokenizer=tokenizer, runner=config, paid_drafters=[ParallelDrafter.name], remote_drafters=[]
        )
        with patch("forerun.decode.drafter_pool.DrafterPool.prepare"):
            self.speculator = Speculator(ctx, self.controller)
        pool = self.speculator.drafter_pool
        for name in FREE:
            kind = find(name)
            assert kind is not None
            pool._drafters[name] = self._timed(kind(ctx))
        pool._drafters[ParallelDrafter.name] = RecordedDrafter(self, outcomes)
        self.controller.acceptance.records[ParallelDrafter.name].add_measured(outcomes)
        self._drafting = DeviceDrafting(self.speculator)

    def _round_costs(self) -> CostCurve:
        curve, (start_s, token_s) = CostCurve(self.machine.rounds), self.machine.read_s
        curve.tokens_per_round = BLOCK
        if self.machine.step_s:
            curve.reading = CostCurve({tokens: start_s + token_s * tokens for tokens in (128, 512)})
        else:
            curve.start_factor = (start_s + 128 * token_s) / curve.seconds(128)
        return curve

    def _timed(self, drafter: Any) -> Any:
        propose = drafter.propose

        def timed(requests: list[DraftRequest]) -> list[Draft]:
            self.clock.now += self.machine.run_s * len(requests)
            return list(propose(requests))

        drafter.propose = timed
        return drafter

    def launched(self, seconds: float) -> float:
        """Something is enqueued on the device now: when it will have ended."""
        self.free_at = max(self.free_at, self.clock.now) + seconds
        return self.free_at

    def reserve(self, seq: RecordedSequence, entries: int) -> int:
        return entries

    # -- answers -------------------------------------------------------------------------------------------------------

    def answer(self, recorded: Seq[RecordedAnswer], drafter: str) -> list[RecordedSequence]:
        """All of these at once, each from its first token on. `drafter`: auto, off, or by name."""
        self.speculator.drafter_pool.forget()
        with ExitStack() as stack:
            for module in (speculator_module, draft_ahead):
                stack.enter_context(patch.object(module, "time", self.clock))
            self.clock.wait(self.free_at)
            start = self.clock.now
            sequences = [self._open(each, drafter) for each in recorded]
            self._ahead: Any = DraftAhead(self._drafting, self, 1 << 30, self._append_drafted, _raise)  # type: ignore[arg-type]
            self.running, self._in_flight, self._draft_next = list(sequences), None, False
            self.controller._ended = None  # the step before held a prompt's tokens
            while self.running:
                self._step()
            for seq in sequences:
                seq.seconds -= start
                seq.log = [(tokens, now - start, why, new) for tokens, now, why, new in seq.log]
            return sequences

    def _open(self, recorded: RecordedAnswer, drafter: str) -> RecordedSequence:
        seq_id, spec = len(self.recorded), Speculation(drafter)
        self.recorded[seq_id] = recorded
        params = SamplingParams(max_tokens=recorded.max_tokens, temperature=0.0, speculation=spec)
        seq = RecordedSequence(seq_id, recorded, params, [*recorded.prompt, recorded.answer[0]])
        prompt = Context(params, list(recorded.prompt), len(recorded.prompt), 0)
        seq.spec_state = self.speculator.open(seq_id, prompt, seq.usage)
        if seq.spec_state is not None:
            seq.spec_state.context = Context(params, seq.tokens, len(recorded.prompt), 0)
            seq.spec_state.stats.tokens = 1
        return seq

    def _append(self, seq: RecordedSequence, tokens: list[int], why: str) -> list[int]:
        """As far as the answer goes."""
        tokens = tokens[: len(seq.recorded.answer) - seq.num_sampled]
        seq.tokens += tokens
        seq.log.append((seq.num_sampled, self.clock.now, why, len(tokens)))
        return tokens

    def _end(self, seq: RecordedSequence) -> None:
        if seq.num_sampled >= len(seq.recorded.answer):
            seq.phase, seq.seconds = Phase.FINISHED, self.clock.now
            self.running = [other for other in self.running if other is not seq]
            if seq.spec_state is not None:
                self.speculator.finish(seq.spec_state)

    def _append_drafted(self, seq: Any, result: DraftedTokens) -> None:
        self.clock.now += ACCOUNT_S
        emitted = self._append(seq, result.tokens, "device")
        self._drafting.record(seq.spec_state, result, emitted)
        self._end(seq)

    # -- the engine's step ---------------------------------------------------------------------------------------------

    def _step(self) -> None:
        if self._ahead.in_flight is not None and self._ahead.step():
            return
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None and any(seq.phase is Phase.DECODING for seq in in_flight[0]):
            self._finish_step(*in_flight)
            return
        batch, machine = list(self.running), self.machine
        drafts = self._draft_tokens(batch)
        if self._ahead.in_flight is not None:
            self._ahead.step()
        elif machine.step_s and not any(map(len, drafts)):
            self._finish_step(*self._launch(batch))
        else:
            self._verify(batch, drafts)

    def _draft_tokens(self, batch: list[RecordedSequence]) -> list[Draft]:
        states = [seq.spec_state for seq in batch if seq.spec_state is not None]
        decided, self._draft_next, ahead = self._draft_next, False, self.machine.step_s > 0.0
        if states and (decided or self.speculator.should_draft(states, ahead)):
            tasks = self._tasks(batch, 0)
            if any(task.max_nodes for task in tasks):
                plan = self.speculator.draft(self._drafting.mark(tasks) if ahead else tasks)
                if plan is not None:
                    self._ahead.begin(batch, plan)
                return [task.draft for task in tasks]
        return [Draft() for _ in batch]

    def _tasks(self, batch: list[RecordedSequence], in_flight: int) -> list[DraftTask]:
        tasks, room = [], (1 + ROWS_ALONE) // len(batch) - 1 if self.machine.step_s else 1 << 30
        for seq in batch:
            left = seq.params.max_tokens - seq.num_sampled - 1 - in_flight
            if seq.spec_state is not None:
                nodes = max(0, min(left, seq.params.speculation.nodes, room))
                tasks.append(DraftTask(seq.spec_state, seq.pages, nodes))
        return tasks

    def _verify(self, batch: list[RecordedSequence], drafts: list[Draft]) -> None:
        rows, start = len(batch) + sum(map(len, drafts)), self.clock.now
        self.clock.wait(self.launched(self.target.seconds(rows, len(batch))))
        if batch[0].spec_state is not None:
            longest = max(len(seq.tokens) for seq in batch)
            self.speculator.observe(drafts, longest, self.clock.now - start)
        self.clock.now += self.machine.host_s
        for seq, draft in zip(batch, drafts, strict=True):
            self.clock.now += self.machine.draft_host_s if len(draft) else 0.0
            tokens, path = seq.recorded.accepted(draft, seq.num_sampled)
            emitted = self._append(seq, tokens, "+".join(sorted(set(draft.sources))) or "plain")
            if seq.spec_state is not None:
                self.speculator.record_outcome(seq.spec_state, draft, Verdict(path, tokens[-1]), emitted)
            self._end(seq)

    def _launch(self, batch: list[RecordedSequence]) -> tuple[list[RecordedSequence], float, float]:
        return batch, self.launched(self.target.seconds(len(batch), len(batch))), self.clock.now

    def _finish_step(self, batch: list[RecordedSequence], end: float, launched: float) -> None:
        going = [seq for seq in batch if seq.phase is Phase.DECODING and seq.num_sampled + 1 < seq.params.max_tokens]
        if len(going) == len(self.running) and self._stays_plain(going):
            self._in_flight = self._launch(going)
        start = self.clock.now
        self.clock.wait(end)
        now = self.clock.now
        waited_s = now - start if launched < self._last_read else 0.0
        seconds, self._last_read = now - max(launched, self._last_read), now
        rows = [seq for seq in batch if seq.phase is Phase.DECODING]
        if states := [seq.spec_state for seq in rows if seq.spec_state is not None]:
            self.speculator.observe([Draft()] * len(rows), max(len(seq.tokens) for seq in rows), seconds, waited_s)
            self.speculator.record_plain(states)
        for seq in rows:
            self.clock.now += self.machine.host_s / len(rows)
            self._append(seq, seq.recorded.answer[seq.num_sampled :][:1], "ahead")
            if seq.spec_state is not None and seq.spec_state.waits:
                self.speculator.resolve_beside(seq.spec_state, 1)
            self._end(seq)

    def _stays_plain(self, sequences: list[RecordedSequence]) -> bool:
        self._draft_next = False
        if sequences[0].spec_state is None or self.speculator.passes(len(sequences)):
            return True
        self._draft_next = self.speculator.should_leave(self._drafting.mark(self._tasks(sequences, 1)))
        return not self._draft_next


def _raise(seq: Any, error: Exception) -> None:
    raise error


def seconds_by_drafter(
    engine: RecordedEngine, recorded: Seq[RecordedAnswer], drafters: Seq[str]
) -> dict[str, dict[str, float]]:
    """By category and drafter, one answer after the other in one process, drafters taking turns as in `bench
    speculate`; `off` is plain decoding."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for number, each in enumerate(recorded):
        turn = number % len(drafters)
        for drafter in (*drafters[turn:], *drafters[:turn]):
            found[each.category][drafter] += engine.answer([each], drafter)[0].seconds
    return {category: dict(own) for category, own in found.items()}
