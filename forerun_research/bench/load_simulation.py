"""What a trace would feel like on so many replicas: a simulation of their steps from measured costs.

The model: a replica computes steps. A step has one token of every answer that decodes and a piece of the prompts that
wait, the shortest first; it takes `step_s`, `row_s` for each of those answers, `prompt_token_s` for each prompt token,
and for all of them attention over what comes before. Beside answers a piece is as long as keeps the step within
`steps_beside` plain ones, as the engine does. A prompt waits until it is encoded, and while another computes its
document. A replica's cache holds documents and conversations, the least recently used goes first; a request is routed
by the front's own rule. Replicas on one machine slow each other down: costs are those of as many as compute at that
moment, between numbers that were measured by a straight line; with more than there are cores, those that only decode
are held up by their like alone. Drafts of tokens are not modelled: plain decoding. Knows no engine; `load_costs`
measures one.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace

from forerun.ray.call import order_replicas
from forerun_research.bench.load_targets import ReplayedAnswer
from forerun_research.bench.load_trace import CHARS_PER_TOKEN, TraceRequest

MAX_PIECE_TOKENS = 512  # of prompts in one step, on a CPU
PAGE_TOKENS = 16


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
    steps_beside: float = 3.0  # plain steps that one may take which computes prompts beside answers; the engine's plan

    def toward(self, other: ReplicaCosts, share: float) -> ReplicaCosts:
        """On the straight line from these to those."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return ReplicaCosts(*(max(0.0, own + share * (their - own)) for own, their in pairs))


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
        twice = ReplicaCosts(*(2 * value for value in astuple(own)))
        return own.toward(replace(twice, steps_beside=own.steps_beside), busy / below - 1)


@dataclass(frozen=True)
class _Work:
    """What a step computes."""

    rows: int = 0  # answers, one token each
    contexts: int = 0  # tokens before those, over all of them
    tokens: int = 0  # of prompts
    attended: float = 0.0  # tokens before those, over all of them

    def seconds(self, costs: ReplicaCosts) -> float:
        answers = costs.row_s * self.rows + costs.answer_attention_s * self.contexts
        return costs.step_s + answers + costs.prompt_token_s * self.tokens + costs.attention_s * self.attended


@dataclass
class _Request:
    number: int
    answer: ReplayedAnswer
    prompt: int
    answer_tokens: int
    session: str
    document: str | None
    document_tokens: int
    started: bool = False
    done: int = 0  # prompt tokens that have K/V
    made: int = 0  # tokens of the answer


