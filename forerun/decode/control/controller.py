"""The one decision of a step: plain decoding, or drafts by which drafters, how deep, and which nodes are verified.

What is compared is always the tokens per second of the batch: tokens by calibrated acceptance, seconds by measured
costs (the target's forward by rows, a drafter's rounds, what it reads before its first one, the host's own time). Where
acceptance is not certain a lower bound of it counts, so that doubt is on the side of plain decoding. A drafter that
does not pay by that bound may be explored: within a small share of a request's time, and not in an answer's first
tokens unless it has paid for this kind of prompt. Knows no drafter's workings, no model and no scheduler.

On a device that runs ahead of the host a plain step hides the host's work and a step with a draft does not. There free
drafters run beside the step in flight, which costs nothing and shows how often they are right, and the next step drafts
only where what they found is worth that overlap too (`should_leave`).

Time spent on drafting counts in the rate by which nodes are chosen, though it is already spent: a step stands for its
neighbours, which will spend the same. Left out, every further node would have to beat a rate that is never reached,
and too few would be verified.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from forerun.core import Draft
from forerun.decode.control import selection, slack
from forerun.decode.control.acceptance import (
    DOUBT,
    MAX_KIND_OBSERVATIONS,
    Acceptance,
    DrafterRecord,
    RequestStats,
    StoppingRule,
)
from forerun.decode.control.cost import MAX_ROUNDS, TIMED_TOKENS, CostCurve, Slowdown
from forerun.decode.control.decision import Decision, DraftedBatch, EndedStep, OpenStep, PaidPlan
from forerun.decode.control.depth import DepthPlan, Depths, StepPlan, min_path_probs
from forerun.decode.control.gain import DOUBTED_RATIO
from forerun.decode.control.host import HostTime
from forerun.decode.control.on_device import OnDevice
from forerun.decode.control.selection import Selection, StepCosts
from forerun.decode.control.start import EXPLORE_PAID_SHARE, FIRST_TOKENS, too_early
from forerun.decode.control.waiting import READ_ELSEWHERE_PRIOR_S, Waiting

__all__ = ["Controller", "DraftedBatch", "PaidPlan", "RequestStats"]

EXPLORE_FREE_SHARE = 0.0025  # of a request's time; apart from EXPLORE_PAID_SHARE, or cheap drafters would use it up
# Before a paid drafter that does not pay is planned for again, and the same as a share of the answer so far: planning
# takes host time too
PAID_PAUSE_TOKENS, PAID_PAUSE_SHARE = 8, 0.25
# Of other requests' outcomes that count against doubt, for one sequence: what a draft model reads is not won back where
# the request is worse than others of its kind; where it has read, a worse one shows it within a few drafts
START_OUTCOMES, ALONE_OUTCOMES = 2.0 * MAX_KIND_OBSERVATIONS, 1e9
ASKED_SEQUENCES = 8  # decided for in a step where none was drafted for in the last: the others' turn comes later
RUN_PRIOR_S = 30e-6  # of a free drafter for one sequence, before it ran
READ_PRIOR_S = 0.5e-6  # and for a token of its prompt, which its first run reads
MAX_DRAFT_PLAIN_STEPS = 4.0  # drafting time that counts, in plain steps; more was a start, which does not recur
MAX_GROWN_PROB, MIN_GROWN_PROB = 0.2, 0.02  # path probability below which free drafters need not grow a node
RECENT_DECISIONS = 256


class Controller(Waiting, OnDevice):
    """Shared by all sequences of an engine. `drafters`: seconds of one round of each paid drafter."""

    def __init__(self, target: CostCurve, drafters: dict[str, CostCurve]) -> None:
        self.target, self.drafters = target, drafters
        self.slowdowns: dict[str, Slowdown] = {}  # by drafters that compute elsewhere
        self.acceptance, self.host = Acceptance(), HostTime()
        self.decisions: deque[Decision] = deque(maxlen=RECENT_DECISIONS)
        self._step: OpenStep | None = None
        self._ended: EndedStep | None = None
        self._read_at: float | None = None  # when the last step's tokens came, where this one followed at once
        self._draft_s = 0.0  # of drafting since then
        self._drafted, self._gained = False, False  # whether the last step had a draft; whether that pays again
        self._skip_steps = 0  # plain ones, until drafting is considered again
        self._why = ""  # of this step's paid drafter

    def new_request(
        self, kind: str = "text", prompt_tokens: int = 0, max_tokens: int = 1 << 20, named: bool = False
    ) -> RequestStats:
        """`named`: the request names its drafters, and so wants their drafts wherever they pay on average."""
        self._skip_steps, self._read_at, self._gained = 0, None, False
        return RequestStats(kind, prompt_tokens, max_tokens, named)

    # -- whether to draft in this step ---------------------------------------------------------------------------------

    def should_draft(
        self, stats: list[RequestStats], drafters: list[list[str]], context: int, launches: bool = False
    ) -> bool:
        """Whether the coming step runs any drafter. Called once before every step that is not launched ahead, with the
        drafters of each sequence. `launches`: it can be launched, and steps after it ahead of the host."""
        step = self._begin(stats, context)
        if not any(s.named for s in stats) and self.host.is_asked_for(len(stats)):
            return self.record_plain(context, "a plain step of so many sequences is timed first")
        if launches and not self._gained:
            return self.record_plain(context, "drafters run beside the steps that follow")
        if self._skip_steps:
            self._skip_steps -= 1
            return self.record_plain(context, "no drafter was expected to pay a few steps ago")
        token_s = step.plain_s / len(stats)
        for s, names in zip(stats, drafters, strict=True):
            for name in names:
                if s.tokens >= s.own[name].skip_until if name in self.drafters else self._run_pays(s, name, token_s):
                    return True
        self._skip_steps = len(stats) // ASKED_SEQUENCES
        return self.record_plain(context, "no drafter is expected to pay")

    def idle_s(self, stats: list[RequestStats], context: int) -> float:
        """Of the host beside a step in flight, for drafters of the step after it. Called once before every step that
        may be launched ahead."""
        self._begin(stats, context)
        return self.host.idle(len(stats))

    def should_leave(self, batch: DraftedBatch) -> bool:
        """Whether the step after the one in flight is worth a draft, though it cannot be launched before that one's
        tokens are read, nor can the first plain one after it: `batch` has what may follow the token in flight."""
        n, host = len(batch.stats), self.host
        costs = StepCosts(0.0, host.seconds(n, drafted=True) + host.hidden(n))
        found = self._selected(batch, costs, doubt=True)
        for s, tokens in zip(batch.stats, found.gains, strict=True):
            s.gain.left = tokens - 1.0
        return found.size > n or self.record_plain(batch.context, "no draft is worth the overlap with the host")

    def _begin(self, stats: list[RequestStats], context: int) -> OpenStep:
        if self._ended is None:
            self._read_at = None  # the step before held a prompt's tokens
        plain_s = self._plain_s(len(stats), context)
        self._step = OpenStep(stats, plain_s, [stats[i] for i in slack.lagging(self.acceptance, stats, plain_s)])
        self._ended, self._why = None, ""
        return self._step

    def record_plain(self, context: int, why: str) -> bool:
        """This step drafts nothing: False."""
        assert self._step is not None
        n, plain_s = len(self._step.stats), self._step.plain_s
        self.decisions.append(Decision(n, context, "", 0, n, n, plain_s, plain_s, why))
        return False

    def should_run(self, stats: RequestStats, drafter: str, covered: float = 0.0, offered: float = 0.0) -> bool:
        """Whether a free drafter runs for a sequence in this step; `covered`: the probability that drafters before it
        have the next token already, `offered`: the tokens that these are expected to have."""
        assert self._step is not None
        if (slowdown := self.slowdowns.get(drafter)) and slowdown.takes_turns:
            return self.turn_pays(stats, drafter, covered, offered)
        return self._run_pays(stats, drafter, self._step.plain_s / len(self._step.stats), covered, explore=True)

    def _run_pays(
        self, s: RequestStats, drafter: str, token_s: float, covered: float = 0.0, explore: bool = False
    ) -> bool:
        """`explore`: what that takes from the budget is taken."""
        assert self._step is not None
        if self._step.lagging and s not in self._step.lagging:
            return False  # what it would gain is not verified
        record, own = self.acceptance.records[drafter], s.own[drafter]
        cost_s, read_s = record.run_s or RUN_PRIOR_S, record.read_s or READ_PRIOR_S
        if slowdown := self.slowdowns.get(drafter):
            if slowdown.takes_turns:
                return self.turn_pays(s, drafter)
            cost_s += slowdown.extra * token_s
            read_s = record.read_s or slowdown.extra * READ_ELSEWHERE_PRIOR_S
        start_s = 0.0 if own.runs else read_s * s.prompt_tokens  # which has to pay until the answer's end
        gained_s = record.run_tokens(s.kind, own, DOUBT, slowdown is not None) * (1.0 - covered) * token_s
        lost_s = cost_s + start_s / max(1, self.acceptance.expected_remaining(s)) - gained_s
        if lost_s <= 0.0 or s.named:
            return True
        if slowdown:
            lost_s += start_s  # all of it before the first draft
        lost_s *= len(self._step.stats)  # all of them wait for it
        if covered > 0.5 or not self._may_explore(s, record, s.explored_free_s + lost_s, EXPLORE_FREE_SHARE, 0.0):
            return False
        s.explored_free_s += lost_s if explore else 0.0
        return True

    def _may_explore(
        self, s: RequestStats, record: DrafterRecord, explored_s: float, share: float, token_s: float
    ) -> bool:
        """`token_s`: of a plain token, where a drafter that has paid for this kind may use the budget of those tokens
        that are expected to come: what it finds out is worth most at the beginning."""
        paid = record.has_paid(s.kind)
        ahead_s = token_s * self.acceptance.expected_remaining(s) if paid else 0.0
        return explored_s <= share * (s.elapsed_s + ahead_s) and (s.tokens >= FIRST_TOKENS or paid)

    def min_grown_prob(self) -> float:
        """Path probability below which a drafted node cannot pay, so that free drafters need not grow it: half of what
        a row of the target costs, as a share of a token."""
        assert self._step is not None
        n = len(self._step.stats)
        row_s = (self.target.seconds(n + 8, n) - self.target.seconds(n, n)) / 8.0
        return min(MAX_GROWN_PROB, max(MIN_GROWN_PROB, 0.5 * row_s * n / self._step.plain_s))

    def _plain_s(self, sequences: int, context: int) -> float:
        return self.target.seconds(sequences, sequences, context) + self.host.seconds(sequences, drafted=False)

    def _costs(self, sequences: int, spent_s: float) -> StepCosts:
        host = self.host
        return StepCosts(host.seconds(sequences, drafted=False), host.seconds(sequences, drafted=True), spent_s)

    # -- what a step took ----------------------------------------------------------------------------------------------

    def record_drafting(self, seconds: float, paid_host_s: float | None = None) -> None:
        """Of all drafters and of choosing among their nodes; `paid_host_s`: with a paid drafter, what the host took
        beside its forwards."""
        self._draft_s = seconds
        if paid_host_s is not None and self._step is not None:
            self.host.observe_paid(len(self._step.stats), paid_host_s)

    def observe_forward(
        self,
        rows: int,
        sequences: int,
        context: int,
        branches: int,
        seconds: float,
        now: float = 0.0,
        waited_s: float | None = None,
        elsewhere: Sequence[str] = (),
    ) -> None:
        """What the target's forward of a step of pure decoding took, whose tokens came `now`. `waited_s`: that the host
        waited for them beside a step launched ahead, drafters beside it included; 0: launched, but not ahead.
        `elsewhere`: drafters whose servers computed meanwhile."""
        before = self.target.drift
        slowdowns = [self.slowdowns[name] for name in elsewhere if name in self.slowdowns]
        if slowdowns and rows == sequences:
            for slowdown in slowdowns:
                slowdown.observe(self.target.seconds(rows, sequences, context), seconds)
        else:
            forward_s = seconds / (1.0 + max((slowdown.extra for slowdown in slowdowns), default=0.0))
            self.target.observe(rows, sequences, context, forward_s - branches * self.target.per_branch)
        for curve in self.drafters.values():
            if not curve.recent:
                curve.follow(self.target.drift - before)
            curve.recent = False
        draft_s, self._draft_s, self._drafted = self._draft_s, 0.0, rows > sequences
        if waited_s:
            self.host.observe_ahead(sequences, seconds - waited_s, waited_s)
        elif waited_s is None and self._read_at is not None and (self._drafted or not draft_s):
            self.host.observe(sequences, self._drafted, now - self._read_at - draft_s - seconds)
        taken_s = draft_s + seconds + self.host.seconds(sequences, self._drafted)
        wall_s = taken_s if self._read_at is None else now - self._read_at
        self._read_at = now
        if self._step is not None:
            paid = self._gained = self._step.paid and self._drafted
            self._ended = EndedStep(wall_s, min(wall_s, taken_s), self._step.plain_s, paid, self._step.rate * paid)

    def observe_start(self, drafter: str, foreseen_s: float, seconds: float) -> None:
        """What a paid drafter took to catch up with sequences, against what its curve had said: beyond the sizes that
        were timed other kernels may run. What is read within these sizes shows nothing of it."""
        curve = self.drafters[drafter]
        if foreseen_s <= curve.seconds(TIMED_TOKENS[-1]):
            return
        curve.start_factor *= min(4.0, max(0.25, seconds / max(1e-9, foreseen_s))) ** 0.5

    def observe_round(self, drafter: str, tokens: int, sequences: int, context: int, seconds: float) -> None:
        """What one round of a paid drafter took that ran these tokens and nothing else."""
        self.drafters[drafter].observe(tokens, sequences, context, seconds)
        self.drafters[drafter].recent = True

    def record_tokens(self, stats: RequestStats, tokens: int) -> None:
        """New tokens of one sequence in this step."""
        stats.tokens += tokens
        self.acceptance.gains.record(stats.kind, stats.gain, tokens - 1)
        self._gained |= tokens > 1
        if self._ended is None:
            return
        wall_s, taken_s, plain_s, paid, rate = self._ended
        if rate:
            stats.count_paid(tokens, rate * taken_s)
        stats.plain_s += tokens * plain_s
        stats.taken_s += taken_s
        stats.elapsed_s += min(wall_s, plain_s)
        if not paid:
            stats.count_unpaid(tokens)

    # -- how often drafted tokens are accepted -------------------------------------------------------------------------

    def calibrate(self, stats: RequestStats, draft: Draft, beside: bool = False) -> list[float]:
        """The probability of each node to be accepted once its parent is, by the outcome of similar nodes before; of a
        draft made beside a step in flight a lower bound, as what it is worth shows without verifying it."""
        probs = self.acceptance.calibrate(stats, draft, DOUBT if beside else 0.0)
        if draft.sources and draft.sources[0] in self.drafters and not stats.own[draft.sources[0]].asked:
            stats.own[draft.sources[0]].state(draft, probs)
        return probs

    def record_draft(self, stats: RequestStats, draft: Draft, emitted: list[int], accepted: int = 0) -> None:
        """Compare a draft as it was proposed, with nodes that were never verified, with the tokens that came; of one in
        one forward depths count by how many tokens in a row were `accepted`."""
        drafter = draft.sources[0]
        in_one_forward = stats.own[drafter].asked > 0
        self.acceptance.record_draft(stats, draft, emitted, levels_too=not in_one_forward)
        if in_one_forward:
            self.acceptance.record_path(stats, drafter, accepted, len(emitted))

    def record_run(self, stats: RequestStats, drafter: str, tokens: float, seconds: float, nodes: int = 0) -> None:
        """What a free drafter took for one sequence, and how many of its tokens were right. Of one elsewhere, whose
        runs cost more than host time, what verifying its `nodes` took is no gain; its first run was reading beside
        the target's steps."""
        own = stats.own[drafter]
        if drafter in self.slowdowns:
            tokens -= self.target.seconds(1 + nodes) / self.target.seconds(1) - 1.0
            seconds *= 1.0 if own.runs else self.slowdowns[drafter].extra
        self.acceptance.records[drafter].count_run(stats, own, tokens, seconds)

    def record_end(self, stats: RequestStats) -> None:
        """An answer ended."""
        if stats.tokens:
            self.acceptance.record_end(stats)

    # -- which nodes to verify -----------------------------------------------------------------------------------------

    def select(self, batch: DraftedBatch) -> list[list[int]]:
        """The nodes of each draft to verify: those that make the batch's tokens per second largest."""
        n, drafts, plain_s = len(batch.stats), batch.drafts, self._plain_s(len(batch.stats), batch.context)
        found = self._selected(batch, self._costs(n, min(batch.spent_s, MAX_DRAFT_PLAIN_STEPS * plain_s)))
        names = sorted({d.sources[k] for d, nodes in zip(drafts, found.nodes, strict=True) for k in nodes})
        depth = max((max(d.depths()) for d in drafts if len(d)), default=0)
        why = self._why or ("by lower bound" if names else "no drafted node pays")
        for s, tokens in zip(batch.stats, found.gains, strict=True):
            s.gain.open = 0.0 if self._why or self.slowdowns.keys() & names else s.gain.open or tokens - 1.0
        for i, s in enumerate(batch.stats):
            for name, own in s.own.items():
                if own.asked:
                    own.state_reach(found.reach(drafts[i], i))
                    if not found.nodes[i]:  # the plan was wrong about them
                        _pause(s, name)
        expected = sum(found.gains), found.seconds, plain_s
        self.decisions.append(Decision(n, batch.context, "+".join(names), depth, found.size, *expected, why))
        return found.nodes

    def _selected(self, batch: DraftedBatch, costs: StepCosts, share: float = 1.0, doubt: bool = False) -> Selection:
        """`share`: of what free drafts are expected to gain, that counts."""
        lagging = slack.lagging(self.acceptance, batch.stats, self._plain_s(len(batch.stats), batch.context))
        gains, pairs = self.acceptance.gains, zip(batch.stats, batch.drafts, strict=True)
        probs = [gains.expected(s.kind, s.gain, draft, self.models, share, doubt) for s, draft in pairs]
        return selection.select(self.target, batch.drafts, probs, batch.limits, batch.context, costs, lagging)

    # -- whether to run a paid drafter ---------------------------------------------------------------------------------

    def plan_rounds(self, batch: DraftedBatch, drafter: str, start_s: list[float]) -> PaidPlan | None:
        """What a paid drafter should do in this step, beside what free drafters drafted; None: nothing. `start_s` is
        what it needs to catch up with each sequence before its first round."""
        stats, drafts, limits, context = batch.stats, batch.drafts, batch.limits, batch.context
        sequences, curve, record = len(stats), self.drafters[drafter], self.acceptance.records[drafter]
        costs = self._costs(sequences, batch.spent_s)
        # A free draft that would take its place is doubted as it is: it is where one promises most, and too much
        free = self._selected(batch, costs, 1.0 if any(start_s) or batch.on_device_rows else DOUBTED_RATIO)
        plan = DepthPlan(self.target, curve, context, free, costs.draft_s + costs.spent_s + self.host.paid(sequences))
        if batch.on_device_rows:
            plan = StepPlan(plan, self.on_device_s(drafter, batch), batch.on_device_rows)
        block = curve.tokens_per_round
        deepest = block if block > 1 else MAX_ROUNDS if sequences <= 8 else 8 if sequences <= 32 else 4
        reach = [free.reach(draft, i) for i, draft in enumerate(drafts)]
        remaining = [self.acceptance.expected_remaining(s) * s.share_not_free for s in stats]
        known = MAX_KIND_OBSERVATIONS if sequences > 1 else START_OUTCOMES if start_s[0] else ALONE_OUTCOMES

        def ahead(doubt: float) -> list[list[float]]:
            doubts = [0.0 if s.named and doubt > 0.0 else doubt for s in stats]
            pairs = zip(stats, doubts, strict=True)
            return [record.by_depth(s.kind, s.own[drafter], deepest, d, block > 1, known) for s, d in pairs]

        def best(probs: list[list[float]]) -> Depths:
            return plan.best(probs, reach, limits, start_s, remaining)

        low, waiting, plain_s = ahead(DOUBT), False, self._plain_s(sequences, context)
        for i, mean in enumerate(ahead(0.0) if any(start_s) else ()):
            # Free drafts that run beside steps on a device show there for nothing what they are worth
            token_s, drafted = plan.token_s(mean), bool(free.nodes[i]) and not batch.on_device_rows
            more_s = (free.seconds - free.gains[i] * token_s) if drafted else plain_s - token_s
            if start_s[i] and too_early(stats[i], record, start_s[i], token_s, more_s, drafted):
                remaining[i], waiting = 0, True
        sure = best(low)
        lost_s, pays = 0.0, sure.rounds and sure.rate * self.acceptance.paid_ratio(stats) >= plan.rate
        if pays and not slack.slows_down(self.acceptance, stats, free.gains, sure, start_s, plain_s):
            depths, why = best(ahead(0.0)), "pays by lower bound"
        else:
            depths, lost_s = self._explore(stats, record, plan, best(ahead(-DOUBT)), low, start_s)
            why = "explored"
            if not depths.rounds:
                # not where it is too early to read, or where only a free draft leaves little to gain
                for s in stats if free.size == sequences and not waiting else ():
                    _pause(s, drafter)
                return None
        alone = MAX_ROUNDS if sequences == 1 and block == 1 and sure.rounds else 0
        # Alone the drafter's own probabilities say how deep to go; in a batch one that went on would pay for a round.
        rounds = [min(limits[i], max(n, alone)) if (n := depths.rounds.get(i, 0)) else 0 for i in range(sequences)]
        active, stop = sum(n > 0 for n in rounds), []
        for s, n in zip(stats, rounds, strict=True):
            mean = record.by_depth(s.kind, s.own[drafter], MAX_ROUNDS, 0.0) if n and block == 1 else []
            stop.append(min_path_probs(self.target, curve, active, context, mean, depths.rate) if mean else [])
        return PaidPlan(drafter, rounds, depths.rate, stop, f"{drafter} {why}", lost_s)

    def _explore(
        self,
        stats: list[RequestStats],
        record: DrafterRecord,
        plan: DepthPlan,
        hoped: Depths,
        ahead: list[list[float]],
        start_s: list[float],
    ) -> tuple[Depths, float]:
        """One round for the sequence that it takes least for, where it may yet pay and every sequence can afford what
        is lost if acceptance is at its lower bound (`ahead`); and that loss."""
        if hoped.rounds:
            i = min(hoped.rounds, key=start_s.__getitem__)
            rounds = 1 if plan.rounds.tokens_per_round == 1 else hoped.rounds[i]
            lost_s = start_s[i] + plan.loss_s(ahead[i][:rounds], self.acceptance.paid_ratio(stats))
            plain_s = plan.target.seconds(len(stats), len(stats), plan.context)
            budgets = ((s, record, s.explored_paid_s + lost_s, EXPLORE_PAID_SHARE, plain_s) for s in stats)
            if all(self._may_explore(*budget) for budget in budgets):
                return Depths({i: rounds}, hoped.rate, 1.0, {}), lost_s
        return Depths({}, plan.rate, 1.0, {}), 0.0

    def keep_drafting(self, stats: RequestStats, plan: PaidPlan, i: int) -> Callable[[float, int], bool]:
        """For `DraftRequest.keep_drafting`: (path probability, depth) -> is one more round worth it?"""
        record, own = self.acceptance.records[plan.drafter], stats.own[plan.drafter]
        return StoppingRule(record, own, plan.min_path_probs[i], plan.rounds[i])

    def raw_path_probs(self, stats: RequestStats, plan: PaidPlan, i: int) -> list[float]:
        """The same as numbers in the drafter's own probabilities, for `DraftRequest.min_path_probs`."""
        record, factor = self.acceptance.records[plan.drafter], stats.own[plan.drafter].factor
        return record.raw_path_probs(plan.min_path_probs[i][: plan.rounds[i]], factor)

    def record_plan(self, plan: PaidPlan) -> None:
        """This is what the step does."""
        if self._step is not None:
            known = len(self._step.stats) == 1 and self.host.timed_paid(1) and not any(plan.start_s) and plan.rate < inf
            self._step.paid, self._step.rate = True, plan.rate if known else 0.0
            for s in self._step.stats:
                s.explored_paid_s += plan.lost_s
        self._why = f"{self._why}, {plan.why}" if self._why else plan.why

    @property
    def last_why(self) -> str:
        """Why the step that runs drafts as it does."""
        return self.decisions[-1].why if self.decisions else ""

    # -- statistics ----------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Cost curves in seconds, acceptance by drafter, and the last decisions."""
        return {
            "target_s": self.target.points(),
            "round_s": {name: curve.points() for name, curve in self.drafters.items()},
            "drafters": self.acceptance.stats(),
            "decisions": [decision._asdict() for decision in self.decisions],
        }


def _pause(stats: RequestStats, drafter: str) -> None:
    """A paid drafter does not pay for this sequence: it is planned for again some tokens later."""
    stats.own[drafter].skip_until = stats.tokens + max(PAID_PAUSE_TOKENS, int(PAID_PAUSE_SHARE * stats.tokens))
