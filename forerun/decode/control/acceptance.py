"""How often each drafter's tokens are accepted, over all requests and within one.

Calibrates a drafter's own probabilities by the outcomes of similar nodes before, and learns from every node whose
outcome could be seen, verified or not. Knows no cost, no model and no drafter's workings.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from forerun.core import ROOT, Draft
from forerun.decode.tree import side_branches

PRIOR_OBSERVATIONS = 4.0  # observations that a drafter's own probability counts for
PAID_PRIOR_ACCEPTANCE = 0.8  # of a paid drafter, before anything is known
PAID_PRIOR_OBSERVATIONS = 12.0  # that this counts for: a few misses must not end drafting that a few more would justify
DECAY = 0.998  # per observation, of the statistics of all requests
REQUEST_DECAY = 0.95  # per observation, of one request's own statistics
REQUEST_PRIOR_OBSERVATIONS = 4.0  # hits and misses as of other requests that a request starts with
MIN_ODDS_RATIO, MAX_ODDS_RATIO = 1.0 / 30.0, 30.0  # of one request to all
TRACKED_DEPTHS = 8  # acceptance is kept by depth up to here; deeper nodes count as the last
MAX_SLOWDOWN_SHARE = 0.01  # of its plain time: what drafting for a batch may cost one of its sequences

_EDGES = (0, 2, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99, 100)  # percent: fine where probabilities are near one
_BIN = [sum(percent >= edge for edge in _EDGES) - 1 for percent in range(101)]


def _cells(num: int) -> list[list[float]]:
    """`num` pairs of hits and tries."""
    return [[0.0, 0.0] for _ in range(num)]


@dataclass(slots=True)
class DrafterRecord:
    """The outcomes of one drafter's nodes, over all requests."""

    # By the drafter's probability, and first tokens apart: they show whether a lookup found the right place, and once
    # it has, the tokens after it hardly fail.
    first: list[list[float]] = field(default_factory=lambda: _cells(len(_EDGES)))
    later: list[list[float]] = field(default_factory=lambda: _cells(len(_EDGES)))
    depths: list[list[float]] = field(default_factory=lambda: _cells(TRACKED_DEPTHS))
    total: list[float] = field(default_factory=lambda: [0.0, 0.0])
    observations: int = 0
    free_run_s: float = 0.0  # of free drafters: mean seconds for one sequence
    accepted_tokens: float = 0.0  # of free drafters: mean tokens that were right, for one sequence and step
    steps_skipped: int = 0  # of free drafters: steps since the last run
    _known: list[float] = field(default_factory=list)  # acceptance by depth, as of `_known_at` observations
    _known_at: int = -1

    def prob(self, raw: float, first: bool, factor: float) -> float:
        """Acceptance of nodes with the drafter's probability `raw`; a request's odds are `factor` times the usual."""
        hits, tries = (self.first if first else self.later)[_BIN[int(raw * 100.0)]]
        hits += PRIOR_OBSERVATIONS * raw
        return hits * factor / (tries + PRIOR_OBSERVATIONS - hits + hits * factor)

    def usual_by_depth(self) -> list[float]:
        """Acceptance at depths 1 to `TRACKED_DEPTHS`, each given the one before. The list must not be changed."""
        if self.observations != self._known_at:
            hits, tries = self.total
            mean = (
                PAID_PRIOR_OBSERVATIONS
                * (hits + PAID_PRIOR_OBSERVATIONS * PAID_PRIOR_ACCEPTANCE)
                / (tries + PAID_PRIOR_OBSERVATIONS)
            )
            self._known = [(hits + mean) / (tries + PAID_PRIOR_OBSERVATIONS) for hits, tries in self.depths]
            self._known_at = self.observations
        return self._known

    def acceptance_by_depth(self, factor: float, deepest: int) -> list[float]:
        """`usual_by_depth` at depths 1 to `deepest` for a request whose odds are `factor` times the usual."""
        found = [prob * factor / (1.0 - prob + prob * factor) for prob in self.usual_by_depth()[:deepest]]
        return found + found[-1:] * (deepest - TRACKED_DEPTHS)

    def count(self, own: RequestRecord, raw: float, above: int, hit: bool, best: bool) -> None:
        """Add the outcome of a node with `above` nodes over it; `best`: the most probable of its siblings."""
        cell = (self.later if above else self.first)[_BIN[int(raw * 100.0)]]
        own.count((cell[0] + PRIOR_OBSERVATIONS * raw) / (cell[1] + PRIOR_OBSERVATIONS), hit)
        self.observations += 1
        # By depth only the best sibling counts: it stands for how far a path goes, and side branches mostly fail.
        for count in (cell, self.depths[above if above < TRACKED_DEPTHS else -1], self.total) if best else (cell,):
            count[0] = count[0] * DECAY + hit
            count[1] = count[1] * DECAY + 1.0

    def stats(self) -> dict[str, Any]:
        bins = {}
        for edge, first, later in zip(_EDGES, self.first, self.later, strict=True):
            hits, tries = first[0] + later[0], first[1] + later[1]
            if tries:
                bins[f"{edge / 100:g}"] = {"tries": round(tries, 1), "accepted": round(hits / tries, 4)}
        depths = [round(hits / tries, 4) for hits, tries in self.depths if tries]
        return {"by_prob": bins, "by_depth": depths, "free_run_s": self.free_run_s}


