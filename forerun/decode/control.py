"""How much to guess: which drafted tokens are worth verifying, and whether to ask a drafter that runs a model.

Everything follows from two measured things: what forwards cost (`CostCurve`) and how often guesses came true. The
quantity made large is always tokens per second of the whole batch. Knows no drafter's workings, no model and no
scheduler; it decides about time only, never about what is answered.

Time spent on drafting counts in the rate by which nodes are chosen, though it is already spent: a step stands for its
neighbours, which will spend the same. Left out, every further node would have to beat a rate that is never reached,
and too few would be verified.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from forerun.core import ROOT, Draft
from forerun.decode.cost import DEEPEST, LOOK_AHEAD, CostCurve, Plan

PRIOR_WEIGHT = 4.0  # observations that a drafter's own word is worth
PAID_PRIOR = 0.8  # acceptance of a drafter that runs a model, before anything is known
PAID_WEIGHT = 12.0  # observations that this is worth: a few misses must not end what a few more would prove right
KEEP = 0.998  # forgetting of the statistics of all requests, per observation
REQUEST_KEEP = 0.95  # forgetting of one request's own
REQUEST_WEIGHT = 4.0  # observations of each kind that speak for this request being like the others
STRONGEST = 30.0  # odds ratio that a request's record may claim
DEPTHS = 8  # acceptance is kept for this many depths; deeper ones count as the last
BALANCE_KEEP = 0.995  # forgetting, per step, of how a sequence fared
MOST_SPENT = 4.0  # plain steps that drafting can take; more was a start, which does not come again
RECENT_KEEP = 0.9  # forgetting, per step, of the rate that a round has to beat
PROBE_SHARE = 0.015  # of all time, at most lost on trying again what did not pay
PROBE_SAVED = 4.0  # probes that may be saved up for
BEHIND = 0.01  # share by which a batch may slow down one of its sequences for the good of the others
GRACE = 1.0  # steps that it may lose beyond that
LEFT_OUT = 4  # steps after which a sequence takes part in a round that is run for others
FREE_SHARE = 0.003  # of a step: drafters that cost less are always asked

_EDGES = (0, 2, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99, 100)  # percent: fine where chances are near one
_BIN = [sum(percent >= edge for edge in _EDGES) - 1 for percent in range(101)]


@dataclass
class _Record:
    """What became of one drafter's guesses, over all requests."""

    # Hits and tries by chance. First tokens apart: whether a lookup found the right place shows there, and once it has,
    # the tokens after it hardly fail.
    first: list[list[float]] = field(default_factory=lambda: [[0.0, 0.0] for _ in _EDGES])
    later: list[list[float]] = field(default_factory=lambda: [[0.0, 0.0] for _ in _EDGES])
    depths: list[list[float]] = field(default_factory=lambda: [[0.0, 0.0] for _ in range(DEPTHS)])
    total: list[float] = field(default_factory=lambda: [0.0, 0.0])
    known: list[float] = field(default_factory=list)  # acceptance by depth, as of `known_at` observations
    known_at: int = -1
    seen: int = 0
    asked_s: float = 0.0  # of free drafters: mean seconds of one asking
    gained: float = 0.0  # of free drafters: mean tokens that came true of one asking
    waited: int = 0  # steps since a free drafter was asked

    def chance(self, raw: float, first: bool) -> float:
        """Acceptance of nodes of which the drafter thinks this."""
        hits, tries = (self.first if first else self.later)[_BIN[int(raw * 100.0)]]
        return (hits + PRIOR_WEIGHT * raw) / (tries + PRIOR_WEIGHT)

    def by_depth(self, factor: float, deepest: int = DEEPEST) -> list[float]:
        """Acceptance at depths 1, 2, ... given the one before, before anything is drafted."""
        if self.seen != self.known_at:
            hits, tries = self.total
            mean = PAID_WEIGHT * (hits + PAID_WEIGHT * PAID_PRIOR) / (tries + PAID_WEIGHT)
            known = [(hits + mean) / (tries + PAID_WEIGHT) for hits, tries in self.depths]
            self.known, self.known_at = known + known[-1:] * (DEEPEST - DEPTHS), self.seen
        return [chance * factor / (1.0 - chance + chance * factor) for chance in self.known[:deepest]]


