"""How often each drafter's tokens are accepted: over all requests, by kind of prompt, and within one request.

Calibrates a drafter's own probabilities by the outcomes of similar nodes before, and learns from every node whose
outcome could be seen, verified or not. Estimates come with a lower bound, because a mean of few outcomes is as often
too high as too low, and only drafting that does not pay costs anything. Knows no cost, no model and no drafter's
workings.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

from forerun.core import ROOT, Draft
from forerun.decode.control.gain import Gain, Gains
from forerun.decode.control.lengths import AnswerLengths
from forerun.decode.control.start import Unread

PRIOR_OBSERVATIONS = 4.0  # observations that a drafter's own probability counts for
DECAY_PER_OBSERVATION = 0.998  # of the statistics of all requests
REQUEST_DECAY = 0.95  # per observation, of one request's own statistics
STATED_DECAY = 0.5  # per draft, of the drafter's own probabilities: those of about two drafts count
REQUEST_PRIOR_OBSERVATIONS = 4.0  # hits and misses as of other requests that a request starts with
MIN_ODDS_RATIO, MAX_ODDS_RATIO = 1.0 / 30.0, 30.0  # of one request to all
TRACKED_DEPTHS = 8  # acceptance is kept by depth up to here; deeper nodes count as the last
# Requests of one kind differ by about 0.1 in acceptance, so what others accepted counts for no more outcomes than have
# that standard error: p (1 - p) / 0.1^2; nor for more than a request's own, 1 / (1 - REQUEST_DECAY)
MAX_KIND_OBSERVATIONS = 20.0
# Degrees of freedom of the t distribution by which requests of a kind differ: its tails are heavy, so a request that is
# unlike the others is soon believed more than they are. A file whose acceptance is wrong is found out within a request
KIND_FREEDOM = 3.0
# Of a drafter's file, that count as outcomes here: as those of ten requests, so that a file that is wrong for the texts
# that come is outvoted by as many (simulated, three of ten drafted tokens right: the lowest category of 30 answers at
# 0.85 of plain on two cores, 0.82 if all count; no difference where the file is right)
MEASURED_OUTCOMES = 10.0 * MAX_KIND_OBSERVATIONS
# The same of what a draft server says of its model, which is no file whose makers are known
STATED_OUTCOMES = 0.5 * MEASURED_OUTCOMES
DOUBT = 1.0  # standard errors that a lower bound is below the mean: right five times of six, and it narrows quickly

# Before anything is known. Of drafters that run a model: acceptance of a node once its parent is, by kind of prompt.
# Models of one family were measured at 0.95 (code), 0.9 (maths) and 0.6 to 0.8 (chat) for 0.5B and 1.5B; drafters of
# several tokens in one forward at about 0.1 less. Each is a little lower here: doubt is on the side of plain decoding.
PAID_PRIOR = {"code": 0.9, "numbers": 0.82}
PAID_PRIOR_ELSEWHERE = 0.64
BLOCK_PRIOR_LOSS = 0.1
PAID_PRIOR_OBSERVATIONS = 14.0
SHAPE_OBSERVATIONS = 32.0  # of a depth, before acceptance there is taken to differ from that of all depths
# Of drafters that run none: accepted tokens of a run beyond those of the drafters before it, and runs that this counts
# for. The lower bound is 0.15 tokens; one that takes a twentieth of a step is run until about 13 runs gave nothing.
FREE_PRIOR_TOKENS, FREE_PRIOR_RUNS = 0.5, 6.0
# The same of a model elsewhere, less what verifying them takes
ELSEWHERE_PRIOR_TOKENS, ELSEWHERE_PRIOR_REST = {"code": 0.8, "numbers": 0.5}, 0.3
ELSEWHERE = "elsewhere "  # before the model's name: the record of all servers of it
RECENT_DECAY = 0.9  # per step, of what free drafts gave a request of late
NOT_FREE_STEPS = 4.0  # without a free draft, that are taken to have been before: one long copy shows little

_EDGES = (0, 2, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99, 100)  # percent: fine where probabilities are near one
_BIN = [sum(percent >= edge for edge in _EDGES) - 1 for percent in range(101)]


def _cells(num: int) -> list[list[float]]:
    """`num` pairs of hits and tries."""
    return [[0.0, 0.0] for _ in range(num)]


def _add(count: list[float], hit: bool, decay: float) -> None:
    count[0], count[1] = count[0] * decay + hit, count[1] * decay + 1.0


def shifted(prob: float, factor: float) -> float:
    """A probability whose odds are `factor` times as high."""
    return prob * factor / (1.0 - prob + prob * factor)


@dataclass(slots=True)
class KindRecord:
    """One drafter's outcomes for one kind of prompt: hits and tries by depth; tokens that its runs had right."""

    depths: list[list[float]] = field(default_factory=lambda: _cells(TRACKED_DEPTHS))
    total: list[float] = field(default_factory=lambda: [0.0, 0.0])
    runs: list[float] = field(default_factory=lambda: [0.0, 0.0])  # tokens, runs


