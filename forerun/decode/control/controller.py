"""How much to guess: which drafted tokens are worth verifying, and whether to ask a drafter that runs a model.

Everything follows from two measured things: what forwards cost (`CostCurve`) and how often guesses came true
(`Acceptance`). The quantity made large is always tokens per second of the whole batch. Knows no drafter's workings, no
model and no scheduler; it decides about time only, never about what is answered.

Time spent on drafting counts in the rate by which nodes are chosen, though it is already spent: a step stands for its
neighbours, which will spend the same. Left out, every further node would have to beat a rate that is never reached,
and too few would be verified.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from forerun.core import Draft
from forerun.decode.control import selection
from forerun.decode.control.acceptance import Acceptance, RequestStats
from forerun.decode.control.cost import DEEPEST, CostCurve
from forerun.decode.control.depth import DepthPlan
from forerun.decode.control.governor import Governor
from forerun.decode.control.probe import Probes
from forerun.decode.control.stopping import SharedCosts, Worth, first_round_only

__all__ = ["Controller", "RequestStats"]

BALANCE_KEEP = 0.995  # forgetting, per step, of how a sequence fared
MOST_SPENT = 4.0  # plain steps that drafting can take; more was a start, which does not come again
RECENT_KEEP = 0.9  # forgetting, per step, of the rate that a round has to beat
GRACE = 1.0  # steps that a sequence may lose for the good of the others, beyond `BEHIND`
LEFT_OUT = 4  # steps after which a sequence takes part in a round that is run for others
FREE_SHARE = 0.003  # of a step: drafters that cost less are always asked
LEAST_AGE = 16  # steps that thresholds for devices are kept
CALMING = 1e-4  # share, per step, by which costs return to those first timed where they rule a drafter out


class Controller:
    """Shared by all sequences of an engine. `drafters`: seconds of one round of each drafter that runs a model."""

    def __init__(self, target: CostCurve, drafters: dict[str, CostCurve]) -> None:
        self.target, self.drafters = target, drafters
        self._acceptance = Acceptance()
        self._probes = Probes()
        self._governor = Governor()
        self._recent = (0.0, 0.0)  # expected tokens and seconds of recent steps with a paid drafter
        self._paid = False  # whether this step has one
        self._least: dict[tuple[str, int], tuple[int, list[float]]] = {}  # steps since, and what `least` last gave
        self._shared: tuple[tuple[Any, ...], SharedCosts] | None = None  # costs that `worth` last went by

    def open(self) -> RequestStats:
        return RequestStats()

    def allows(self, sequences: int, tokens: int, now: float) -> bool:
        """Whether the coming step of so many sequences may guess at all; the one before it gave `tokens`, until `now`.
        To be asked once a step."""
        return self._governor.allows(sequences, tokens, now)

    # -- how good guesses are ------------------------------------------------------------------------------------------

    def calibrate(self, stats: RequestStats, draft: Draft) -> list[float]:
        """The probability of each node to be accepted once its parent is, by what became of such nodes before."""
        return self._acceptance.calibrate(stats, draft)

    def learn(self, stats: RequestStats, draft: Draft, emitted: list[int]) -> None:
        """Compare a draft, as proposed and with nodes that were never verified, with the tokens that came.

        Once for every draft of a step.
        """
        probed = self._acceptance.learn(stats, draft, emitted)
        if probed:
            self._probes.refund(stats.probing, probed * stats.refund)

    def observe_round(self, drafter: str, tokens: int, sequences: int, context: int, seconds: float) -> None:
        """What one round of a paid drafter took, one that held nothing but these tokens."""
        self.drafters[drafter].observe(tokens, sequences, context, seconds)

    # -- which nodes to verify -----------------------------------------------------------------------------------------

    def select(
        self,
        stats: list[RequestStats],
        drafts: list[Draft],
        probs: list[list[float]],
        limits: list[int],
        context: int,
        spent_s: float = 0.0,
    ) -> list[list[int]]:
        """The nodes of each draft that are worth verifying: those that make the batch's tokens per second largest.

        `probabilities` are calibrated; `context` is the sequences' mean; `spent_s` is what drafting took in this step.
        """
        plain_s = self.target.seconds(len(stats), len(stats), context)
        spent_s = min(spent_s, MOST_SPENT * plain_s)
        # Where drafting was paid for, `depth` has weighed already who may be slowed down.
        owed = _owed(stats) if spent_s < 0.05 * plain_s else []
        found = selection.select(self.target, drafts, probs, limits, context, spent_s, owed)
        step_s = found.seconds + spent_s
        if self._paid:
            tokens, taken = self._recent
            self._recent = tokens * RECENT_KEEP + sum(found.gains), taken * RECENT_KEEP + step_s
            self._paid = False
        if len(stats) > 1:
            for s, gain in zip(stats, found.gains, strict=True):
                s.plain_s = s.plain_s * BALANCE_KEEP + gain * plain_s
                s.taken_s = s.taken_s * BALANCE_KEEP + step_s
                s.grace_s = GRACE * plain_s
        return found.nodes

    # -- whether to pay for drafting -----------------------------------------------------------------------------------

    def depth(
        self,
        stats: list[RequestStats],
        drafts: list[Draft],
        probs: list[list[float]],
        drafter: str,
        limits: list[int],
        context: int,
        start_s: list[float] | None = None,
        remaining: list[int] | None = None,
    ) -> list[int]:
        """Most rounds that a paid drafter should draft for each sequence, if `worth` does not stop it; 0: do not ask.

        `drafts` and `probabilities` (calibrated) are what free drafters offer already. `start_s` is what the drafter
        needs to catch up with each sequence before its first round, `remaining` the tokens each is expected to go on
        for.
        """
        sequences = len(stats)
        start_s = start_s or [0.0] * sequences
        remaining = remaining or [1 << 20] * sequences
        for s in stats:
            if s.probing == drafter:
                s.probing = ""
        owed = _owed(stats)
        free = selection.select(self.target, drafts, probs, limits, context, 0.0, owed)
        plan = DepthPlan(self.target, self.drafters[drafter], context, free)
        self._probes.save(drafter, plan)
        if not plan.can_pay():
            self.drafters[drafter].calm(CALMING)  # nothing will be run that could show it wrong
            return [0] * sequences
        record = self._acceptance.record(drafter)
        deepest = DEEPEST if sequences <= 8 else 8 if sequences <= 32 else 4
        ahead = [record.ahead(s.record(drafter).factor, deepest) for s in stats]
        reach = [free.reach(draft, i) for i, draft in enumerate(drafts)]
        depths, slower = plan.best(ahead, reach, limits, start_s, remaining)
        if not depths:  # then nothing may be tried at the expense of those who are owed
            return self._probes.rounds(stats, drafter, plan, limits, start_s, owed or list(range(sequences)))
        late = self._late(stats, owed, drafter, depths, free.gains, slower)
        if late:
            return self._probes.rounds(stats, drafter, plan, limits, start_s, late)
        self._paid = True
        return self._rounds(stats, depths, limits, start_s)

    def _late(
        self,
        stats: list[RequestStats],
        owed: list[int],
        drafter: str,
        depths: dict[int, int],
        gains: list[float],
        slower: float,
    ) -> list[int]:
        """Sequences that fell behind plain decoding and would go on to, in steps that take so many times as long.

        Their own record counts by half: it is short, and nothing is learnt while drafting is off.
        """
        late = []
        record, deepest = self._acceptance.record(drafter), max(depths.values())
        for i in owed:
            tokens, path = gains[i], 1.0
            for prob in record.ahead(math.sqrt(stats[i].record(drafter).factor), deepest) if i in depths else ():
                path *= prob
                tokens += path
            if tokens < slower:
                late.append(i)
        return late

    def _rounds(
        self, stats: list[RequestStats], depths: dict[int, int], limits: list[int], start_s: list[float]
    ) -> list[int]:
        """What the plan comes to for each sequence."""
        # How deep it pays to go depends on how sure the drafter is of this text, and `worth` stops it. In a batch all
        # share a round's cost, and one that went on alone would pay it all: there the plan is the limit.
        sure = DEEPEST if len(stats) == 1 else 0
        rounds = [min(limits[i], max(depths[i], sure)) if i in depths else 0 for i in range(len(stats))]
        for i, s in enumerate(stats):
            # In a round that is run for others one token more is nearly free, and without it nothing would be learnt.
            s.left_out = s.left_out + 1 if rounds[i] == 0 and start_s[i] == 0.0 else 0
            if s.left_out >= LEFT_OUT and limits[i] > 0:
                rounds[i], s.left_out = 1, 0
        return rounds

    def worth(
        self, stats: RequestStats, drafter: str, sequences: int = 1, context: int = 0, nodes: int = 0
    ) -> Callable[[float, int], bool]:
        """For `DraftRequest.worth`: is one more round worth it, given the drafter's own probability of the path so far?

        `sequences` are drafted for side by side, `nodes` are verified for them in any case. Made anew for every step.
        """
        if stats.probing == drafter:
            return first_round_only
        curve = self.drafters[drafter]
        # The sequences of a step ask one after the other and differ in their records only.
        key = (drafter, sequences, context, nodes, self.target.version, curve.version)
        if self._shared is None or self._shared[0] != key:
            self._shared = key, SharedCosts(self.target, curve, sequences, context, nodes)
        tokens, taken = self._recent
        factor = stats.record(drafter).factor
        return Worth(self._acceptance.record(drafter), factor, self._shared[1], tokens / taken if taken else 0.0)

    def least(self, stats: RequestStats, drafter: str, sequences: int = 1, context: int = 0) -> list[float]:
        """`worth` for `DraftRequest.least`; worked out anew every few steps only."""
        if stats.probing == drafter:
            return [2.0]  # no path is that likely: one round
        age, known = self._least.get((drafter, sequences), (0, []))
        if age % LEAST_AGE == 0:
            known = Worth.least(self.worth(stats, drafter, sequences, context))  # type: ignore[arg-type]
        self._least[drafter, sequences] = age + 1, known
        return known

    # -- whether to ask a free drafter ---------------------------------------------------------------------------------

    def asks(self, drafter: str, sequences: int = 1) -> bool:
        """Whether a free drafter's own time is worth spending on this step: in a batch a token costs less time."""
        record = self._acceptance.record(drafter)
        token_s = self.target.seconds(sequences, sequences) / sequences
        if record.asked_s <= max(FREE_SHARE, record.gained) * token_s:
            return True
        record.waited += 1
        return record.waited * FREE_SHARE * token_s >= record.asked_s

    def asked(self, drafter: str, seconds: float, gained: float) -> None:
        """What asking a free drafter took for one sequence, and how many of its tokens came true."""
        record = self._acceptance.record(drafter)
        record.waited = 0
        seconds = min(seconds, 4.0 * record.asked_s) if record.asked_s else seconds
        record.asked_s += 0.05 * (seconds - record.asked_s) if record.asked_s else seconds
        record.gained += 0.02 * (gained - record.gained)

    # -- what can be told ----------------------------------------------------------------------------------------------

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
        curves = {name: curve.points() for name, curve in self.drafters.items()}
        return {"target_s": self.target.points(), "round_s": curves, "drafters": self._acceptance.report()}


def _owed(stats: list[RequestStats]) -> list[int]:
    """Sequences that this step must not slow down; one alone can only slow down itself."""
    return [i for i, s in enumerate(stats) if s.owed] if len(stats) > 1 else []