@dataclass
class _Own:
    """One drafter's record within one request, against what was expected of it."""

    hits: float = 0.0
    misses: float = 0.0
    expected: float = 0.0  # hits
    factor: float = 1.0  # odds of this request over the odds of all

    def count(self, chance: float, hit: bool) -> None:
        self.hits = self.hits * REQUEST_KEEP + hit
        self.misses = self.misses * REQUEST_KEEP + (not hit)
        self.expected = self.expected * REQUEST_KEEP + chance
        w = REQUEST_WEIGHT
        odds = (self.hits + w) / (self.misses + w)
        usual = (self.expected + w) / (self.hits + self.misses - self.expected + w)
        self.factor = min(STRONGEST, max(1.0 / STRONGEST, odds / usual))


@dataclass
class RequestStats:
    """What one sequence has shown so far."""

    own: dict[str, _Own] = field(default_factory=dict)
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

    def record(self, drafter: str) -> _Own:
        found = self.own.get(drafter)
        if found is None:
            found = self.own[drafter] = _Own()
        return found


def _shift(chance: float, factor: float) -> float:
    """Multiply odds."""
    return chance * factor / (1.0 - chance + chance * factor)


class Controller:
    """Shared by all sequences of an engine. `drafters`: seconds of one round of each drafter that runs a model."""

    def __init__(self, target: CostCurve, drafters: dict[str, CostCurve]) -> None:
        self.target, self.drafters = target, drafters
        self._records: dict[str, _Record] = {}
        self._credit: dict[str, float] = {}  # seconds that probing may lose, by drafter
        self._recent = (0.0, 0.0)  # expected tokens and seconds of recent steps with a paid drafter
        self._paid = False  # whether this step has one

    def open(self) -> RequestStats:
        return RequestStats()

    # -- how good guesses are ------------------------------------------------------------------------------------

    def calibrate(self, stats: RequestStats, draft: Draft) -> list[float]:
        """The chance of each node to be accepted once its parent is, by what became of such nodes before."""
        chances: list[float] = []
        last = None
        record, factor = _NOTHING, 1.0
        for raw, parent, source in zip(draft.chances, draft.parents, draft.sources, strict=True):
            if source != last:
                last, record, factor = source, self._record(source), stats.record(source).factor
            # As `_Record.chance`; this runs for every node.
            hits, tries = (record.first if parent == ROOT else record.later)[_BIN[int(raw * 100.0)]]
            chance = (hits + PRIOR_WEIGHT * raw) / (tries + PRIOR_WEIGHT)
            chances.append(chance * factor / (1.0 - chance + chance * factor))
        return chances

    def learn(self, stats: RequestStats, draft: Draft, emitted: list[int]) -> None:
        """Compare a draft, as proposed and with nodes that were never verified, with the tokens that came.

        Once for every draft of a step.
        """
        came = {ROOT: 0}  # node -> its depth, for those that came true
        tokens, num = draft.tokens, len(emitted)
        for node, parent in enumerate(draft.parents):
            above = came.get(parent)
            if above is None or above >= num:
                continue
            hit = tokens[node] == emitted[above]
            if hit:
                came[node] = above + 1
            source = draft.sources[node]
            self._count(stats.record(source), self._record(source), draft.chances[node], above, hit)
            if hit and source == stats.probing:
                self._credit[source] += stats.refund

    def _count(self, own: _Own, record: _Record, raw: float, above: int, hit: bool) -> None:
        cell = (record.later if above else record.first)[_BIN[int(raw * 100.0)]]
        own.count((cell[0] + PRIOR_WEIGHT * raw) / (cell[1] + PRIOR_WEIGHT), hit)
        record.seen += 1
        for count in (cell, record.depths[above if above < DEPTHS else -1], record.total):
            count[0] = count[0] * KEEP + hit
            count[1] = count[1] * KEEP + 1.0

    def _record(self, drafter: str) -> _Record:
        found = self._records.get(drafter)
        if found is None:
            found = self._records[drafter] = _Record()
        return found

    # -- which nodes to verify -----------------------------------------------------------------------------------

    def select(
        self,
        stats: list[RequestStats],
        drafts: list[Draft],
        chances: list[list[float]],
        limits: list[int],
        context: int,
        spent_s: float = 0.0,
    ) -> list[list[int]]:
        """The nodes of each draft that are worth verifying: those that make the batch's tokens per second largest.

        `chances` are calibrated; `context` is the sequences' mean; `spent_s` is what drafting took in this step.
        """
        plain_s = self.target.seconds(len(stats), len(stats), context)
        spent_s = min(spent_s, MOST_SPENT * plain_s)
        chosen, gains, step_s = self._select(stats, drafts, chances, limits, context, spent_s)
        step_s += spent_s
        if self._paid:
            tokens, taken = self._recent
            self._recent = tokens * RECENT_KEEP + sum(gains), taken * RECENT_KEEP + step_s
            self._paid = False
        if len(stats) > 1:
            for s, gain in zip(stats, gains, strict=True):
                s.plain_s = s.plain_s * BALANCE_KEEP + gain * plain_s
                s.taken_s = s.taken_s * BALANCE_KEEP + step_s
                s.grace_s = GRACE * plain_s
        return chosen

    def _select(
        self,
        stats: list[RequestStats],
        drafts: list[Draft],
        chances: list[list[float]],
        limits: list[int],
        context: int,
        spent_s: float,
    ) -> tuple[list[list[int]], list[float], float]:
        """The chosen nodes, the tokens that each sequence can expect with them, and the target's seconds."""
        sequences = len(drafts)
        chosen: list[list[int]] = [[] for _ in drafts]
        gains = [1.0] * sequences
        nodes: list[tuple[float, int, int]] = []  # path's chance, sequence, node
        size = sequences
        for i, draft in enumerate(drafts):
            paths = _paths(draft, chances[i])
            if draft.proposals:  # dropping what was drawn because of what was drawn would bias the answer
                chosen[i] = list(range(len(draft)))
                size, gains[i] = size + len(draft), 1.0 + sum(paths)
            else:
                nodes.extend([(path, i, node) for node, path in enumerate(paths)])
        # Parents come first: their paths are no less likely, and equals keep their order.
        nodes.sort(key=_likelihood, reverse=True)
        plain_s = self.target.seconds(sequences, sequences, context)
        seconds = self.target.row(size, size + len(nodes), sequences, context)
        # Where drafting was paid for, `depth` has weighed already who may be slowed down.
        guard = sequences > 1 and spent_s < 0.05 * plain_s
        owed = [i for i, s in enumerate(stats) if s.owed] if guard else []
        tokens, best_s, best = sum(gains), seconds[0], 0
        best_rate = tokens / (best_s + spent_s)
        taken: list[tuple[float, int, int]] = []
        room = list(limits)
        for entry in nodes:
            path, i, _ = entry
            if room[i] <= 0:
                continue
            room[i] -= 1
            taken.append(entry)
            tokens += path
            gains[i] += path
            step_s = seconds[len(taken)]
            rate = tokens / (step_s + spent_s)
            if rate > best_rate and (not owed or step_s <= plain_s * min([gains[i] for i in owed])):
                best_rate, best_s, best = rate, step_s, len(taken)
        for path, i, _ in taken[best:]:
            gains[i] -= path
        for _, i, node in taken[:best]:
            chosen[i].append(node)
        for picked in chosen:
            picked.sort()
        return chosen, gains, best_s

    # -- whether to pay for drafting -----------------------------------------------------------------------------

    def depth(
        self,
        stats: list[RequestStats],
        drafts: list[Draft],
        chances: list[list[float]],
        drafter: str,
        limits: list[int],
        context: int,
        start_s: list[float] | None = None,
        remaining: list[int] | None = None,
    ) -> list[int]:
        """Most rounds that a paid drafter should draft for each sequence, if `worth` does not stop it; 0: do not ask.

        `drafts` and `chances` (calibrated) are what free drafters offer already. `start_s` is what the drafter needs
        to catch up with each sequence before its first round, `remaining` the tokens each is expected to go on for.
        """
        sequences = len(stats)
        for s in stats:
            s.probing = "" if s.probing == drafter else s.probing
        start_s = start_s or [0.0] * sequences
        remaining = remaining or [1 << 20] * sequences
        chosen, gains, step_s = self._select(stats, drafts, chances, limits, context, 0.0)
        free = [_by_depth(draft, chance, nodes) for draft, chance, nodes in zip(drafts, chances, chosen, strict=True)]
        size = sequences + sum(map(len, chosen))
        plan = Plan(self.target, self.drafters[drafter], sequences, context, size, gains, step_s)
        saved_s = self._credit.get(drafter, PROBE_SAVED * plan.round_s(1))
        self._credit[drafter] = saved_s + PROBE_SHARE * step_s
        if not plan.can_pay():
            return [0] * sequences
        record = self._record(drafter)
        deepest = DEEPEST if sequences <= 8 else 8 if sequences <= 32 else 4
        ahead = [record.by_depth(s.record(drafter).factor, deepest) for s in stats]
        asked = list(range(sequences))
        while asked:
            depths, rate, slower = plan.best([(i, ahead[i], free[i], limits[i]) for i in asked])
            saved = (1.0 / plan.rate - 1.0 / rate) * sequences / max(1, len(depths))  # per token of such a sequence
            stay = [i for i in asked if i in depths and remaining[i] * saved >= start_s[i]]
            if len(stay) == len(depths):
                break
            asked = stay
        else:
            depths = {}
        if not depths:
            owed = [i for i, s in enumerate(stats) if s.owed]  # nothing may be tried on others at their expense
            return self._probe(stats, drafter, plan, limits, start_s, owed or list(range(sequences)))
        late = self._late(stats, record, drafter, depths, gains, slower) if sequences > 1 else []
        if late:
            return self._probe(stats, drafter, plan, limits, start_s, late)
        self._paid = True
        # How deep it pays to go depends on how sure the drafter is of this text, and `worth` stops it. In a batch all
        # share a round's cost, and one that went on alone would pay it all: there the plan is the limit.
        sure = DEEPEST if sequences == 1 else 0
        rounds = [min(limits[i], max(depths[i], sure)) if i in depths else 0 for i in range(sequences)]
        for i, s in enumerate(stats):
            # In a round that is run for others one token more is nearly free, and without it nothing would be learnt.
            s.left_out = s.left_out + 1 if rounds[i] == 0 and start_s[i] == 0.0 else 0
            if s.left_out >= LEFT_OUT and limits[i] > 0:
                rounds[i], s.left_out = 1, 0
        return rounds

    def _late(
        self,
        stats: list[RequestStats],
        record: _Record,
        drafter: str,
        depths: dict[int, int],
        gains: list[float],
        slower: float,
    ) -> list[int]:
        """Sequences that fell behind plain decoding and would go on to, in steps that take so many times as long.

        Their own record counts by half: it is short, and nothing is learnt while drafting is off.
        """
        late = []
        deepest = max(depths.values())
        for i, s in enumerate(stats):
            if not s.owed:
                continue
            tokens, path = gains[i], 1.0
            for chance in record.by_depth(math.sqrt(s.record(drafter).factor), deepest) if i in depths else ():
                path *= chance
                tokens += path
            if tokens < slower:
                late.append(i)
        return late

    def _probe(
        self,
        stats: list[RequestStats],
        drafter: str,
        plan: Plan,
        limits: list[int],
        start_s: list[float],
        about: list[int],
    ) -> list[int]:
        """One round where so much has been saved up that the loss does not show.

        For all sequences that the drafter has caught up with as far: a round for all costs little more than for one,
        and it takes them all to find that a batch is worth drafting for.
        """
        rounds = [0] * len(stats)
        least = min(start_s[i] for i in about)
        probed = [i for i in about if start_s[i] <= least and limits[i] > 0]
        if least > 0.0:
            probed = probed[:1]
        if not probed:
            return rounds
        extra = plan.seconds(plan.size + len(probed)) - plan.seconds(plan.size)
        cost = plan.round_s(len(probed)) + extra + least
        credit = min(self._credit[drafter], PROBE_SAVED * cost)
        self._credit[drafter] = credit
        if credit < cost * (1.0 if any(stats[i].trials > 0 for i in probed) else 2.0):
            return rounds
        self._credit[drafter] -= cost
        for i in probed:
            stats[i].trials -= 1
            stats[i].probing, stats[i].refund = drafter, 1.0 / plan.rate
            rounds[i] = 1
        return rounds

    def worth(
        self, stats: RequestStats, drafter: str, sequences: int = 1, context: int = 0, nodes: int = 0
    ) -> Callable[[float, int], bool]:
        """For `Ask.worth`: is one more round worth it, given the drafter's own chance of the path so far?

        `sequences` are drafted for side by side, `nodes` are verified for them in any case. Made anew for every step.
        """
        if stats.probing == drafter:
            return lambda chance, depth: depth < 1
        record, factor = self._record(drafter), stats.record(drafter).factor
        tokens, taken = self._recent
        target, round_s = self.target.seconds, self.drafters[drafter].seconds(sequences, sequences, context)

        def verify(depth: int) -> float:
            return target(sequences * (1 + depth) + nodes, sequences, context) / sequences

        recent = tokens / taken if taken else 0.0
        return _Worth(record, factor, verify, round_s / sequences, record.by_depth(factor), recent)

    # -- whether to ask a free drafter ---------------------------------------------------------------------------

    def asks(self, drafter: str) -> bool:
        """Whether a free drafter's own time is worth spending on this step."""
        record = self._record(drafter)
        step_s = self.target.seconds(1)
        if record.asked_s <= max(FREE_SHARE, record.gained) * step_s:
            return True
        record.waited += 1
        return record.waited * FREE_SHARE * step_s >= record.asked_s

    def asked(self, drafter: str, seconds: float, gained: float) -> None:
        """What asking a free drafter took for one sequence, and how many of its tokens came true."""
        record = self._record(drafter)
        record.waited = 0
        seconds = min(seconds, 4.0 * record.asked_s) if record.asked_s else seconds
        record.asked_s += 0.05 * (seconds - record.asked_s) if record.asked_s else seconds
        record.gained += 0.02 * (gained - record.gained)

    # -- what can be told ----------------------------------------------------------------------------------------

    def bound(self, survival: list[float], drafter: str | None = None, context: int = 0) -> float:
        """The speedup that costs allow one sequence, where `survival[j]` is the share of steps with more than j
        drafted tokens accepted: at the best fixed depth."""
        one = self.target.seconds(1, 1, context)
        round_s = self.drafters[drafter].seconds(1, 1, context) if drafter else 0.0
        best, tokens = 1.0, 1.0
        for k, share in enumerate(survival, 1):
            tokens += share
            best = max(best, tokens * one / (self.target.seconds(1 + k, 1, context) + k * round_s))
        return best

    def report(self) -> dict[str, Any]:
        """Cost curves in seconds and acceptance by drafter."""
        accepted = {}
        for name, record in self._records.items():
            bins = {
                f"{edge / 100:g}": {"tries": round(a[1] + b[1], 1), "accepted": round((a[0] + b[0]) / (a[1] + b[1]), 4)}
                for edge, a, b in zip(_EDGES, record.first, record.later, strict=True)
                if a[1] + b[1]
            }
            depths = [round(hits / tries, 4) for hits, tries in record.depths if tries]
            accepted[name] = {"by_chance": bins, "by_depth": depths, "asked_s": record.asked_s}
        curves = {name: curve.points() for name, curve in self.drafters.items()}
        return {"target_s": self.target.points(), "round_s": curves, "drafters": accepted}


