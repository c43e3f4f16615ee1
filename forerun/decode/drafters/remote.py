"""`remote:ADDRESS`: drafts by a model on another machine (`forerun draft serve`), one of them in flight for a sequence.

While the target verifies a draft, the server already drafts on from the outcome that is the most probable (parallel
drafting); where the answer goes elsewhere that order is replaced by one for the answer as it is. Whether to wait for a
draft that is not here yet is decided by what that can save (`DraftRequest.max_wait_s`) and by measured round trips;
without waiting, a step is plain and what arrives later is used from where the answer is by then. Several
addresses, separated by commas, share the sequences. Knows no model: it is free where it runs.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import median

from forerun.core import Draft
from forerun.decode.control.cost import ServerRounds
from forerun.decode.draft_context import DraftContext
from forerun.decode.drafters.base import Drafter, DraftRequest, register_family
from forerun.decode.remote.held_draft import HeldDraft
from forerun.decode.remote.link import Link, address_url, check_installed, is_local
from forerun.decode.remote.protocol import (
    PROB_BITS,
    Close,
    DraftOrder,
    Forgot,
    Frame,
    Hello,
    Refused,
    Tree,
    vocabulary_digest,
)
from forerun.errors import BadRequest

MAX_DEPTH, MAX_NODES = 16, 48  # of a tree that is ordered
SAMPLED_TOKENS = 16  # of a distribution: on chat at temperature 1 the likeliest 16 hold 95% of the mass
MAX_WAIT_S = 30.0  # in one step, whatever a draft is worth
FIRST_ANSWER_S = 2.0  # for the handshake when the drafter is made
MEAN_WEIGHT = 0.15  # of the latest observation in moving means
GUESS_EVERY = 16  # orders in ordinary mode before one in parallel mode is tried again
MAX_STEP_S = 5.0  # between two drafts of a sequence that counts as one step: a pause of its caller does not
MAX_UNREAD_TOKENS = 32  # of an order whose time is like that of other orders: more are a prompt
MAX_RUN_S = 1e-3  # of host time in a step: more was waiting
PROBE_TOKENS, MAX_PROBE_S = 8, 1.0  # of what a server drafts while the target's steps are timed, and for how long
READ_PROBE_TOKENS = 96  # the same where a round gives all of a draft and is shorter than a step: reading is not
MAX_FREE_S = 1.0  # of drafting on without being waited for


@dataclass
class _Flight:
    """An order on its way: a draft after the first `first` tokens and the path `assumed`."""

    version: int
    first: int
    assumed: Draft
    sent: float  # on the clock
    expected_s: float  # until its tree is here
    guess: bool  # made while an earlier draft was verified
    unread: int  # tokens that the server has to read first

    def fits(self, tokens: list[int]) -> bool:
        """Whether its tree may still be of use."""
        return all(a == b for a, b in zip(tokens[self.first :], self.assumed.tokens, strict=False))

    def behind(self, tokens: list[int]) -> int:
        """Tokens of the answer that its tree has to have right before it is of use."""
        return max(0, len(tokens) - self.first - len(self.assumed))

    def worth_s(self, request: DraftRequest) -> float:
        """How long to wait for it; a prompt that the server reads first is not waited for."""
        if self.unread > MAX_UNREAD_TOKENS and request.max_wait_s < math.inf:
            return 0.0
        return request.max_wait_s * request.first_prob ** self.behind(request.tokens)


@dataclass
class _Sequence:
    wire_id: int
    link: Link | None = None
    connection: int = 0  # of that link, in which the server was told of the sequence
    known_first: int = 0  # tokens that the server has and the target had accepted then,
    known_assumed: list[int] = field(default_factory=list)  # and those after them that it had not
    version: int = 0
    flight: _Flight | None = None
    held: list[HeldDraft] = field(default_factory=list)  # the newest last
    refused: set[str] = field(default_factory=set)  # addresses
    returned: float = 0.0  # when its last draft was returned
    read_s: float | None = None  # until its first tree was here; None: it is not
    counted: bool = False  # that time, as its first run

    @property
    def served(self) -> bool:
        """Whether the connection is there that its server was told of it in."""
        link = self.link
        return link is not None and link.welcome is not None and link.connections == self.connection

    def best(self, tokens: list[int]) -> HeldDraft | None:
        """What is left of the drafts that are here; those of no use any more are dropped."""
        rests = [rest for held in self.held[-2:] if (rest := held.rest(tokens)) is not None and len(rest.draft)]
        self.held = rests
        return max(rests, key=lambda rest: len(rest.draft), default=None)

    def judge_guesses(self, tokens: list[int]) -> list[bool]:
        """Of each draft that was made for a guessed outcome and is here since: whether that outcome came."""
        found = []
        for held in self.held:
            if held.guess:
                held.guess, rest = False, held.rest(tokens)
                found.append(rest is not None and len(rest.draft) > 0)
        return found


class RoundTrips:
    """Moving means of what drafts take, and what follows from them."""

    def __init__(self) -> None:
        self.network_s = 0.0
        self.server_s = 0.05  # of an order that is waited for, before one was
        self.round_s = 0.01  # until a tree says
        self.step_s = 0.05  # of the target, between two drafts of a sequence
        self.hits = 0.5  # share of guessed outcomes that came
        self._ordinary = 0  # orders since the last guess
        self._told = False  # whether a tree did

    def observe(self, tree: Tree, flight: _Flight, now: float) -> None:
        server_s = tree.server_us * 1e-6
        self.network_s = self._mean(self.network_s, max(0.0, now - flight.sent - server_s))
        if not flight.guess and flight.unread <= MAX_UNREAD_TOKENS:
            self.server_s = self._mean(self.server_s, server_s)
        if tree.round_us:
            round_s = tree.round_us * 1e-6
            self.round_s, self._told = self._mean(self.round_s, round_s) if self._told else round_s, True

    def at_most(self, round_s: float, network_s: float) -> None:
        """What was timed when nothing else ran: one tree on a busy machine is a poor measure, and where it says that
        drafts do not pay none follows that could correct it."""
        self.round_s, self.network_s = min(self.round_s, round_s or math.inf), min(self.network_s, network_s)

    def observe_step(self, seconds: float) -> None:
        if seconds < MAX_STEP_S:
            self.step_s = self._mean(self.step_s, seconds)

    def observe_guess(self, hit: bool) -> None:
        self.hits = self._mean(self.hits, float(hit))

    @staticmethod
    def _mean(mean: float, value: float) -> float:
        return value if not mean else mean + MEAN_WEIGHT * (value - mean)

    @property
    def answer_s(self) -> float:
        return self.network_s + self.server_s

    def guess_pays(self) -> bool:
        """Whether to draft on while the target verifies: what a hit saves against the round that a miss delays the next
        order by. In ordinary mode a guess is tried now and then, or a change would never be seen."""
        saved_s = self.hits * min(self.step_s, self.answer_s)
        if saved_s > (1.0 - self.hits) * self.round_s or self._ordinary >= GUESS_EVERY:
            self._ordinary = 0
            return True
        self._ordinary += 1
        return False


class RemoteDrafter(Drafter):
    free = True
    elsewhere = True
    can_sample = True
    addresses: tuple[str, ...] = ()

    def __init__(self, ctx: DraftContext) -> None:
        decoder = ctx.runner.decoder
        self.shares_memory = decoder.device.type == "cpu" and any(is_local(address) for address in self.addresses)
        self._vocab_size = decoder.config.vocab_size
        self._changed = threading.Condition()
        self._sequences: dict[int, _Sequence] = {}
        self._by_wire_id: dict[int, _Sequence] = {}
        self._wire_ids = itertools.count(1)
        self.trips = RoundTrips()
        self._ordered = False  # since `computed_elsewhere`
        self.counts = {"orders": 0, "trees": 0, "guesses": 0, "hits": 0}
        self.prob_bits = PROB_BITS[0]
        hello = Hello(self._vocab_size, vocabulary_digest(ctx.tokenizer))
        self.links = self._open_links(hello)
        for link in self.links:
            link.wait_attempted(FIRST_ANSWER_S)
        refusals = [f"{link.address}: {link.refusal}" for link in self.links if link.refusal]
        first = next((link.welcome for link in self.links if link.welcome is not None), None)
        self.elsewhere_model = "" if first is None else first.model[:120]
        self.outcomes = {} if first is None else first.outcomes
        if len(refusals) == len(self.links):
            self.close()
            raise BadRequest(f"no drafts from {'; '.join(refusals)}", "name a draft server for this model and key")

    def _open_links(self, hello: Hello) -> list[Link]:
        return [Link(address, hello, self._receive, self._notify) for address in self.addresses]

    @classmethod
    def problem(cls, ctx: DraftContext) -> BadRequest | None:
        return check_installed()

    # -- the contract --------------------------------------------------------------------------------------------------

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        with self._changed:
            sequences = [self._follow(request) for request in requests]
            self._wait([(s, r) for s, r in zip(sequences, requests, strict=True) if s.best(r.tokens) is None])
            drafts = [self._draft(s, r) for s, r in zip(sequences, requests, strict=True)]
            now = time.monotonic()
            for sequence in sequences:
                sequence.returned = now
        return drafts

    def counted_s(self, seq_id: int, seconds: float) -> float | None:
        """How long to wait is decided by `max_wait_s`: only host time counts. The first run is reading the prompt."""
        sequence = self._sequences.get(seq_id)
        if sequence is None or sequence.read_s is None:
            return None
        first, sequence.counted = not sequence.counted, True
        return sequence.read_s if first else min(seconds, MAX_RUN_S)

    def turn_costs(self) -> tuple[float, float, ServerRounds]:
        """Of trees that came: before, a server's own statement may be of another load."""
        rounds = next((_rounds(link) for link in self.links if link.welcome is not None), ServerRounds())
        return (self.trips.round_s, self.trips.network_s, rounds) if self.counts["trees"] else (0.0, 0.0, rounds)

    def time_beside(self, step: Callable[[], float]) -> float | None:
        """A made-up sequence that takes the server some steps; its tree is the first that round trips are known by."""
        with self._changed:
            sequence, usual_s = _Sequence(next(self._wire_ids)), self.trips.server_s
            self._by_wire_id[sequence.wire_id] = sequence
            self._assign(sequence)
            link = sequence.link
            count = PROBE_TOKENS if link is None or _rounds(link).tokens == 1 else READ_PROBE_TOKENS
            flight = sequence.flight = _Flight(1, 0, Draft(), time.monotonic(), MAX_PROBE_S, False, count)
            tokens = [token % self._vocab_size for token in range(count)]
            if link is not None:
                deep = DraftOrder(sequence.wire_id, 1, 0, 0, tokens, MAX_DEPTH, MAX_NODES)
                link.send(replace(deep, min_prob=0.0, paid_prob=0.0))
        times: list[float] = []
        while sequence.served and sequence.flight is flight and time.monotonic() - flight.sent < MAX_PROBE_S:
            times.append(step())
        with self._changed:
            del self._by_wire_id[sequence.wire_id]
            if link is not None:
                link.send(Close(sequence.wire_id))
            self.trips.server_s = usual_s  # it was deeper than others are
            if link is not None and link.welcome is not None:
                self.trips.at_most(link.welcome.round_s, link.trip_s)
        answered = sequence.read_s is not None
        return median(times[:-1] or times) if answered and times else None  # the last one ended after the tree was here

    def computed_elsewhere(self) -> bool:
        with self._changed:
            busy = any(sequence.flight is not None for sequence in self._sequences.values())
            found, self._ordered = busy or self._ordered, False
        return found

    def finish(self, seq_id: int, tokens: list[int], num_prompt: int) -> None:
        with self._changed:
            sequence = self._sequences.pop(seq_id, None)
            if sequence is not None:
                del self._by_wire_id[sequence.wire_id]
                if sequence.link is not None and sequence.known_first:
                    sequence.link.send(Close(sequence.wire_id))

    def close(self) -> None:
        for link in self.links:
            link.close()

    def figures(self) -> dict[str, float]:
        sent, received = (sum(getattr(link, f"bytes_{way}") for link in self.links) for way in ("sent", "received"))
        trips = self.trips
        return {
            **self.counts,
            "bytes_sent": sent,
            "bytes_received": received,
            "connected": sum(link.welcome is not None for link in self.links),
            "network_s": round(trips.network_s, 6),
            "server_s": round(trips.server_s, 6),
            "hit_rate": round(trips.hits, 4),
        }

    # -- a step --------------------------------------------------------------------------------------------------------

    def _follow(self, request: DraftRequest) -> _Sequence:
        """A sequence as it is now: its server, and what became of the outcome that was guessed."""
        sequence = self._sequences.get(request.seq_id)
        if sequence is None:
            sequence = self._sequences[request.seq_id] = _Sequence(next(self._wire_ids))
            self._by_wire_id[sequence.wire_id] = sequence
        if not sequence.served:
            self._assign(sequence)
        if sequence.returned:
            self.trips.observe_step(time.monotonic() - sequence.returned)
        self._judge(sequence, request.tokens)
        return sequence

    def _judge(self, sequence: _Sequence, tokens: list[int]) -> None:
        """Drop an order that the answer has left, and count which guesses came true."""
        outcomes = sequence.judge_guesses(tokens)
        if sequence.flight is not None and not sequence.flight.fits(tokens):
            outcomes += [False] if sequence.flight.guess else []
            sequence.flight = None
        for hit in outcomes:
            self.trips.observe_guess(hit)
            self.counts["hits"] += hit

    def _assign(self, sequence: _Sequence) -> None:
        """To the connected server with the fewest sequences; what another knew of it is of no use there."""
        sequence.flight, sequence.known_first, sequence.known_assumed = None, 0, []
        open_links = [link for link in self.links if link.welcome is not None and link.address not in sequence.refused]
        held = [other.link for other in self._sequences.values() if other is not sequence]
        sequence.link = min(open_links, key=held.count, default=None)
        sequence.connection = 0 if sequence.link is None else sequence.link.connections

    def _wait(self, missing: list[tuple[_Sequence, DraftRequest]]) -> None:
        """Order what is missing and wait for it as long as that is worth it to the batch, all of which waits."""
        start, ordered = time.monotonic(), set[int]()
        while missing := [(s, r) for s, r in missing if s.served and s.best(r.tokens) is None]:
            spent_s = time.monotonic() - start
            patient = spent_s + self.trips.answer_s < min(MAX_WAIT_S, sum(request.max_wait_s for _, request in missing))
            patient = patient or any(request.in_turn for _, request in missing)
            for sequence, request in missing:
                if sequence.flight is None and sequence.wire_id not in ordered:  # once: a server may have nothing
                    ordered.add(sequence.wire_id)
                    self._order(sequence, request, Draft(), 0.0 if patient else self.trips.step_s, guess=False)
            flights = [(sequence.flight, request) for sequence, request in missing if sequence.flight is not None]
            worth_s = min(MAX_WAIT_S, sum(flight.worth_s(request) for flight, request in flights))
            if not flights or spent_s + min(self._left_s(flight) for flight, _ in flights) > worth_s:
                return
            self._changed.wait(worth_s - spent_s)
            for sequence, request in missing:
                self._judge(sequence, request.tokens)

    @staticmethod
    def _left_s(flight: _Flight) -> float:
        """Until a tree is expected; one that is overdue is expected to take as long again."""
        age = time.monotonic() - flight.sent
        return flight.expected_s - age if age < flight.expected_s else age

    def _draft(self, sequence: _Sequence, request: DraftRequest) -> Draft:
        rest = sequence.best(request.tokens)
        if rest is None:
            return Draft()
        if sequence.flight is None and not request.in_turn and self.trips.guess_pays():
            free_s = min(MAX_FREE_S, max(0.0, self.trips.step_s - self.trips.network_s))
            self._order(sequence, request, rest.likeliest_path(), free_s, guess=True)
        if request.sampled:
            return rest.sampled(request, self._vocab_size, self.name)
        return rest.greedy(request.max_nodes, request.max_depth)

    # -- orders and trees ----------------------------------------------------------------------------------------------

    def _order(self, sequence: _Sequence, request: DraftRequest, assumed: Draft, free_s: float, guess: bool) -> None:
        link, tokens, params, trips = sequence.link, request.tokens, request.context.params, self.trips
        assert link is not None
        new = tokens[sequence.known_first :] + assumed.tokens
        pairs = zip(new, sequence.known_assumed, strict=False)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(new), len(sequence.known_assumed)))
        sequence.version += 1
        paid_prob = request.min_path_probs[0] if request.in_turn else trips.round_s / max(trips.step_s, 1e-6)
        order = DraftOrder(
            sequence.wire_id,
            sequence.version,
            sequence.known_first + same,
            len(assumed),
            new[same:],
            depth=min(MAX_DEPTH, max(1, request.max_depth)),
            nodes=min(MAX_NODES, max(1, request.max_nodes)),
            top_tokens=SAMPLED_TOKENS if request.sampled else 0,
            prob_bits=self.prob_bits,
            temperature=0.0 if params.greedy else params.temperature,
            min_prob=request.min_prob,
            paid_prob=min(1.0, paid_prob),
            free_ms=round(1000.0 * free_s),
        )
        sequence.known_first, sequence.known_assumed = len(tokens), list(assumed.tokens)
        server_s = _rounds(link).seconds(order.depth, trips.round_s) if request.in_turn else trips.server_s
        expected_s = trips.network_s + max(server_s, free_s if guess else 0.0)
        now, unread = time.monotonic(), len(order.tokens)
        sequence.flight = _Flight(sequence.version, len(tokens), assumed, now, expected_s, guess, unread)
        if not link.send(order):
            sequence.flight = None  # the next step finds another server, or none
        self._ordered = self._ordered or not request.in_turn
        self.counts["orders"] += 1
        self.counts["guesses"] += guess

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _receive(self, frame: Frame) -> None:
        """In a link's thread."""
        if not isinstance(frame, Tree | Forgot | Refused):
            raise BadRequest(f"a draft server sent a {type(frame).__name__}", "connect to a `forerun draft serve`")
        with self._changed:
            sequence = self._by_wire_id.get(frame.seq)
            flight = None if sequence is None else sequence.flight
            if sequence is None or flight is None or flight.version != frame.version:
                return  # of an order that was replaced, or of a sequence that ended
            sequence.flight = None
            if isinstance(frame, Tree):
                now = time.monotonic()
                self.trips.observe(frame, flight, now)
                if sequence.read_s is None:
                    sequence.read_s = now - flight.sent
                self.counts["trees"] += 1
                sequence.held.append(HeldDraft.joined(flight.first, flight.assumed, frame, self.name, flight.guess))
            else:
                sequence.known_first, sequence.known_assumed = 0, []
                if isinstance(frame, Refused) and sequence.link is not None:
                    sequence.refused.add(sequence.link.address)
                    sequence.link = None
            self._changed.notify_all()


def _rounds(link: Link) -> ServerRounds:
    """What a round of its server gives."""
    found = link.welcome
    return ServerRounds() if found is None else ServerRounds(found.round_tokens, found.round_slope)


def remote_drafter(addresses: str) -> type[Drafter]:
    """The drafter `remote:ADDRESS[,ADDRESS...]`."""
    named = tuple(address.strip() for address in addresses.split(","))
    for address in named:
        address_url(address)
    return type("RemoteDrafter", (RemoteDrafter,), {"name": f"remote:{addresses}", "addresses": named})


register_family("remote", remote_drafter)
