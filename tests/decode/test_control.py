"""The controller: single decisions by hand, and whole answers in a simulation with measured costs.

In the simulation a text is a row of positions; whether a drafter is right about a position is decided beforehand, so
all policies see the same text. Costs are those measured on two CPU cores and on one H200.
"""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import dataclass, field

import pytest
import torch

from forerun.core import ROOT, Draft
from forerun.decode.control import Controller, RequestStats
from forerun.decode.cost import CostCurve

CPU = ({1: 0.051, 2: 0.053, 4: 0.060, 8: 0.079, 16: 0.121, 32: 0.200}, {1: 0.019, 8: 0.03, 32: 0.07})
H200 = (
    {1: 1.35e-3, 8: 1.45e-3, 16: 1.55e-3, 32: 2.2e-3, 64: 4e-3, 128: 6.5e-3, 256: 12e-3},
    {1: 0.6e-3, 16: 0.7e-3, 64: 1.3e-3},
)
WRONG = 1 << 30


def make(machine=CPU) -> Controller:
    return Controller(CostCurve(machine[0]), {"paid": CostCurve(machine[1])})


# -- the simulation --------------------------------------------------------------------------------------------------


@dataclass
class Guesser:
    """Right or wrong about each position, and what it thinks of it."""

    right: list[bool]
    raw: list[float]
    offers: list[int] = field(default_factory=list)  # of a free one: tokens it offers at each position

    def chain(self, at: int, num: int) -> list[tuple[int, float]]:
        return [(t if self.right[t] else WRONG + t, self.raw[t]) for t in range(at, at + num)]


def steady(num: int, accepted: float, seed: int, says: float | None = 0.8) -> Guesser:
    """`says` is what it always claims; None: the chance of each position differs, and it knows it."""
    rng = random.Random(seed)
    chances = [accepted if says else rng.betavariate(2 * accepted, 2 - 2 * accepted) for _ in range(num + 64)]
    return Guesser([rng.random() < chance for chance in chances], [says or chance for chance in chances])


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


@dataclass
class World:
    machine: tuple[dict[int, float], dict[int, float]]
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

    def rounds_s(self, depths: list[int]) -> float:
        active = [sum(depth > j for depth in depths) for j in range(max(depths, default=0))]
        return sum(self.round.seconds(n, n) for n in active)

    def fixed(self, nodes: int = 0, rounds: int = 0) -> float:
        """Tokens per second of a policy: so many free nodes, else so many rounds."""
        at, live, total, count = [0] * self.size, list(range(self.size)), 0.0, 0
        while live:
            drafts = [self.offer(i, at[i], nodes) if nodes else Draft() for i in live]
            depths = [rounds if not len(draft) else 0 for draft in drafts]
            for row, i in enumerate(live):
                if depths[row]:
                    merged(drafts[row], self.paid[i].chain(at[i], rounds), "paid")
            total += self.target.seconds(len(live) + sum(map(len, drafts)), len(live)) + self.rounds_s(depths)
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
        c = control or Controller(CostCurve(self.machine[0]), {"paid": CostCurve(self.machine[1])})
        rng, span = random.Random(0), self.num // self.requests
        at, live, total, count = [0] * self.size, list(range(self.size)), 0.0, 0
        stats, request = [c.open() for _ in live], [0] * self.size
        started = [self.start_s == 0.0] * self.size
        while live:
            for i in live:
                if at[i] // span != request[i]:
                    stats[i], request[i], started[i] = c.open(), at[i] // span, self.start_s == 0.0
            rows = [stats[i] for i in live]
            drafts = [self.offer(i, at[i]) for i in live]
            depths = [0] * len(live)
            if self.paid:
                chances = [c.calibrate(s, draft) for s, draft in zip(rows, drafts, strict=True)]
                waits = [0.0 if started[i] else self.start_s for i in live]
                left = [span - at[i] % span for i in live]
                depths = c.depth(rows, drafts, chances, "paid", [16] * len(live), 0, waits, left)
            spent = 0.0
            for row, i in enumerate(live):
                if depths[row]:
                    spent += 0.0 if started[i] else self.start_s
                    started[i] = True
                    depths[row] = self.draft_paid(c, stats[i], i, at[i], drafts[row], depths, row)
            self.rounds.append((at[live[0]], depths[0]))
            spent += self.rounds_s(depths)
            chances = [c.calibrate(s, draft) for s, draft in zip(rows, drafts, strict=True)]
            chosen = c.select(rows, drafts, chances, [64] * len(live), 0, spent)
            tokens = len(live) + sum(map(len, chosen))
            seconds = self.target.seconds(tokens, len(live))
            total += seconds + spent
            noise = rng.lognormvariate(0.0, 0.03) * (10.0 if rng.random() < 0.01 else 1.0)
            c.target.observe(tokens, len(live), 0, seconds * noise)
            for row, i in enumerate(live):
                new = emitted(drafts[row], chosen[row], at[i])
                c.learn(stats[i], drafts[row], new)
                at[i], count = at[i] + len(new), count + len(new)
            live = [i for i in live if at[i] < self.num]
        return count / total

    def draft_paid(
        self, c: Controller, stats: RequestStats, i: int, at: int, draft: Draft, depths: list[int], row: int
    ) -> int:
        worth = c.worth(stats, "paid", sum(depth > 0 for depth in depths))
        chain = self.paid[i].chain(at, depths[row])
        path, rounds = 1.0, 0
        while rounds < depths[row] and (rounds == 0 or worth(path, rounds)):
            path *= chain[rounds][1]
            rounds += 1
        merged(draft, chain[:rounds], "paid")
        return rounds