class _Worth:
    """Follows one chain while it is drafted.

    A round has to beat the rate that drafting for this text gives: by what recent steps gave and by what this one
    promises so far, as one alone is too late when the text changes and the other calls every doubtful step a success.
    """

    def __init__(
        self,
        record: _Record,
        factor: float,
        verify: Callable[[int], float],
        round_s: float,
        ahead: list[float],
        recent: float,
    ) -> None:
        self._record, self._factor, self._ahead, self._recent = record, factor, ahead, recent
        self._after, self._verify = verify, [verify(0)]  # seconds of the target by depth, this sequence's share
        self._round_s, self._rounds = round_s, 0
        self._raw, self._path, self._tokens, self._depth = 1.0, 1.0, 1.0, 0

    def __call__(self, chance: float, depth: int) -> bool:
        self._follow(chance, depth)
        verify, last = self._verify, min(depth + LOOK_AHEAD, len(self._ahead))
        while len(verify) <= max(last, depth):
            verify.append(self._after(len(verify)))
        rate = self._tokens / (verify[self._depth] + self._rounds * self._round_s)
        if self._recent:
            rate = math.sqrt(rate * self._recent)
        path = self._path if depth == self._depth else min(1.0, chance * self._path / max(self._raw, 1e-9))
        gain = 0.0
        # Not only the next round: costs have steps, and the first round into one can look worse than the second.
        for k in range(depth + 1, last + 1):
            path *= self._ahead[k - 1]
            gain += path
            if gain > rate * (verify[k] - verify[depth] + (k - depth) * self._round_s):
                return True
        return False

    def _follow(self, chance: float, depth: int) -> None:
        """Take in a round: one token more, several where it began with another drafter's, or a side branch."""
        self._rounds += depth > 0
        more = depth - self._depth
        if more <= 0:
            return
        raw = min(1.0, chance / self._raw) if self._raw > 0.0 else 0.0
        raw **= 1.0 / more
        for above in range(self._depth, depth):
            self._path *= _shift(self._record.chance(raw, above == 0), self._factor)
            self._tokens += self._path
        self._raw, self._depth = chance, depth


def _likelihood(node: tuple[Any, ...]) -> float:
    return node[0]


def _paths(draft: Draft, chances: list[float]) -> list[float]:
    """The chance that a node and all above it are accepted."""
    paths: list[float] = []
    for parent, chance in zip(draft.parents, chances, strict=True):
        paths.append(chance if parent == ROOT else paths[parent] * chance)
    return paths


def _by_depth(draft: Draft, chances: list[float], nodes: list[int]) -> list[float]:
    """The chance that the chosen nodes of each depth, together, hold the right token."""
    if not nodes:
        return []
    paths, depths = _paths(draft, chances), draft.depths()
    reach = [0.0] * max(depths)
    for node in nodes:
        reach[depths[node] - 1] += paths[node]
    return reach


_NOTHING = _Record()