@dataclass(slots=True)
class DrafterRecord:
    """The outcomes of one drafter's nodes, over all requests."""

    # By the drafter's probability, and first tokens apart: they show whether a lookup found the right place, and once
    # it has, the tokens after it hardly fail.
    first: list[list[float]] = field(default_factory=lambda: _cells(len(_EDGES)))
    later: list[list[float]] = field(default_factory=lambda: _cells(len(_EDGES)))
    kinds: defaultdict[str, KindRecord] = field(default_factory=lambda: defaultdict(KindRecord))
    observations: int = 0
    run_s: float = 0.0  # of free drafters: mean seconds for one sequence,
    read_s: float = 0.0  # and of its first run for one, which reads the prompt, seconds per token of it

    def add_measured(self, outcomes: Mapping[str, list[list[float]]], most: float = MEASURED_OUTCOMES) -> None:
        """Outcomes that the drafter's own file has: accepted and tried by depth, for kinds that nothing is known of;
        `most` of them count."""
        for kind, found in outcomes.items():
            if kind not in self.kinds:
                depths = [*_pairs(found, len(found)), *_cells(TRACKED_DEPTHS)][:TRACKED_DEPTHS]
                share = min(1.0, most / max(1.0, sum(tries for _, tries in depths)))
                depths = [[share * hits, share * tries] for hits, tries in depths]
                self.kinds[kind] = KindRecord(depths, [sum(hits) for hits in zip(*depths, strict=True)])

    def prob(self, raw: float, first: bool, factor: float) -> float:
        """Acceptance of nodes with the drafter's probability `raw`; a request's odds are `factor` times the usual."""
        hits, tries = (self.first if first else self.later)[_BIN[int(raw * 100.0)]]
        hits += PRIOR_OBSERVATIONS * raw
        return hits * factor / (tries + PRIOR_OBSERVATIONS - hits + hits * factor)

    def raw_path_probs(self, min_path_probs: list[float], factor: float) -> list[float]:
        """By depth: the least probability of a path by the drafter itself whose acceptance is as large as these, where
        all of its tokens are equally probable."""
        levels = [percent / 100.0 for percent in range(0, 101, 4)]
        first, later = ([self.prob(raw, top, factor) for raw in levels] for top in (True, False))
        found = []
        for depth, least in enumerate(min_path_probs, 1):
            paths = [a * b ** (depth - 1) for a, b in zip(first, later, strict=True)]
            raw = next((raw for raw, path in zip(levels, paths, strict=True) if path >= least), 2.0)
            found.append(raw**depth if raw <= 1.0 else raw)
        return found

    def by_depth(
        self,
        kind: str,
        own: RequestRecord,
        deepest: int,
        doubt: float,
        block: bool = False,
        known_outcomes: float = MAX_KIND_OBSERVATIONS,
    ) -> list[float]:
        """Acceptance at depths 1 to `deepest` in a request, each given the one before, less `doubt` standard errors.

        Three sources count by their outcomes: other requests, the drafter's own calibrated probabilities in this one
        (known before any outcome is), and the outcomes of this one. Other requests also give the shape by depth.
        `block`: it drafts several tokens in one forward. `known_outcomes`: of other requests, that count against doubt
        at most.
        """
        weight, known = PAID_PRIOR_OBSERVATIONS, self.kinds[kind]
        hits, tries = max(0.0, known.total[0] - own.levels[0]), max(0.0, known.total[1] - own.levels[1])
        prior = PAID_PRIOR.get(kind, PAID_PRIOR_ELSEWHERE) - (BLOCK_PRIOR_LOSS if block else 0.0)
        usual = (hits + weight * prior) / (tries + weight)
        outcomes = min(weight + tries, MAX_KIND_OBSERVATIONS)
        outcomes *= own.likeness(usual, outcomes)
        mean = usual * outcomes + own.stated + own.levels[0]
        here = own.stated_levels + own.levels[1]
        mean /= outcomes + here
        least = doubt * sqrt(mean * (1.0 - mean) / (here + min(weight + tries, known_outcomes)))
        found = []
        usual = (known.total[0] + weight * prior) / (known.total[1] + weight)
        for hits, tries in known.depths[:deepest]:
            here = (hits + SHAPE_OBSERVATIONS * usual) / (tries + SHAPE_OBSERVATIONS)
            factor = here * (1.0 - usual) / max(1e-9, (1.0 - here) * usual)
            found.append(min(1.0, max(0.0, shifted(mean, factor) - least)))
        return found + found[-1:] * (deepest - TRACKED_DEPTHS)

    def run_tokens(self, kind: str, own: RequestRecord, doubt: float = 1.0, model: bool = False) -> float:
        """Tokens that a run of a free drafter is expected to gain, less `doubt` standard errors; `model`: one that runs
        elsewhere drafts, so that requests of a kind are alike."""
        tokens, runs = self.kinds[kind].runs
        prior = ELSEWHERE_PRIOR_TOKENS.get(kind, ELSEWHERE_PRIOR_REST) if model else FREE_PRIOR_TOKENS
        usual, weight = (tokens + prior * FREE_PRIOR_RUNS) / (runs + FREE_PRIOR_RUNS), FREE_PRIOR_RUNS
        if model:
            weight = min(MAX_KIND_OBSERVATIONS, weight + runs)
        else:
            # A request repeats text or does not. What others of its kind gained shows that it may, not how much: long
            # matches of one would else keep a drafter running for all.
            usual = min(usual, 1.25 * FREE_PRIOR_TOKENS)
        mean = (usual * weight + own.run_tokens) / (weight + own.runs)
        deviation = sqrt(max(0.0, mean) * (1.0 + mean) / (weight + own.runs))  # of geometric lengths
        return max(0.0, mean - doubt * deviation)

    def has_paid(self, kind: str) -> bool:
        """Whether outcomes for this kind, and not only the prior, are good enough to explore from the first token."""
        known = self.kinds.get(kind)
        return known is not None and (
            known.runs[0] > 2.0 * FREE_PRIOR_TOKENS or known.total[0] > max(PAID_PRIOR_OBSERVATIONS, known.total[1] / 2)
        )

    def count(self, own: RequestRecord, raw: float, above: int, hit: bool) -> None:
        """Add the outcome of a node with `above` nodes over it."""
        cell = (self.later if above else self.first)[_BIN[int(raw * 100.0)]]
        own.count((cell[0] + PRIOR_OBSERVATIONS * raw) / (cell[1] + PRIOR_OBSERVATIONS), hit)
        self.observations += 1
        _add(cell, hit, DECAY_PER_OBSERVATION)

    def count_level(self, kind: KindRecord, own: RequestRecord, above: int, hit: bool) -> None:
        """Add whether one of the siblings below so many nodes was right: how far a path goes."""
        for count in (kind.depths[above if above < TRACKED_DEPTHS else -1], kind.total):
            _add(count, hit, DECAY_PER_OBSERVATION)
        _add(own.levels, hit, REQUEST_DECAY)

    def count_run(self, stats: RequestStats, own: RequestRecord, tokens: float, seconds: float) -> None:
        """Of a free drafter for one sequence: tokens that it gained, and seconds."""
        if own.runs:
            self.run_s = _smoothed(self.run_s, seconds)
        else:
            self.read_s = _smoothed(self.read_s, seconds / (1 + stats.prompt_tokens))
        runs = self.kinds[stats.kind].runs
        runs[0], runs[1] = max(0.0, runs[0] * DECAY_PER_OBSERVATION + tokens), runs[1] * DECAY_PER_OBSERVATION + 1.0
        own.run_tokens, own.runs = own.run_tokens * REQUEST_DECAY + tokens, own.runs * REQUEST_DECAY + 1.0

    def stats(self) -> dict[str, Any]:
        bins = {}
        for edge, first, later in zip(_EDGES, self.first, self.later, strict=True):
            hits, tries = first[0] + later[0], first[1] + later[1]
            if tries:
                bins[f"{edge / 100:g}"] = {"tries": round(tries, 1), "accepted": round(hits / tries, 4)}
        kinds = {
            name: {
                "by_depth": [round(hits / tries, 4) for hits, tries in kind.depths if tries],
                "tokens_a_run": round(kind.runs[0] / kind.runs[1], 4) if kind.runs[1] else None,
            }
            for name, kind in self.kinds.items()
        }
        return {"by_prob": bins, "kinds": kinds, "run_s": self.run_s}

    def record(self) -> dict[str, Any]:
        """All there is to know, as JSON can hold it."""
        kinds = {name: [kind.depths, kind.total, kind.runs] for name, kind in self.kinds.items()}
        return {
            "first": self.first,
            "later": self.later,
            "kinds": kinds,
            "s": [self.run_s, self.read_s],
        }

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> DrafterRecord:
        made = cls(_pairs(record["first"], len(_EDGES)), _pairs(record["later"], len(_EDGES)))
        for name, (depths, total, runs) in record["kinds"].items():
            made.kinds[str(name)] = KindRecord(_pairs(depths, TRACKED_DEPTHS), *_pairs([total, runs], 2))
        ((made.run_s, made.read_s),) = _pairs([record["s"]], 1)
        return made