@dataclass
class _Replica:
    name: str
    cache_tokens: int
    cache: OrderedDict[str, int] = field(default_factory=OrderedDict)
    waiting: list[_Request] = field(default_factory=list)  # for their prompts
    decoding: list[_Request] = field(default_factory=list)
    pieces: list[tuple[_Request, int]] = field(default_factory=list)  # of the step that runs
    work: _Work = _Work()
    left: float = 0.0  # of that step, as a share of it; 0: none runs
    stored: int = 0
    sent: int = 0  # tokens of prompts
    unanswered: int = 0  # requests that were sent here, those that are being encoded too
    routed: dict[str, int] = field(
        default_factory=dict
    )  # tokens of texts that were sent here, as the router knows them

    @property
    def open(self) -> int:
        return len(self.waiting) + len(self.decoding)

    def plan(self, costs: ReplicaCosts, max_running: int) -> None:
        """Begin a step, if there is something to do."""
        if not self.open:
            return
        rows, contexts = len(self.decoding), sum(request.prompt + request.made for request in self.decoding)
        plain = _Work(rows, contexts).seconds(costs)
        budget = (costs.steps_beside - 1) * plain if rows else float("inf")
        self.pieces, tokens, attended = [], 0, 0.0
        for request in self.waiting:
            if not request.started:
                request.done = self.held(request)
        ready = [request for request in self.waiting if request.started or not self.computes_document_of(request)]
        for request in sorted(ready, key=lambda request: request.prompt - request.done)[: max(0, max_running - rows)]:
            each = costs.prompt_token_s + costs.attention_s * request.done
            if tokens == MAX_PIECE_TOKENS or (self.pieces and budget < each):
                break
            if self.pieces and self.computes_document_of(request) and not request.started:
                continue
            room = MAX_PIECE_TOKENS - tokens if budget == float("inf") else max(1, int(budget / max(each, 1e-12)))
            count = min(request.prompt - request.done, MAX_PIECE_TOKENS - tokens, room)
            self.pieces.append((request, count))
            if not request.started:
                request.started, request.answer.cached_tokens = True, request.done
            before = count * (request.done + count / 2)
            budget -= count * costs.prompt_token_s + before * costs.attention_s
            tokens, attended = tokens + count, attended + before
        self.work, self.left = _Work(rows, contexts, tokens, attended), 1.0

    def computes_document_of(self, request: _Request) -> bool:
        """Whether another prompt is computing what this one begins with: then it waits for that."""
        return request.document is not None and any(
            other.started and other.document == request.document and other.done < other.document_tokens
            for other in self.waiting
        )

    def held(self, request: _Request) -> int:
        """Whole pages of a prompt that the cache has now."""
        document = min(self.cache.get(request.document or "", 0), request.document_tokens)
        known = max(self.cache.get(request.session, 0), document)
        return min(known, request.prompt - 1) // PAGE_TOKENS * PAGE_TOKENS

    def finish_step(self, now: float) -> list[_Request]:
        """What ended with it."""
        for request in self.decoding:
            request.made += 1
            request.answer.token_times.append(now)
        for request, count in self.pieces:
            request.done += count
            if request.document is not None:  # known piece by piece
                known = min(request.done, request.document_tokens)
                self.keep(request.document, max(known, self.cache.get(request.document, 0)))
            if request.done >= request.prompt:
                self.waiting.remove(request)
                self.decoding.append(request)
                request.made = 1
                request.answer.token_times.append(now)
        ended = [request for request in self.decoding if request.made >= request.answer_tokens]
        self.decoding = [request for request in self.decoding if request.made < request.answer_tokens]
        return ended

    def keep(self, name: str, tokens: int) -> None:
        self.stored += tokens - self.cache.pop(name, 0)
        self.cache[name] = tokens
        while self.stored > self.cache_tokens and len(self.cache) > 1:
            self.stored -= self.cache.popitem(last=False)[1]


@dataclass(frozen=True)
class SimulatedSetup:
    replicas: int
    cores: float  # of all machines together
    threads: int = 1  # of each replica
    cache_tokens: int = 1 << 20  # of each replica
    max_running: int = 64
    hop_s: float = 0.0  # from the client to a replica and back


def simulate(
    trace: Sequence[TraceRequest], setup: SimulatedSetup, costs: ReplicaCosts | Mapping[int, ReplicaCosts]
) -> list[ReplayedAnswer]:
    """All answers with times of the simulation, in the trace's order. `costs`: of one replica, or by the number of
    replicas that compute at the same time on one machine; then they say all that sharing it costs."""
    return _Simulation(trace, setup, costs).run()


