"""What a trace would feel like on so many replicas: a simulation of their steps from measured costs.

The model: a replica computes steps, which the engine's own scheduler fills (`load_replica`). A step takes `step_s`,
`row_s` for each answer in it, `prompt_token_s` for each prompt token, `several_s` where these are more than one token,
for all of them attention over what comes before, and for each text reading its K/V once, however many attend to it, and
`cold_attention_s` more for each token whose K/V the step before did not read. No two steps take the same time: each is
as much slower or faster than that as one of those measured was. A prompt waits until its request is taken in, which
slows the replica's steps as they slow it. A request is routed by the front's own rule.
Replicas on one machine slow each other down: costs are those of as many as compute at that moment, between numbers that
were measured by a straight line; for one that only decodes, one that computes a prompt counts as a share of one that
decodes, too, and the other way round, which is measured. Drafts of tokens are not modelled: plain decoding. Knows no
engine; `load_costs` measures one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forerun.ray.call import order_replicas
from forerun_research.bench.load_replica import ReplicaCosts, SimulatedReplica, TokenNumbers
from forerun_research.bench.load_targets import ReplayedAnswer
from forerun_research.bench.load_trace import CHARS_PER_TOKEN, TraceRequest


class SharedCosts:
    """Costs by the number of replicas that compute at the same time on one machine. Between two that were measured on
    the straight line, beyond the last in proportion: the machine has no more to give."""

    def __init__(self, measured: Mapping[int, ReplicaCosts]) -> None:
        if 1 not in measured:
            raise ValueError(f"costs of one replica are missing; there are those of {sorted(measured)}")
        self._measured = dict(sorted(measured.items()))
        self._made: dict[float, ReplicaCosts] = {}

    def of(self, busy: float) -> ReplicaCosts:
        if busy not in self._made:
            self._made[busy] = self._computed(max(1.0, busy))
        return self._made[busy]

    def _computed(self, busy: float) -> ReplicaCosts:
        counts = list(self._measured)
        below = max(count for count in counts if count <= busy)
        above = min((count for count in counts if count >= busy), default=0)
        if above > below:
            return self._measured[below].toward(self._measured[above], (busy - below) / (above - below))
        own = self._measured[below]
        return own.toward(own.scaled(2.0), busy / below - 1)


@dataclass(frozen=True)
class SimulatedSetup:
    replicas: int
    cores: float  # of all machines together
    threads: int = 1  # of each replica
    cache_tokens: int = 1 << 20  # of each replica
    max_running: int = 64
    draw: int = 0  # another number: other steps are the slow ones
    sent: tuple[int, ...] = ()  # tokens of prompts that each replica has got before the trace: of idle ones the least


def simulate(
    trace: Sequence[TraceRequest],
    setup: SimulatedSetup,
    costs: ReplicaCosts | Mapping[int, ReplicaCosts],
    turns: Sequence[Sequence[int]] | None = None,
) -> list[ReplayedAnswer]:
    """All answers with times of the simulation, in the trace's order. `costs`: of one replica, or by the number of
    replicas that compute at the same time on one machine; then they say all that sharing it costs. `turns`: the tokens
    that each request adds to its session; without them made-up ones, as many as the trace says."""
    return _Simulation(trace, setup, costs, turns).run()


@dataclass
class _Intake:
    """A request that a replica parses and encodes, before the engine has it."""

    left_s: float  # where no step runs
    number: int
    prompt: list[int]
    replica: SimulatedReplica


class _Simulation:
    def __init__(
        self,
        trace: Sequence[TraceRequest],
        setup: SimulatedSetup,
        costs: ReplicaCosts | Mapping[int, ReplicaCosts],
        turns: Sequence[Sequence[int]] | None,
    ) -> None:
        self.trace, self.setup = trace, setup
        self.shared = not isinstance(costs, ReplicaCosts)
        self.costs = SharedCosts({1: costs} if isinstance(costs, ReplicaCosts) else costs)
        self.answers = [ReplayedAnswer(number) for number in range(len(trace))]
        first, limits = self.costs.of(1), (setup.cache_tokens, setup.max_running, setup.draw)
        self.replicas = [SimulatedReplica(f"{i:04d}", first, *limits) for i in range(setup.replicas)]
        for replica, tokens in zip(self.replicas, setup.sent, strict=False):
            replica.sent = tokens
        self.numbers = TokenNumbers()
        self.turns = [self._made_up(request) for request in trace] if turns is None else turns
        self.history: dict[str, list[int]] = defaultdict(list)  # tokens of a session so far
        self.sessions: dict[str, list[int]] = defaultdict(list)  # numbers of their requests
        for number in range(len(trace)):
            self.sessions[self._session(number)].append(number)
        self.due = [(trace[numbers[0]].arrival_s, numbers[0]) for numbers in self.sessions.values()]
        self.intakes: list[_Intake] = []

    def _session(self, number: int) -> str:
        return self.trace[number].session or f"\0{number}"

    def _made_up(self, request: TraceRequest) -> list[int]:
        """Those of a document are the same in all of its prompts, all others are new."""
        shared = max(0, request.prompt_tokens - request.question_tokens) if request.document is not None else 0
        return self.numbers.document(request.document or "", shared) + self.numbers.new(request.prompt_tokens - shared)

    def run(self) -> list[ReplayedAnswer]:
        now, running = 0.0, list[SimulatedReplica]()
        while self.due or running or self.intakes:
            seconds = {replica.name: self._step_s(replica, running) for replica in running}
            factors = [self._intake_factor(intake.replica, running) for intake in self.intakes]
            ends = min((replica.left * seconds[replica.name] for replica in running), default=float("inf"))
            arrives = min(self.due)[0] - now if self.due else float("inf")
            lefts = [intake.left_s * factor for intake, factor in zip(self.intakes, factors, strict=True)]
            taken = min(lefts, default=float("inf"))
            passed = max(0.0, min(ends, arrives, taken))
            now += passed
            for replica in running:
                replica.left -= passed / seconds[replica.name]
            for intake, factor in zip(list(self.intakes), factors, strict=True):
                intake.left_s -= passed / factor
                if intake.left_s <= 1e-12:
                    self.intakes.remove(intake)
                    most = self.trace[intake.number].max_tokens
                    intake.replica.add(self.answers[intake.number], intake.prompt, most, now)
            if arrives <= min(ends, taken):
                self.due.sort()
                self._arrive(self.due.pop(0)[1], now)
            for replica in running:
                if replica.left <= 1e-9:
                    for answer, tokens in replica.finish_step(now, self.numbers):
                        self._end(answer, tokens, replica, now)
            for replica in self.replicas:
                if replica.left <= 0 and not replica.idle:
                    replica.begin_step(now)
            running = [replica for replica in self.replicas if replica.left > 0]
        return self.answers

    def _step_s(self, replica: SimulatedReplica, running: Sequence[SimulatedReplica]) -> float:
        """Of the step that it runs, which is slower while the replica takes in a request."""
        costs = self._costs(replica, running)
        beside = any(intake.replica is replica for intake in self.intakes)
        return replica.step_s(costs) * (costs.intake_factor if beside else 1.0)

    def _intake_factor(self, replica: SimulatedReplica, running: Sequence[SimulatedReplica]) -> float:
        return self._costs(replica, running).intake_factor if replica in running else 1.0

    def _costs(self, replica: SimulatedReplica, running: Sequence[SimulatedReplica]) -> ReplicaCosts:
        """Of a replica while others compute. Those that do the other, decode or compute prompts, count by a share."""
        if not self.shared and self.setup.cores >= self.setup.threads * self.setup.replicas:
            return self.costs.of(1.0)  # each has its own
        computing = {own.name: own for own in (*running, replica)}.values()
        if not self.shared:  # they share the cores equally
            return self.costs.of(max(1.0, len(computing) * self.setup.threads / self.setup.cores))
        costs, alike = self.costs.of(len(computing)), sum(own.has_prompts == replica.has_prompts for own in computing)
        share = costs.answers_beside_prompts if replica.has_prompts else costs.prompts_beside_answers
        return self.costs.of(alike + share * (len(computing) - alike))

    def _arrive(self, number: int, now: float) -> None:
        request, answer, session = self.trace[number], self.answers[number], self._session(number)
        replica = self._route(number)
        prompt = [*self.history[session], *self.turns[number]]
        answer.sent, answer.prompt_tokens, answer.completion_tokens = now, len(prompt), request.max_tokens
        costs = self._costs(replica, [own for own in self.replicas if own.left > 0])
        self.intakes.append(_Intake(costs.request_s + costs.encode_s * len(prompt), number, prompt, replica))
        replica.routed[session] = len(prompt)
        replica.sent += len(prompt)
        replica.unanswered += 1
        if request.document is not None:
            replica.routed[request.document] = len(prompt)

    def _route(self, number: int) -> SimulatedReplica:
        """As the front does."""
        document, session = self.trace[number].document or "", self._session(number)
        held = {own.name: max(own.routed.get(session, 0), own.routed.get(document, 0)) for own in self.replicas}
        loads = {replica.name: (replica.unanswered, replica.sent) for replica in self.replicas}
        holders = [name for name, tokens in held.items() if tokens == max(held.values())]
        chosen = order_replicas(loads, holders, int(CHARS_PER_TOKEN * max(held.values())))[0]
        return next(replica for replica in self.replicas if replica.name == chosen)

    def _end(self, answer: ReplayedAnswer, tokens: list[int], replica: SimulatedReplica, now: float) -> None:
        session = self._session(answer.number)
        self.history[session] = tokens
        replica.unanswered -= 1
        later = [number for number in self.sessions[session] if number > answer.number]
        if later:
            self.due.append((max(now, self.trace[later[0]].arrival_s), later[0]))