def _smoothed(mean: float, seconds: float) -> float:
    """The operating system's pauses are cut."""
    return mean + 0.05 * (min(seconds, 8.0 * mean) - mean) if mean else seconds


def _pairs(found: Any, count: int) -> list[list[float]]:
    pairs = [[float(a), float(b)] for a, b in found]
    if len(pairs) != count or any(not 0.0 <= value < 1e9 for pair in pairs for value in pair):
        raise ValueError("these are no counts of outcomes")
    return pairs


@dataclass(slots=True)
class RequestRecord:
    """The outcomes of one drafter's nodes within one request, against what was expected of them."""

    hits: float = 0.0
    misses: float = 0.0
    expected: float = 0.0  # hits
    factor: float = 1.0  # odds of this request over the odds of all
    levels: list[float] = field(default_factory=lambda: [0.0, 0.0])  # depths at which some node was right, and tried
    stated: float = 0.0  # calibrated probabilities of a paid drafter's recent levels, summed,
    stated_levels: float = 0.0  # and their number
    runs: float = 0.0  # of a free drafter
    run_tokens: float = 0.0  # that these had right
    skip_until: int = 0  # of a paid drafter that did not pay: tokens of the answer before it is planned for again
    asked: int = 0  # of a drafter that drafts in one forward: depth that it was asked for in this step

    def likeness(self, usual: float, outcomes: float) -> float:
        """How far other requests' outcomes tell anything about this one, by its own against their mean."""
        hits, tries = self.levels
        if not tries:
            return 1.0
        deviation2 = (hits / tries - usual) ** 2 / (usual * (1.0 - usual) * (1.0 / outcomes + 1.0 / tries))
        return min(1.0, (KIND_FREEDOM + 1.0) / (KIND_FREEDOM + deviation2))

    def state_reach(self, reach: list[float]) -> None:
        """Of a draft in one forward: the probability by depth that the nodes to verify hold the right token."""
        own = [min(1.0, prob) for prob in reach[: self.asked]]  # free drafts beside it may go deeper
        self.stated = self.stated * STATED_DECAY + sum(own)
        self.stated_levels = self.stated_levels * STATED_DECAY + 1.0 + sum(own[: self.asked - 1])

    def state(self, draft: Draft, probs: list[float]) -> None:
        """Calibrated probabilities of a draft, before its outcome is known: that some child of a node is right, along
        the most probable path, each by the probability that its outcome will be seen."""
        best: dict[int, int] = {}  # the most probable child of each node: candidates that were only scored come first
        some: dict[int, float] = {}  # that one of its children is right
        for node, parent in enumerate(draft.parents):
            some[parent] = min(1.0, some.get(parent, 0.0) + probs[node])
            if parent not in best or probs[node] > probs[best[parent]]:
                best[parent] = node
        stated, levels, path, node = 0.0, 0.0, 1.0, ROOT
        while node in best:
            stated, levels, path = stated + path * some[node], levels + path, path * some[node]
            node = best[node]
        self.stated = self.stated * STATED_DECAY + stated
        self.stated_levels = self.stated_levels * STATED_DECAY + levels

    def count(self, prob: float, hit: bool) -> None:
        self.hits = self.hits * REQUEST_DECAY + hit
        self.misses = self.misses * REQUEST_DECAY + (not hit)
        self.expected = self.expected * REQUEST_DECAY + prob
        hits, misses, expected = self.hits, self.misses, self.expected
        odds = (hits + REQUEST_PRIOR_OBSERVATIONS) / (misses + REQUEST_PRIOR_OBSERVATIONS)
        usual = (expected + REQUEST_PRIOR_OBSERVATIONS) / (hits + misses - expected + REQUEST_PRIOR_OBSERVATIONS)
        self.factor = min(MAX_ODDS_RATIO, max(MIN_ODDS_RATIO, odds / usual))