class _Simulation:
    def __init__(
        self, trace: Sequence[TraceRequest], setup: SimulatedSetup, costs: ReplicaCosts | Mapping[int, ReplicaCosts]
    ) -> None:
        self.trace, self.setup = trace, setup
        self.shared = not isinstance(costs, ReplicaCosts)
        self.costs = SharedCosts({1: costs} if isinstance(costs, ReplicaCosts) else costs)
        self.answers = [ReplayedAnswer(number) for number in range(len(trace))]
        self.replicas = [_Replica(f"{i:04d}", setup.cache_tokens) for i in range(setup.replicas)]
        self.history: dict[str, int] = defaultdict(int)  # tokens of a session so far
        self.turns: dict[str, list[int]] = defaultdict(list)
        for number, request in enumerate(trace):
            self.turns[request.session or f"\0{number}"].append(number)
        self.due = [(trace[numbers[0]].arrival_s, numbers[0]) for numbers in self.turns.values()]
        self.encoding: list[tuple[float, _Request, _Replica]] = []  # requests whose prompts are being encoded

    def run(self) -> list[ReplayedAnswer]:
        now, running = 0.0, list[_Replica]()
        while self.due or running or self.encoding:
            seconds = {replica.name: replica.work.seconds(self._costs(replica, running)) for replica in running}
            ends = min((replica.left * seconds[replica.name] for replica in running), default=float("inf"))
            arrives = min(self.due)[0] - now if self.due else float("inf")
            encoded = min((moment for moment, _, _ in self.encoding), default=float("inf")) - now
            passed = max(0.0, min(ends, arrives, encoded))
            now += passed
            for replica in running:
                replica.left -= passed / seconds[replica.name]
            for entry in [entry for entry in self.encoding if entry[0] <= now + 1e-12]:
                entry[2].waiting.append(entry[1])
                self.encoding.remove(entry)
            if arrives <= min(ends, encoded):
                self.due.sort()
                self._arrive(self.due.pop(0)[1], now)
            for replica in running:
                if replica.left <= 1e-9:
                    replica.left = 0.0
                    for request in replica.finish_step(now):
                        self._end(request, replica, now)
            idle = [replica for replica in self.replicas if replica.left <= 0 and replica.open]
            for replica in idle:
                replica.plan(self._costs(replica, running), self.setup.max_running)
            running = [replica for replica in self.replicas if replica.left > 0]
        for answer in self.answers:
            answer.token_times = [moment + self.setup.hop_s for moment in answer.token_times]
        return self.answers

    def _costs(self, replica: _Replica, running: Sequence[_Replica]) -> ReplicaCosts:
        """Of a replica while others compute. Where more compute than have cores, one that only decodes is held up by
        such only, as if there were no prompts: its steps are short, and operating systems let those go first."""
        threads, cores = self.setup.threads, self.setup.cores
        busy = len({own.name for own in running} | {replica.name})
        if not self.shared:  # they share the cores equally
            return self.costs.of(max(1.0, busy * threads / cores))
        short = [own for own in running if not own.work.tokens]
        if busy * threads > cores and not replica.waiting and not replica.work.tokens:
            busy = max(int(cores / threads), len({own.name for own in short} | {replica.name}))
        return self.costs.of(max(1, busy))

    def _arrive(self, number: int, now: float) -> None:
        request, answer = self.trace[number], self.answers[number]
        session = request.session or f"\0{number}"
        prompt = self.history[session] + request.prompt_tokens
        replica = self._route(number, session)
        answer.sent, answer.prompt_tokens, answer.completion_tokens = now, prompt, request.max_tokens
        shared = max(0, request.prompt_tokens - request.question_tokens)
        made = _Request(number, answer, prompt, request.max_tokens, session, request.document, shared)
        costs = self._costs(replica, [own for own in self.replicas if own.left > 0])
        self.encoding.append((now + costs.request_s + costs.encode_s * prompt, made, replica))
        replica.routed[session] = prompt
        replica.sent += prompt
        replica.unanswered += 1
        if request.document is not None:
            replica.routed[request.document] = request.prompt_tokens

    def _route(self, number: int, session: str) -> _Replica:
        """As the front does."""
        document = self.trace[number].document
        held = {
            replica.name: max(replica.routed.get(session, 0), replica.routed.get(document or "", 0))
            for replica in self.replicas
        }
        loads = {replica.name: (replica.unanswered, replica.sent) for replica in self.replicas}
        holders = [name for name, tokens in held.items() if tokens == max(held.values())]
        chosen = order_replicas(loads, holders, int(CHARS_PER_TOKEN * max(held.values())))[0]
        return next(replica for replica in self.replicas if replica.name == chosen)

    def _end(self, request: _Request, replica: _Replica, now: float) -> None:
        session = self.trace[request.number].session or f"\0{request.number}"
        self.history[session] = request.prompt + request.answer_tokens
        replica.unanswered -= 1
        replica.keep(session, self.history[session])
        later = [number for number in self.turns[session] if number > request.number]
        if later:
            self.due.append((max(now, self.trace[later[0]].arrival_s), later[0]))