N = 1000
SCENARIOS = {
    "always good": lambda m: World(m, N, [steady(N, 0.9, 1)]),
    "good, and knows when": lambda m: World(m, N, [steady(N, 0.9, 2, None)]),
    "middling": lambda m: World(m, N, [steady(N, 0.6, 3)]),
    "poor": lambda m: World(m, N, [steady(N, 0.3, 4)]),
    "hopeless": lambda m: World(m, N, [steady(N, 0.05, 5)]),
    "poor, claims to be perfect": lambda m: World(m, N, [steady(N, 0.3, 6, 0.97)]),
    "good, then poor, then good": lambda m: World(m, N, [switching(N, (0.9, 0.2), 250, 7)]),
    "poor in ten requests": lambda m: World(m, N, [steady(N, 0.3, 8)], requests=10),
    "good in every other request": lambda m: World(m, N, [switching(N, (0.9, 0.2), 100, 9)], requests=10),
    "lookups": lambda m: World(m, N, free=[bursts(N, 10)]),
    "lookups that mostly lie": lambda m: World(m, N, free=[bursts(N, 11, 0.02, 0.95, 0.9)]),
    "lookups and a good model": lambda m: World(m, N, [steady(N, 0.85, 12)], [bursts(N, 13)]),
    "lookups and a poor model": lambda m: World(m, N, [steady(N, 0.3, 14)], [bursts(N, 13)]),
    "many lookups, a model that knows": lambda m: World(m, N, [steady(N, 0.85, 15, None)], [bursts(N, 16, 0.6)]),
}