@dataclass(slots=True, eq=False)
class RequestStats:
    """What the controller knows of one sequence."""

    kind: str = "text"
    prompt_tokens: int = 0
    max_tokens: int = 1 << 20
    named: bool = False  # the request names its drafters: they run without doubt and without a budget
    own: defaultdict[str, RequestRecord] = field(default_factory=lambda: defaultdict(RequestRecord))  # by drafter
    tokens: int = 0  # of the answer so far
    elapsed_s: float = 0.0  # of its plain steps' length, for the budget of exploring
    explored_free_s: float = 0.0  # lost at most by exploring drafters that run no model,
    explored_paid_s: float = 0.0  # and those that do
    recent_tokens: float = 0.0  # of the last few steps without a paid drafter,
    recent_steps: float = 0.0  # and their number
    gain: Gain = field(default_factory=Gain)  # of its steps with free drafts
    unread: Unread = field(default_factory=Unread)
    paid_steps: int = 0  # with a paid drafter whose costs were known,
    paid_tokens: float = 0.0  # tokens of these,
    paid_expected: float = 0.0  # and those that were planned for the time that they took
    plain_s: float = 0.0  # what its tokens would have taken without drafting
    taken_s: float = 0.0  # what they took

    def count_plain(self, wall_s: float, taken_s: float, plain_s: float) -> None:
        """Of a step that drafted nothing."""
        self.tokens += 1
        self.plain_s += plain_s
        self.taken_s += taken_s
        self.elapsed_s += min(wall_s, plain_s)
        self.count_unpaid(1)

    def count_unpaid(self, tokens: int) -> None:
        """Of a step without a paid drafter."""
        self.recent_tokens = self.recent_tokens * RECENT_DECAY + tokens
        self.recent_steps = self.recent_steps * RECENT_DECAY + 1

    @property
    def share_not_free(self) -> float:
        """Of its recent tokens, those that no free draft gave: a paid drafter can only save steps for these."""
        return (self.recent_steps + NOT_FREE_STEPS) / (self.recent_tokens + NOT_FREE_STEPS)

    def count_paid(self, tokens: int, expected: float) -> None:
        """Of a step with a paid drafter."""
        self.paid_steps, self.paid_tokens = self.paid_steps + 1, self.paid_tokens + tokens
        self.paid_expected += expected