@dataclass(slots=True)
class RequestRecord:
    """The outcomes of one drafter's nodes within one request, against what was expected of them."""

    hits: float = 0.0
    misses: float = 0.0
    expected: float = 0.0  # hits
    factor: float = 1.0  # odds of this request over the odds of all

    def count(self, prob: float, hit: bool) -> None:
        self.hits = self.hits * REQUEST_DECAY + hit
        self.misses = self.misses * REQUEST_DECAY + (not hit)
        self.expected = self.expected * REQUEST_DECAY + prob
        hits, misses, expected = self.hits, self.misses, self.expected
        odds = (hits + REQUEST_PRIOR_OBSERVATIONS) / (misses + REQUEST_PRIOR_OBSERVATIONS)
        usual = (expected + REQUEST_PRIOR_OBSERVATIONS) / (hits + misses - expected + REQUEST_PRIOR_OBSERVATIONS)
        factor = odds / usual
        self.factor = (
            MAX_ODDS_RATIO if factor > MAX_ODDS_RATIO else factor if factor > MIN_ODDS_RATIO else MIN_ODDS_RATIO
        )


@dataclass(slots=True)
class RequestStats:
    """What the controller knows of one sequence."""

    own: defaultdict[str, RequestRecord] = field(default_factory=lambda: defaultdict(RequestRecord))  # by drafter
    trials: int = 2  # probes that a new request gets at half the usual credit
    steps_left_out: int = 0  # in a row, in which a paid drafter ran for others only
    probing: str = ""  # the paid drafter whose draft of this step is a probe
    refund_s: float = 0.0  # that each accepted token of a probe saves
    plain_s: float = 0.0  # what the tokens it could expect would have taken without drafting, over recent steps
    taken_s: float = 0.0  # what these steps took
    allowance_s: float = 0.0  # that it may lose beside MAX_SLOWDOWN_SHARE

    @property
    def lagging(self) -> bool:
        """Whether drafting for others has cost it so much that they must not slow it down any further."""
        return self.taken_s > (1.0 + MAX_SLOWDOWN_SHARE) * self.plain_s + self.allowance_s


class Acceptance:
    """The records of all drafters."""

    def __init__(self) -> None:
        self.records: defaultdict[str, DrafterRecord] = defaultdict(DrafterRecord)  # by drafter

    def calibrate(self, stats: RequestStats, draft: Draft) -> list[float]:
        """The probability of each node to be accepted once its parent is, by the outcome of similar nodes before."""
        probs: list[float] = []
        last, factor = None, 1.0
        first: list[list[float]] = []
        later: list[list[float]] = []
        for raw, parent, source in zip(draft.probs, draft.parents, draft.sources, strict=True):
            if source != last:
                last, record, factor = source, self.records[source], stats.own[source].factor
                first, later = record.first, record.later
            # As `DrafterRecord.prob`, inlined: this runs for every node.
            hits, tries = (first if parent == ROOT else later)[_BIN[int(raw * 100.0)]]
            hits += PRIOR_OBSERVATIONS * raw
            probs.append(hits * factor / (tries + PRIOR_OBSERVATIONS - hits + hits * factor))
        return probs

    def record_draft(self, stats: RequestStats, draft: Draft, emitted: list[int]) -> int:
        """Compare a draft with the tokens that came; returns how many of a probe's were right."""
        reached = {ROOT: 0}  # node -> its depth, for those that were right
        tokens, num, probed = draft.tokens, len(emitted), 0
        last, sides = None, side_branches(draft)
        for node, parent in enumerate(draft.parents):
            above = reached.get(parent)
            if above is None or above >= num:
                continue
            hit = tokens[node] == emitted[above]
            source = draft.sources[node]
            if source != last:
                last, record, own = source, self.records[source], stats.own[source]
            record.count(own, draft.probs[node], above, hit, not sides[node])
            if hit:
                reached[node] = above + 1
                probed += source == stats.probing
        return probed

    def stats(self) -> dict[str, Any]:
        return {name: record.stats() for name, record in self.records.items()}
