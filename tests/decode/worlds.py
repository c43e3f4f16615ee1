"""A simulated decoder: texts, drafters that are right or wrong about them, and costs; no model is run.

A text is a row of positions; whether a drafter is right about a position is decided beforehand, so all policies see the
same text. Costs are those measured on two CPU cores and on one H200.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

from forerun.core import ROOT, Draft
from forerun.decode.control.controller import Controller, RequestStats
from forerun.decode.control.cost import CostCurve

Machine = tuple[dict[int, float], dict[int, float]]  # seconds of a forward of the target, and of the drafter, by tokens

CPU: Machine = ({1: 0.051, 2: 0.053, 4: 0.060, 8: 0.079, 16: 0.121, 32: 0.200}, {1: 0.019, 8: 0.03, 32: 0.07})
H200: Machine = (
    {1: 1.35e-3, 8: 1.45e-3, 16: 1.55e-3, 32: 2.2e-3, 64: 4e-3, 128: 6.5e-3, 256: 12e-3},
    {1: 0.6e-3, 16: 0.7e-3, 64: 1.3e-3},
)
WRONG = 1 << 30


def make(machine: Machine = CPU) -> Controller:
    return Controller(CostCurve(machine[0]), {"paid": CostCurve(machine[1])})


@dataclass
class Guesser:
    """Right or wrong about each position, and what it thinks of it."""

    right: list[bool]
    raw: list[float]
    offers: list[int] = field(default_factory=list)  # of a free one: tokens it offers at each position

    def chain(self, at: int, num: int) -> list[tuple[int, float]]:
        return [(t if self.right[t] else WRONG + t, self.raw[t]) for t in range(at, at + num)]


def steady(num: int, accepted: float, seed: int, says: float | None = 0.8) -> Guesser:
    """`says` is what it always claims; None: the probability of each position differs, and it knows it."""
    rng = random.Random(seed)
    probs = [accepted if says else rng.betavariate(2 * accepted, 2 - 2 * accepted) for _ in range(num + 64)]
    return Guesser([rng.random() < prob for prob in probs], [says or prob for prob in probs])


def switching(num: int, levels: tuple[float, ...], span: int, seed: int) -> Guesser:
    rng = random.Random(seed)
    right = [rng.random() < levels[t // span % len(levels)] for t in range(num + 64)]
    return Guesser(right, [0.8] * (num + 64))


def bursts(num: int, seed: int, share: float = 0.25, says: float = 0.7, false: float = 0.2) -> Guesser:
    """A lookup: long stretches where it is right, and wrong offers in between."""
    rng = random.Random(seed)
    guesser = Guesser([], [says] * (num + 64), [])
    while len(guesser.right) < num + 64:
        for inside, mean in ((False, 24 * (1 - share) / share), (True, 24)):
            for _ in range(1 + int(rng.expovariate(1 / mean))):
                guesser.right.append(rng.random() < (0.97 if inside else 0.1))
                guesser.offers.append(10 if inside else 4 * (rng.random() < false))
    return guesser


def merged(draft: Draft, chain: list[tuple[int, float]], source: str) -> Draft:
    known = {
        (parent, token): node for node, (parent, token) in enumerate(zip(draft.parents, draft.tokens, strict=True))
    }
    at = ROOT
    for token, raw in chain:
        at = known[at, token] if (at, token) in known else draft.add(token, at, raw, source)
    return draft


def emitted(draft: Draft, nodes: list[int], at: int) -> list[int]:
    known = {(draft.parents[node], draft.tokens[node]): node for node in nodes}
    node, tokens = ROOT, [at]
    while (node, tokens[-1]) in known:
        node = known[node, tokens[-1]]
        tokens.append(tokens[-1] + 1)
    return tokens


def noise(rng: random.Random) -> float:
    """What a forward takes over what it should: a little, and now and then the operating system has other plans."""
    return rng.lognormvariate(0.0, 0.03) * (10.0 if rng.random() < 0.01 else 1.0)


@dataclass
class World:
    machine: Machine
    num: int  # tokens of each sequence's text
    paid: list[Guesser] = field(default_factory=list)
    free: list[Guesser] = field(default_factory=list)
    requests: int = 1  # each text is this many requests, one after the other
    start_s: float = 0.0

    def __post_init__(self) -> None:
        self.target, self.round = CostCurve(self.machine[0]), CostCurve(self.machine[1])
        self.rounds: list[tuple[int, int]] = []  # position and rounds of the first sequence, step by step

    def offer(self, i: int, at: int, most: int = 64) -> Draft:
        draft = Draft()
        return merged(draft, self.free[i].chain(at, min(most, self.free[i].offers[at])), "free") if self.free else draft

    def rounds_s(self, depths: list[int]) -> list[tuple[int, float]]:
        """Sequences and seconds of each round."""
        active = [sum(depth > j for depth in depths) for j in range(max(depths, default=0))]
        return [(n, self.round.seconds(n, n)) for n in active]

    def fixed(self, nodes: int = 0, rounds: int = 0) -> float:
        """Tokens per second of a policy: so many free nodes, else so many rounds."""
        at, live, total, count = [0] * self.size, list(range(self.size)), 0.0, 0
        while live:
            drafts = [self.offer(i, at[i], nodes) if nodes else Draft() for i in live]
            depths = [rounds if not len(draft) else 0 for draft in drafts]
            for row, i in enumerate(live):
                if depths[row]:
                    merged(drafts[row], self.paid[i].chain(at[i], rounds), "paid")
            total += self.target.seconds(len(live) + sum(map(len, drafts)), len(live))
            total += sum(seconds for _, seconds in self.rounds_s(depths))
            for row, i in enumerate(live):
                new = len(emitted(drafts[row], list(range(len(drafts[row]))), at[i]))
                at[i], count = at[i] + new, count + new
            live = [i for i in live if at[i] < self.num]
        return count / total

    @property
    def size(self) -> int:
        return len(self.paid or self.free)

    def best_fixed(self) -> float:
        nodes = (0, 2, 4, 10) if self.free else (0,)
        rounds = (0, 1, 2, 3, 4, 6, 8) if self.paid else (0,)
        return max(self.fixed(n, k) for n, k in itertools.product(nodes, rounds))

    def auto(self, control: Controller | None = None) -> float:
        """Tokens per second with a controller: a new one, which knows this world's costs, or the one given."""
        c = control or make(self.machine)
        rng, span = random.Random(0), self.num // self.requests
        at, live, total, count = [0] * self.size, list(range(self.size)), 0.0, 0
        stats, request = [c.new_request() for _ in live], [0] * self.size
        started = [self.start_s == 0.0] * self.size
        while live:
            for i in live:
                if at[i] // span != request[i]:
                    stats[i], request[i], started[i] = c.new_request(), at[i] // span, self.start_s == 0.0
            rows = [stats[i] for i in live]
            drafts = [self.offer(i, at[i]) for i in live]
            depths = [0] * len(live)
            if self.paid:
                probs = [c.calibrate(s, draft) for s, draft in zip(rows, drafts, strict=True)]
                waits = [0.0 if started[i] else self.start_s for i in live]
                left = [span - at[i] % span for i in live]
                depths = c.plan_rounds(rows, drafts, probs, "paid", [16] * len(live), 0, waits, left)
            spent = 0.0
            for row, i in enumerate(live):
                if depths[row]:
                    spent += 0.0 if started[i] else self.start_s
                    started[i] = True
                    depths[row] = self.draft_paid(c, stats[i], i, at[i], drafts[row], depths, row)
            self.rounds.append((at[live[0]], depths[0]))
            for active, seconds in self.rounds_s(depths):
                spent += seconds
                c.observe_round("paid", active, active, 0, seconds * noise(rng))
            probs = [c.calibrate(s, draft) for s, draft in zip(rows, drafts, strict=True)]
            chosen = c.select(rows, drafts, probs, [64] * len(live), 0, spent)
            tokens = len(live) + sum(map(len, chosen))
            seconds = self.target.seconds(tokens, len(live))
            total += seconds + spent
            c.target.observe(tokens, len(live), 0, seconds * noise(rng))
            for row, i in enumerate(live):
                new = emitted(drafts[row], chosen[row], at[i])
                c.record_draft(stats[i], drafts[row], new)
                at[i], count = at[i] + len(new), count + len(new)
            live = [i for i in live if at[i] < self.num]
        return count / total

    def draft_paid(
        self, c: Controller, stats: RequestStats, i: int, at: int, draft: Draft, depths: list[int], row: int
    ) -> int:
        more = c.stopping_rule(stats, "paid", sum(depth > 0 for depth in depths))
        chain = self.paid[i].chain(at, depths[row])
        path, rounds = 1.0, 0
        while rounds < depths[row] and (rounds == 0 or more(path, rounds)):
            path *= chain[rounds][1]
            rounds += 1
        merged(draft, chain[:rounds], "paid")
        return rounds