class Acceptance(AnswerLengths):
    """The records of all drafters, and how long answers are, by kind of prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.records: defaultdict[str, DrafterRecord] = defaultdict(DrafterRecord)  # by drafter
        self.gains, self.paid_gains = Gains(), Gains()  # of steps with free drafts, and with a paid drafter

    def paid_ratio(self, stats: list[RequestStats]) -> float:
        """Tokens a second that steps with a paid drafter gave, over what was planned, at most 1: for one sequence,
        whose request does not name it."""
        alone = len(stats) == 1 and not stats[0].named
        return min(1.0, self.paid_gains.usual(stats[0].kind)) if alone else 1.0

    def record_end(self, stats: RequestStats) -> None:
        """An answer ended."""
        self.record_length(stats)
        if stats.paid_steps:
            self.paid_gains.add(stats.kind, stats.paid_tokens, stats.paid_expected, stats.paid_steps)

    def calibrate(self, stats: RequestStats, draft: Draft, doubt: float = 0.0) -> list[float]:
        """The probability of each node to be accepted once its parent is, by the outcome of similar nodes before, less
        `doubt` standard errors."""
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
            hits, tries = hits + PRIOR_OBSERVATIONS * raw, tries + PRIOR_OBSERVATIONS
            hits -= doubt * sqrt(hits * (1.0 - hits / tries)) if doubt else 0.0
            probs.append(max(0.0, hits * factor / (tries - hits + hits * factor)))
        return probs

    def record_draft(self, stats: RequestStats, draft: Draft, emitted: list[int], levels_too: bool = True) -> None:
        """Compare one drafter's draft with the tokens that came; `levels_too`: whether depths count by it as well."""
        reached = {ROOT: 0}  # node -> its depth, for those that were right
        levels: dict[int, bool] = {}  # nodes that were right and have children -> whether one of these was
        tokens, num, last = draft.tokens, len(emitted), None
        for node, parent in enumerate(draft.parents):
            above = reached.get(parent)
            if above is None or above >= num:
                continue
            hit = tokens[node] == emitted[above]
            source = draft.sources[node]
            if source != last:
                last, record, own = source, self.records[source], stats.own[source]
            record.count(own, draft.probs[node], above, hit)
            levels[parent] = levels.get(parent, False) or hit
            if hit:
                reached[node] = above + 1
        deepest = min(num, max(draft.depths(), default=0)) if levels_too else 0
        for node, depth in reached.items():
            if depth < deepest:  # where others of its nodes go on, a node without children is the end of a path
                record.count_level(record.kinds[stats.kind], own, depth, levels.get(node, False))

    def record_path(self, stats: RequestStats, drafter: str, accepted: int, tokens: int) -> None:
        """Of a draft in one forward: how many of the step's tokens it had right, in a row. Its tree is as deep as it is
        sure, and only a part of it is verified, so a path that ends where the verified nodes do is a miss like any
        other: by the nodes that were proposed, plans promised half as much again as came (docs/log.md)."""
        record, own = self.records[drafter], stats.own[drafter]
        for depth in range(min(accepted + 1, own.asked, tokens)):
            record.count_level(record.kinds[stats.kind], own, depth, depth < accepted)
        own.asked = 0

    def stats(self) -> dict[str, Any]:
        return {name: record.stats() for name, record in self.records.items() if not name.startswith(ELSEWHERE)}


class StoppingRule:
    """Follows one chain while it is drafted, and compares its calibrated probability with what another round needs."""

    __slots__ = ("_depth", "_factor", "_least", "_path", "_raw", "_record", "_rounds")

    def __init__(self, record: DrafterRecord, own: RequestRecord, least: list[float], rounds: int) -> None:
        self._record, self._factor, self._least, self._rounds = record, own.factor, least, rounds
        self._raw, self._path, self._depth = 1.0, 1.0, 0

    def __call__(self, prob: float, depth: int) -> bool:
        """Whether to run another round, given the drafter's own probability of the path down to this depth."""
        more = depth - self._depth
        if more > 0:  # one token, or several where it began with another drafter's; else a side branch
            raw = (min(1.0, prob / self._raw) if self._raw > 0.0 else 0.0) ** (1.0 / more)
            for above in range(self._depth, depth):
                self._path *= self._record.prob(raw, above == 0, self._factor)
            self._raw, self._depth = prob, depth
        if depth >= self._rounds or depth > len(self._least):
            return False
        path = self._path if depth == self._depth else min(1.0, prob * self._path / max(self._raw, 1e-9))
        return depth == 0 or path >= self._least[depth - 1]
