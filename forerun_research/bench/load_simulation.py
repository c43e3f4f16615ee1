"""What a trace would feel like on so many replicas: a simulation of their steps from costs measured on one.

The model: a replica computes steps. A step has one token of every answer that decodes and a piece of the prompts that
wait, the shortest first; it takes `step_s`, `row_s` for each of those answers, `prompt_token_s` for each prompt token,
and for all of them attention over what comes before. Beside answers a piece is as long as keeps the step within three
plain ones, as the engine does. A prompt waits until it is encoded. A replica's cache holds documents and conversations,
the least recently used goes first; a request is routed by the front's own rule. Replicas on one machine share its cores
equally. Drafts of tokens are not modelled: plain decoding. Knows no engine; `load_costs` measures one.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from forerun.ray.call import order_replicas
from forerun_research.bench.load_targets import ReplayedAnswer
from forerun_research.bench.load_trace import CHARS_PER_TOKEN, TraceRequest

PLAIN_STEPS_BESIDE_STREAMS = 3  # as the engine's pacer has it
MAX_PIECE_TOKENS = 512  # of prompts in one step, on a CPU
PAGE_TOKENS = 16


@dataclass(frozen=True)
class ReplicaCosts:
    """Seconds of a step's parts on one replica that has its threads to itself."""

    step_s: float
    row_s: float
    prompt_token_s: float
    attention_s: float  # of one prompt token, for each token before it
    answer_attention_s: float = 0.0  # of one token of an answer, for each token before it
    encode_s: float = 0.0  # template and tokenizer, for each token of a prompt
    request_s: float = 0.0  # of each request, before its first step


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
    left_s: float = 0.0  # of that step
    stored: int = 0
    sent: int = 0  # tokens of prompts
    routed: dict[str, int] = field(
        default_factory=dict
    )  # tokens of texts that were sent here, as the router knows them

    @property
    def open(self) -> int:
        return len(self.waiting) + len(self.decoding)

    def plan(self, costs: ReplicaCosts, max_running: int) -> bool:
        """Begin a step; False where there is nothing to do."""
        if not self.open:
            return False
        rows = len(self.decoding)
        contexts = sum(request.prompt + request.made for request in self.decoding)
        plain = costs.step_s + costs.row_s * rows + costs.answer_attention_s * contexts
        budget = (PLAIN_STEPS_BESIDE_STREAMS - 1) * plain if rows else float("inf")
        self.pieces, self.left_s, tokens = [], plain, 0
        for request in self.waiting:
            if not request.started:
                request.done = self.held(request)
        shortest_first = sorted(self.waiting, key=lambda request: request.prompt - request.done)
        for request in shortest_first[: max(0, max_running - rows)]:
            each = costs.prompt_token_s + costs.attention_s * request.done
            if tokens == MAX_PIECE_TOKENS or (self.pieces and budget < each):
                break
            room = MAX_PIECE_TOKENS - tokens if budget == float("inf") else max(1, int(budget / each))
            count = min(request.prompt - request.done, MAX_PIECE_TOKENS - tokens, room)
            self.pieces.append((request, count))
            if not request.started:
                request.started, request.answer.cached_tokens = True, request.done
            cost = count * (each + costs.attention_s * count / 2)
            self.left_s, budget, tokens = self.left_s + cost, budget - cost, tokens + count
        return True

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


def simulate(trace: Sequence[TraceRequest], setup: SimulatedSetup, costs: ReplicaCosts) -> list[ReplayedAnswer]:
    """All answers with times of the simulation, in the trace's order."""
    return _Simulation(trace, setup, costs).run()


class _Simulation:
    def __init__(self, trace: Sequence[TraceRequest], setup: SimulatedSetup, costs: ReplicaCosts) -> None:
        self.trace, self.setup, self.costs = trace, setup, costs
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
            running = [replica for replica in self.replicas if replica.left_s > 0]
            speed = min(1.0, self.setup.cores / (self.setup.threads * max(1, len(running))))
            ends = min((replica.left_s / speed for replica in running), default=float("inf"))
            arrives = min(self.due)[0] - now if self.due else float("inf")
            encoded = min((moment for moment, _, _ in self.encoding), default=float("inf")) - now
            passed = max(0.0, min(ends, arrives, encoded))
            now += passed
            for replica in running:
                replica.left_s -= passed * speed
            for entry in [entry for entry in self.encoding if entry[0] <= now + 1e-12]:
                entry[2].waiting.append(entry[1])
                self.encoding.remove(entry)
            if arrives <= min(ends, encoded):
                self.due.sort()
                self._arrive(self.due.pop(0)[1], now)
            for replica in running:
                if replica.left_s <= 1e-12:
                    replica.left_s = 0.0
                    for request in replica.finish_step(now):
                        self._end(request, replica, now)
            for replica in self.replicas:
                if replica.left_s <= 0:
                    replica.plan(self.costs, self.setup.max_running)
            running = [replica for replica in self.replicas if replica.left_s > 0]
        for answer in self.answers:
            answer.token_times = [moment + self.setup.hop_s for moment in answer.token_times]
        return self.answers

    def _arrive(self, number: int, now: float) -> None:
        request, answer = self.trace[number], self.answers[number]
        session = request.session or f"\0{number}"
        prompt = self.history[session] + request.prompt_tokens
        replica = self._route(number, session)
        answer.sent, answer.prompt_tokens, answer.completion_tokens = now, prompt, request.max_tokens
        made = _Request(number, answer, prompt, request.max_tokens, session, request.document, request.prompt_tokens)
        self.encoding.append((now + self.costs.request_s + self.costs.encode_s * prompt, made, replica))
        replica.routed[session] = prompt
        replica.sent += prompt
        if request.document is not None:
            replica.routed[request.document] = request.prompt_tokens

    def _route(self, number: int, session: str) -> _Replica:
        """As the front does."""
        document = self.trace[number].document
        held = {
            replica.name: max(replica.routed.get(session, 0), replica.routed.get(document or "", 0))
            for replica in self.replicas
        }
        loads = {replica.name: (replica.open, replica.sent) for replica in self.replicas}
        holders = [name for name, tokens in held.items() if tokens == max(held.values())]
        chosen = order_replicas(loads, holders, int(CHARS_PER_TOKEN * max(held.values())))[0]
        return next(replica for replica in self.replicas if replica.name == chosen)

    def _end(self, request: _Request, replica: _Replica, now: float) -> None:
        session = self.trace[request.number].session or f"\0{request.number}"
        self.history[session] = request.prompt + request.answer_tokens
        replica.keep(session, self.history[session])
        later = [number for number in self.turns[session] if number > request.number]
        if later:
            self.due.append((max(now, self.trace[later[0]].arrival_s), later[0]))
