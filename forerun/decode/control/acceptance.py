"""What became of guesses: how often each drafter's tokens came true, over all requests and within one.

Turns a drafter's own word into a probability that experience backs, and learns from every guess whose outcome could be
seen. Knows no cost, no model and no drafter's workings.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from forerun.core import ROOT, Draft
from forerun.decode.tree import side_branches

PRIOR_WEIGHT = 4.0  # observations that a drafter's own word is worth
PAID_PRIOR = 0.8  # acceptance of a drafter that runs a model, before anything is known
PAID_WEIGHT = 12.0  # observations that this is worth: a few misses must not end what a few more would prove right
KEEP = 0.998  # forgetting of the statistics of all requests, per observation
REQUEST_KEEP = 0.95  # forgetting of one request's own
REQUEST_WEIGHT = 4.0  # observations of each kind that speak for this request being like the others
WEAKEST, STRONGEST = 1.0 / 30.0, 30.0  # odds ratio that a request's record may claim
DEPTHS = 8  # acceptance is kept for this many depths; deeper ones count as the last
BEHIND = 0.01  # share by which a batch may slow down one of its sequences for the good of the others

_EDGES = (0, 2, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99, 100)  # percent: fine where probabilities are near one
_BIN = [sum(percent >= edge for edge in _EDGES) - 1 for percent in range(101)]


def _cells(num: int) -> list[list[float]]:
    """Hits and tries, so many times."""
    return [[0.0, 0.0] for _ in range(num)]


@dataclass(slots=True)
class Record:
    """What became of one drafter's guesses, over all requests."""

    # By probability, and first tokens apart: whether a lookup found the right place shows there, and once it has, the
    # tokens after it hardly fail.
    first: list[list[float]] = field(default_factory=lambda: _cells(len(_EDGES)))
    later: list[list[float]] = field(default_factory=lambda: _cells(len(_EDGES)))
    depths: list[list[float]] = field(default_factory=lambda: _cells(DEPTHS))
    total: list[float] = field(default_factory=lambda: [0.0, 0.0])
    seen: int = 0
    asked_s: float = 0.0  # of free drafters: mean seconds of one asking
    gained: float = 0.0  # of free drafters: mean tokens that came true of one asking
    waited: int = 0  # steps since a free drafter was asked
    _known: list[float] = field(default_factory=list)  # acceptance by depth, as of `_known_at` observations
    _known_at: int = -1

    def prob(self, raw: float, first: bool, factor: float) -> float:
        """Acceptance of nodes of which the drafter thinks this, where a request's odds are `factor` times the usual."""
        hits, tries = (self.first if first else self.later)[_BIN[int(raw * 100.0)]]
        hits += PRIOR_WEIGHT * raw
        return hits * factor / (tries + PRIOR_WEIGHT - hits + hits * factor)

    def by_depth(self) -> list[float]:
        """Acceptance at depths 1 to `DEPTHS` given the one before, before anything is drafted. Not to be changed."""
        if self.seen != self._known_at:
            hits, tries = self.total
            mean = PAID_WEIGHT * (hits + PAID_WEIGHT * PAID_PRIOR) / (tries + PAID_WEIGHT)
            self._known = [(hits + mean) / (tries + PAID_WEIGHT) for hits, tries in self.depths]
            self._known_at = self.seen
        return self._known

    def ahead(self, factor: float, deepest: int) -> list[float]:
        """`by_depth` at depths 1 to `deepest` for a request whose odds are `factor` times the usual."""
        found = [prob * factor / (1.0 - prob + prob * factor) for prob in self.by_depth()[:deepest]]
        return found + found[-1:] * (deepest - DEPTHS)

    def count(self, own: OwnRecord, raw: float, above: int, hit: bool, surest: bool) -> None:
        """Take in what became of a node with `above` nodes over it; `surest`: among its siblings."""
        cell = (self.later if above else self.first)[_BIN[int(raw * 100.0)]]
        own.count((cell[0] + PRIOR_WEIGHT * raw) / (cell[1] + PRIOR_WEIGHT), hit)
        self.seen += 1
        # By depth only the surest counts: how far a path goes is what it is asked for, and side branches mostly fail.
        for count in (cell, self.depths[above if above < DEPTHS else -1], self.total) if surest else (cell,):
            count[0] = count[0] * KEEP + hit
            count[1] = count[1] * KEEP + 1.0

    def report(self) -> dict[str, Any]:
        bins = {}
        for edge, first, later in zip(_EDGES, self.first, self.later, strict=True):
            hits, tries = first[0] + later[0], first[1] + later[1]
            if tries:
                bins[f"{edge / 100:g}"] = {"tries": round(tries, 1), "accepted": round(hits / tries, 4)}
        depths = [round(hits / tries, 4) for hits, tries in self.depths if tries]
        return {"by_prob": bins, "by_depth": depths, "asked_s": self.asked_s}