@pytest.mark.parametrize("machine", [CPU, H200], ids=["cpu", "h200"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_auto_is_as_fast_as_the_best_fixed_policy_and_as_plain_decoding(name: str, machine):
    world = SCENARIOS[name](machine)
    auto = world.auto()
    assert auto >= 0.97 * world.best_fixed()
    assert auto >= 0.97 * world.fixed()


def test_drafting_goes_off_and_on_again_within_a_request():
    world = World(CPU, 1600, [switching(1600, (0.9, 0.1), 400, 1)])
    world.auto()

    def share(low: int, high: int) -> float:
        rounds = [depth for at, depth in world.rounds if low <= at < high]
        return sum(depth > 0 for depth in rounds) / len(rounds)

    assert share(100, 400) > 0.9
    assert share(500, 800) < 0.15
    assert share(1000, 1200) > 0.6
    assert share(1300, 1600) < 0.15


def test_trying_a_useless_drafter_costs_little():
    world = World(CPU, 2000, [steady(2000, 0.0, 1)])
    control = make()
    world.auto(control)  # learns that it is useless
    assert world.auto(control) >= 0.983 * world.fixed()
    assert any(depth for _, depth in world.rounds[-len(world.rounds) // 2 :])  # and yet goes on trying


@pytest.mark.parametrize("size", [2, 4, 16, 64])
@pytest.mark.parametrize("kind", ["good", "half", "poor", "mixed", "lookups"])
def test_batches_are_never_slower_than_plain(size: int, kind: str):
    num = {2: 400, 4: 400, 16: 200, 64: 60}[size]
    accepted = {"good": (0.9, 0.9), "half": (0.5, 0.5), "poor": (0.2, 0.2), "mixed": (0.95, 0.2)}.get(kind)
    if accepted is None:
        world = World(H200, num, free=[bursts(num, i) for i in range(size)])
    else:
        world = World(H200, num, [steady(num, accepted[i % 2], 100 + i) for i in range(size)])
    assert world.auto() >= 0.95 * world.fixed()


def test_a_good_drafter_is_used_in_small_batches():
    for size, least in ((2, 1.25), (4, 1.2), (8, 1.1)):
        world = World(H200, 400, [steady(400, 0.9, 50 + i) for i in range(size)])
        assert world.auto() >= least * world.fixed()


def test_a_costly_start_is_made_for_long_answers_only():
    for num, pays in ((1000, True), (30, False)):
        world = World(CPU, num, [steady(num, 0.9, 3)], start_s=2.0)
        world.auto()
        assert any(depth for _, depth in world.rounds) == pays


# -- single decisions ------------------------------------------------------------------------------------------------


def test_chances_begin_with_the_drafters_word_and_end_with_experience():
    c = make()
    draft = Draft.chain([1, 2], [0.9, 0.4], "free")
    assert c.calibrate(c.open(), draft) == pytest.approx([0.9, 0.4])
    for i in range(200):
        c.learn(c.open(), draft, [1, 2, 3] if i % 5 == 0 else [7])
    first, second = c.calibrate(c.open(), draft)
    assert first == pytest.approx(0.2, abs=0.06)
    assert second > 0.9  # whenever its parent came, it came


def test_a_request_has_its_own_record():
    c = make()
    draft = Draft.chain([1], [0.5], "free")
    lucky, usual = c.open(), c.open()
    for i in range(100):
        c.learn(usual, draft, [1] if i % 2 else [2])
    for _ in range(12):
        c.learn(lucky, draft, [1])
    assert c.calibrate(lucky, draft)[0] > 0.7
    assert c.calibrate(usual, draft)[0] < 0.65
    assert c.calibrate(lucky, Draft.chain([1], [0.5], "other")) == pytest.approx([0.5])


def test_only_what_could_have_been_seen_is_learnt():
    c = make()
    #          0: 5    1: 6 below 0   2: 9 below 0   3: 8, a sibling of 0   4: 1 below 3
    draft = Draft([5, 6, 9, 8, 1], [ROOT, 0, 0, ROOT, 3], [0.5] * 5, ["a", "b", "c", "d", "e"])
    c.learn(c.open(), draft, [5])
    seen = c.report()["drafters"]
    assert {name for name in seen if seen[name]["by_chance"]} == {"a", "d"}
    c.learn(c.open(), draft, [5, 9, 4])
    seen = {name: found["by_chance"]["0.5"] for name, found in c.report()["drafters"].items() if found["by_chance"]}
    assert set(seen) == {"a", "b", "c", "d"}
    assert [seen[name]["accepted"] for name in "abcd"] == [1.0, 0.0, 1.0, 0.0]


def random_tree(rng: random.Random, num: int) -> Draft:
    draft = Draft()
    for node in range(num):
        draft.add(node, rng.randrange(ROOT, node), rng.choice([0.2, 0.5, 0.8, 0.95, 1.0]), "free")
    return draft


def rate(c: Controller, drafts: list[Draft], chosen: list[list[int]], spent_s: float) -> float:
    tokens = float(len(drafts))
    for draft, nodes in zip(drafts, chosen, strict=True):
        for node in nodes:
            chance = 1.0
            for above in draft.path(node):
                chance *= draft.chances[above]
            tokens += chance
    return tokens / (c.target.seconds(len(drafts) + sum(map(len, chosen)), len(drafts)) + spent_s)


def test_the_chosen_nodes_are_the_best_of_all_closed_choices():
    rng = random.Random(0)
    stairs = {1: 1.0, 2: 1.02, 3: 1.5, 4: 1.52, 5: 1.53, 6: 2.4, 7: 2.41, 12: 2.5}
    for _ in range(40):
        c = Controller(CostCurve(stairs), {})
        drafts = [random_tree(rng, rng.randrange(5)) for _ in range(2)]
        limits = [rng.randrange(5), 4]
        closed = []
        for draft, limit in zip(drafts, limits, strict=True):
            subsets = itertools.chain(*(itertools.combinations(range(len(draft)), n) for n in range(limit + 1)))
            closed.append([list(s) for s in subsets if all(draft.parents[n] in (*s, ROOT) for n in s)])
        spent_s = rng.choice([0.0, 0.7])
        found = c.select([c.open(), c.open()], drafts, [draft.chances for draft in drafts], limits, 0, spent_s)
        assert all(nodes in options for nodes, options in zip(found, closed, strict=True))
        best = max(rate(c, drafts, list(pair), spent_s) for pair in itertools.product(*closed))
        assert rate(c, drafts, found, spent_s) == pytest.approx(best)


def test_what_was_drawn_at_random_is_verified_whole():
    c = make()
    drawn = Draft([1, 2], [ROOT, 0], [0.01, 0.01], ["paid"] * 2, {ROOT: torch.ones(4) / 4})
    plain = Draft.chain([1, 2], [0.01, 0.01], "free")
    chosen = c.select([c.open(), c.open()], [drawn, plain], [drawn.chances, plain.chances], [8, 8], 0)
    assert chosen == [[0, 1], []]


def paid_rounds(c: Controller, stats: list[RequestStats], free: Draft | None = None, **start) -> list[int]:
    drafts = [free or Draft() for _ in stats]
    return c.depth(stats, drafts, [d.chances for d in drafts], "paid", [16] * len(stats), 0, **start)


def test_an_unknown_drafter_is_tried_but_not_beside_a_sure_free_draft():
    c = make()
    assert paid_rounds(c, [c.open()]) == [16]
    sure = Draft.chain(list(range(12)), [0.995] * 12, "free")
    assert paid_rounds(c, [c.open()], sure) == [0]


def test_what_cannot_pay_even_if_perfect_is_never_tried():
    steep = Controller(CostCurve({1: 1.0, 64: 64.0, 128: 128.0}), {"paid": CostCurve({1: 0.5, 64: 10.0})})
    for _ in range(300):
        assert paid_rounds(steep, [steep.open() for _ in range(64)]) == [0] * 64


def test_a_round_is_worth_it_while_the_path_is_likely():
    c = make()
    stats = c.open()
    sure, doubtful = c.worth(stats, "paid"), c.worth(stats, "paid")
    assert sure(0.98, 1) and sure(0.96, 2)
    assert not doubtful(0.1, 1)
    for _ in range(60):  # now its word is known to be worth nothing
        c.learn(stats, Draft.chain([1], [0.98], "paid"), [2])
    assert not c.worth(stats, "paid")(0.98, 1)


def test_a_free_drafter_that_takes_long_and_gives_nothing_is_asked_rarely():
    c = make(H200)
    assert c.asks("suffix")
    for _ in range(200):
        c.asked("suffix", 100e-6, 0.0)
    assert 0 < sum(_asked(c) for _ in range(1000)) < 60
    for _ in range(20):
        c.asked("suffix", 100e-6, 2.0)
    assert all(c.asks("suffix") for _ in range(20))


def _asked(c: Controller) -> bool:
    if c.asks("suffix"):
        c.asked("suffix", 100e-6, 0.0)
        return True
    return False


def test_the_bound_is_that_of_the_best_depth():
    c = make()
    survival = [0.9, 0.8, 0.1]
    by_depth = [1.9 * 51 / (53 + 19), 2.7 * 51 / (56.5 + 38), 2.8 * 51 / (60 + 57)]
    assert c.bound(survival, "paid") == pytest.approx(max(by_depth))
    assert c.bound([0.9, 0.8], None) == pytest.approx(2.7 * 51 / 56.5)
    assert c.bound([0.01], "paid") == 1.0


def test_the_report_is_plain_data():
    c = make()
    c.learn(c.open(), Draft.chain([1, 2], [0.9, 1.0], "free"), [1, 2, 3])
    report = json.loads(json.dumps(c.report()))
    assert report["drafters"]["free"]["by_chance"]["1"]["accepted"] == 1.0
    assert report["target_s"]["8"] == pytest.approx(0.079)
    assert report["round_s"]["paid"]["1"] == pytest.approx(0.019)
