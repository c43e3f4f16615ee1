"""The one interface of `decode.control`: whether to draft, with which drafters, how deep, and which nodes to verify.

Everything follows from two measurements: what forwards cost (`CostCurve`) and how often drafted tokens are accepted
(`Acceptance`). Knows no drafter's workings, no model and no scheduler.

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
from forerun.decode.control.cost import MAX_ROUNDS, CostCurve
from forerun.decode.control.depth import DepthPlan, Probes
from forerun.decode.control.governor import EmptyDraftBackoff, Governor
from forerun.decode.control.stopping import SharedCosts, StoppingRule, first_round_only

__all__ = ["Controller", "RequestStats"]

BALANCE_DECAY = 0.995  # per step, of the time a sequence gained or lost by drafting
MAX_DRAFT_PLAIN_STEPS = 4.0  # drafting time that counts, in plain steps; more was a start, which does not recur
RATE_DECAY = 0.9  # per step, of the rate that a round has to beat
LAG_ALLOWANCE_STEPS = 1.0  # plain steps that a sequence may lose to the batch, beyond MAX_SLOWDOWN_SHARE
MAX_STEPS_LEFT_OUT = 4  # then a sequence takes part in a round that is run for others, so that its record stays fresh
FREE_TIME_SHARE = 0.003  # of a step: free drafters that take less always run
STOPPING_PROBS_AGE_STEPS = 16  # after which the thresholds for drafters on a device are computed anew
COST_RETURN_SHARE = (
    1e-4  # per step: costs that rule a drafter out return to those first timed, as no round corrects them
)


class Controller:
    """Shared by all sequences of an engine. `drafters`: seconds of one round of each paid drafter."""

    def __init__(self, target: CostCurve, drafters: dict[str, CostCurve]) -> None:
        self.target, self.drafters = target, drafters
        self._acceptance = Acceptance()
        self._probes = Probes()
        self._governor = Governor()
        self._backoff = EmptyDraftBackoff()
        self._emitted = 0  # tokens of all sequences since the last `should_draft`
        self._recent = (0.0, 0.0)  # expected tokens and seconds of recent steps with a paid drafter
        self._paid = False  # whether this step has one
        self._stopping_probs: dict[tuple[str, int], tuple[int, list[float]]] = {}  # age in steps, thresholds
        self._shared: tuple[tuple[Any, ...], SharedCosts] | None = None  # costs of the last stopping rule, by their key

    def new_request(self) -> RequestStats:
        self._backoff.reset()
        return RequestStats()

    # -- whether to draft in this step ---------------------------------------------------------------------------------

    def should_draft(self, sequences: int, drafter_named: bool, now: float) -> bool:
        """Whether the coming step of so many sequences drafts at all. Called once before every step.

        `drafter_named`: a request in the batch names its drafter, and so wants drafts where the governor would not.
        """
        faster = self._governor.should_draft(sequences, self._emitted, now)
        self._emitted = 0
        return not self._backoff.should_skip() and (faster or drafter_named)

    def record_drafting(self, drafts: list[Draft], seconds: float) -> None:
        """What the drafting of one step gave and took."""
        plain_s = self.target.seconds(len(drafts), len(drafts))
        self._backoff.record(len(drafts), any(len(draft) for draft in drafts), seconds, plain_s)

    def record_emitted(self, tokens: int) -> None:
        """New tokens of one sequence in this step."""
        self._emitted += tokens

    # -- how often drafted tokens are accepted -------------------------------------------------------------------------

    def calibrate(self, stats: RequestStats, draft: Draft) -> list[float]:
        """The probability of each node to be accepted once its parent is, by the outcome of similar nodes before."""
        return self._acceptance.calibrate(stats, draft)

    def record_draft(self, stats: RequestStats, draft: Draft, emitted: list[int]) -> None:
        """Compare a draft as it was proposed, with nodes that were never verified, with the tokens that came.

        Called once for every draft of a step.
        """
        probed = self._acceptance.record_draft(stats, draft, emitted)
        if probed:
            self._probes.refund(stats.probing, probed * stats.refund_s)

    def observe_round(self, drafter: str, tokens: int, sequences: int, context: int, seconds: float) -> None:
        """What one round of a paid drafter took that ran these tokens and nothing else."""
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
        """The nodes of each draft to verify: those that make the batch's tokens per second largest.

        `probs` are calibrated; `context` is the sequences' mean; `spent_s` is what paid drafting took in this step.
        """
        plain_s = self.target.seconds(len(stats), len(stats), context)
        spent_s = min(spent_s, MAX_DRAFT_PLAIN_STEPS * plain_s)
        # Where a paid drafter ran, `plan_rounds` has already weighed which sequences may be slowed down.
        lagging = _lagging(stats) if spent_s < 0.05 * plain_s else []
        found = selection.select(self.target, drafts, probs, limits, context, spent_s, lagging)
        step_s = found.seconds + spent_s
        if self._paid:
            tokens, taken = self._recent
            self._recent = tokens * RATE_DECAY + sum(found.gains), taken * RATE_DECAY + step_s
            self._paid = False
        if len(stats) > 1:
            for s, gain in zip(stats, found.gains, strict=True):
                s.plain_s = s.plain_s * BALANCE_DECAY + gain * plain_s
                s.taken_s = s.taken_s * BALANCE_DECAY + step_s
                s.allowance_s = LAG_ALLOWANCE_STEPS * plain_s
        return found.nodes

    # -- whether to run a paid drafter ---------------------------------------------------------------------------------

    def plan_rounds(
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
        """The most rounds that a paid drafter should run for each sequence; 0: none. `stopping_rule` may end it sooner.

        `drafts` and `probs` (calibrated) are what free drafters proposed. `start_s` is what the drafter needs to catch
        up with each sequence before its first round, `remaining` the tokens each is expected to go on for.
        """
        sequences = len(stats)
        start_s = start_s or [0.0] * sequences
        remaining = remaining or [1 << 20] * sequences
        for s in stats:
            if s.probing == drafter:
                s.probing = ""
        lagging = _lagging(stats)
        free = selection.select(self.target, drafts, probs, limits, context, 0.0, lagging)
        plan = DepthPlan(self.target, self.drafters[drafter], context, free)
        self._probes.save(drafter, plan)
        if not plan.can_pay():
            self.drafters[drafter].relax_to_timed(COST_RETURN_SHARE)  # no round will run that could correct its curve
            return [0] * sequences
        record = self._acceptance.records[drafter]
        deepest, block = MAX_ROUNDS if sequences <= 8 else 8 if sequences <= 32 else 4, plan.rounds.tokens_per_round
        deepest = min(deepest, block) if block > 1 else deepest  # one round is all there is
        ahead = [record.acceptance_by_depth(s.own[drafter].factor, deepest) for s in stats]
        reach = [free.reach(draft, i) for i, draft in enumerate(drafts)]
        depths, slowdown = plan.best(ahead, reach, limits, start_s, remaining)
        if not depths:  # then a probe must not slow down the sequences that lag already
            probes = self._probes.plan(stats, drafter, plan, limits, start_s, lagging or list(range(sequences)))
            return [min(limit, block) if rounds else 0 for rounds, limit in zip(probes, limits, strict=True)]
        still_lagging = self._still_lagging(stats, lagging, drafter, depths, free.gains, slowdown)
        if still_lagging:
            probes = self._probes.plan(stats, drafter, plan, limits, start_s, still_lagging)
            return [min(limit, block) if rounds else 0 for rounds, limit in zip(probes, limits, strict=True)]
        self._paid = True
        return self._rounds(stats, depths, limits, start_s, block)

    def _still_lagging(
        self,
        stats: list[RequestStats],
        lagging: list[int],
        drafter: str,
        depths: dict[int, int],
        gains: list[float],
        slowdown: float,
    ) -> list[int]:
        """Lagging sequences whose expected tokens do not make up for steps that take `slowdown` times as long.

        Their own record counts by half: it is short, and nothing is learnt while drafting is off.
        """
        found = []
        record, deepest = self._acceptance.records[drafter], max(depths.values())
        for i in lagging:
            tokens, path = gains[i], 1.0
            factor = math.sqrt(stats[i].own[drafter].factor)
            for prob in record.acceptance_by_depth(factor, deepest) if i in depths else ():
                path *= prob
                tokens += path
            if tokens < slowdown:
                found.append(i)
        return found

    def _rounds(
        self, stats: list[RequestStats], depths: dict[int, int], limits: list[int], start_s: list[float], block: int
    ) -> list[int]:
        """The plan's rounds for each sequence of the batch."""
        # How deep it pays to go depends on the drafter's own probabilities, and `stopping_rule` reads them. In a batch
        # all share a round's cost, and one that went on alone would pay it all: there the plan is the limit.
        alone = MAX_ROUNDS if len(stats) == 1 and block == 1 else 0
        rounds = [min(limits[i], max(depths[i], alone)) if i in depths else 0 for i in range(len(stats))]
        for i, s in enumerate(stats):
            # In a round that is run for others one token more is nearly free, and without it nothing would be learnt.
            s.steps_left_out = s.steps_left_out + 1 if rounds[i] == 0 and start_s[i] == 0.0 else 0
            if s.steps_left_out >= MAX_STEPS_LEFT_OUT and limits[i] > 0:
                rounds[i], s.steps_left_out = 1, 0
        return rounds

    def stopping_rule(
        self, stats: RequestStats, drafter: str, sequences: int = 1, context: int = 0
    ) -> Callable[[float, int], bool]:
        """For `DraftRequest.keep_drafting`: (path probability, depth) -> is one more round worth it?

        `sequences` are drafted together. Made anew for every step.
        """
        if stats.probing == drafter:
            return first_round_only
        return self._stopping_rule(stats, drafter, sequences, context)

    def _stopping_rule(self, stats: RequestStats, drafter: str, sequences: int, context: int) -> StoppingRule:
        curve = self.drafters[drafter]
        # The rules of one step differ in their sequences' records only.
        key = (drafter, sequences, context, self.target.version, curve.version)
        if self._shared is None or self._shared[0] != key:
            self._shared = key, SharedCosts(self.target, curve, sequences, context)
        tokens, taken = self._recent
        record, factor = self._acceptance.records[drafter], stats.own[drafter].factor
        return StoppingRule(record, factor, self._shared[1], tokens / taken if taken else 0.0)

    def min_path_probs(self, stats: RequestStats, drafter: str, sequences: int = 1, context: int = 0) -> list[float]:
        """The stopping rule as numbers, for `DraftRequest.min_path_probs`; computed anew every few steps only."""
        if stats.probing == drafter:
            return [2.0]  # no path is that probable: one round
        age, known = self._stopping_probs.get((drafter, sequences), (0, []))
        if age % STOPPING_PROBS_AGE_STEPS == 0:
            known = self._stopping_rule(stats, drafter, sequences, context).min_path_probs()
        self._stopping_probs[drafter, sequences] = age + 1, known
        return known

    # -- whether to run a free drafter ---------------------------------------------------------------------------------

    def should_run_free(self, drafter: str, sequences: int = 1) -> bool:
        """Whether a free drafter's own time is worth spending in this step: in a batch a token costs less time."""
        record = self._acceptance.records[drafter]
        token_s = self.target.seconds(sequences, sequences) / sequences
        if record.free_run_s <= max(FREE_TIME_SHARE, record.accepted_tokens) * token_s:
            return True
        record.steps_skipped += 1
        return record.steps_skipped * FREE_TIME_SHARE * token_s >= record.free_run_s

    def record_free_run(self, drafter: str, seconds: float, accepted_tokens: float) -> None:
        """What a free drafter took for one sequence, and how many of its tokens were right."""
        record = self._acceptance.records[drafter]
        record.steps_skipped = 0
        seconds = min(seconds, 4.0 * record.free_run_s) if record.free_run_s else seconds
        record.free_run_s += 0.05 * (seconds - record.free_run_s) if record.free_run_s else seconds
        record.accepted_tokens += 0.02 * (accepted_tokens - record.accepted_tokens)

    # -- statistics ----------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Cost curves in seconds and acceptance by drafter."""
        curves = {name: curve.points() for name, curve in self.drafters.items()}
        return {"target_s": self.target.points(), "round_s": curves, "drafters": self._acceptance.stats()}


def _lagging(stats: list[RequestStats]) -> list[int]:
    """Sequences that this step must not slow down; one alone can only slow down itself."""
    return [i for i, s in enumerate(stats) if s.lagging] if len(stats) > 1 else []