@dataclass(slots=True)
class OwnRecord:
    """One drafter's record within one request, against what was expected of it."""

    hits: float = 0.0
    misses: float = 0.0
    expected: float = 0.0  # hits
    factor: float = 1.0  # odds of this request over the odds of all

    def count(self, prob: float, hit: bool) -> None:
        self.hits = self.hits * REQUEST_KEEP + hit
        self.misses = self.misses * REQUEST_KEEP + (not hit)
        self.expected = self.expected * REQUEST_KEEP + prob
        hits, misses, expected = self.hits, self.misses, self.expected
        odds = (hits + REQUEST_WEIGHT) / (misses + REQUEST_WEIGHT)
        usual = (expected + REQUEST_WEIGHT) / (hits + misses - expected + REQUEST_WEIGHT)
        factor = odds / usual
        self.factor = STRONGEST if factor > STRONGEST else factor if factor > WEAKEST else WEAKEST


@dataclass(slots=True)
class RequestStats:
    """What one sequence has shown so far."""

    own: dict[str, OwnRecord] = field(default_factory=dict)
    trials: int = 2  # probes that a new request may have before others
    left_out: int = 0  # steps in a row that a paid drafter ran for others only
    probing: str = ""  # the paid drafter whose draft of this step is a probe
    refund: float = 0.0  # seconds that a probe's token saves if it comes true
    plain_s: float = 0.0  # what the tokens it could expect would have taken without drafting, over recent steps
    taken_s: float = 0.0  # what these steps took
    grace_s: float = 0.0

    @property
    def owed(self) -> bool:
        """Whether drafting for others has cost it so much that it must not go on."""
        return self.taken_s > (1.0 + BEHIND) * self.plain_s + self.grace_s

    def record(self, drafter: str) -> OwnRecord:
        found = self.own.get(drafter)
        if found is None:
            found = self.own[drafter] = OwnRecord()
        return found


class Acceptance:
    """The records of all drafters."""

    def __init__(self) -> None:
        self._records: dict[str, Record] = {}

    def record(self, drafter: str) -> Record:
        found = self._records.get(drafter)
        if found is None:
            found = self._records[drafter] = Record()
        return found

    def calibrate(self, stats: RequestStats, draft: Draft) -> list[float]:
        """The probability of each node to be accepted once its parent is, by what became of such nodes before."""
        probs: list[float] = []
        last, factor = None, 1.0
        first: list[list[float]] = []
        later: list[list[float]] = []
        for raw, parent, source in zip(draft.probs, draft.parents, draft.sources, strict=True):
            if source != last:
                last, record, factor = source, self.record(source), stats.record(source).factor
                first, later = record.first, record.later
            # As `Record.probability`; this runs for every node.
            hits, tries = (first if parent == ROOT else later)[_BIN[int(raw * 100.0)]]
            hits += PRIOR_WEIGHT * raw
            probs.append(hits * factor / (tries + PRIOR_WEIGHT - hits + hits * factor))
        return probs

    def learn(self, stats: RequestStats, draft: Draft, emitted: list[int]) -> int:
        """Compare a draft with the tokens that came; how many of a probe's came true."""
        reached = {ROOT: 0}  # node -> its depth, for those that came true
        tokens, num, probed = draft.tokens, len(emitted), 0
        last, sides = None, side_branches(draft)
        for node, parent in enumerate(draft.parents):
            above = reached.get(parent)
            if above is None or above >= num:
                continue
            hit = tokens[node] == emitted[above]
            source = draft.sources[node]
            if source != last:
                last, record, own = source, self.record(source), stats.record(source)
            record.count(own, draft.probs[node], above, hit, not sides[node])
            if hit:
                reached[node] = above + 1
                probed += source == stats.probing
        return probed

    def report(self) -> dict[str, Any]:
        return {name: record.report() for name, record in self._records.items()}
