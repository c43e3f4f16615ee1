"""Speculation in one place: who guesses for a sequence, which guesses are checked, and what is learnt from the outcome.

Each step `draft` asks the free drafters, lets the controller say whether a paid one is worth its forwards, joins the
trees and keeps the nodes that pay; `settle` tells everybody what came of it. A drafter that fails is dropped for the
requests it failed on, which go on without it. Knows drafters and the controller; not the scheduler, the target's logits
or how guesses are accepted.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from forerun.core import Draft, SamplingParams, Tally, Usage, Verdict
from forerun.decode import tree
from forerun.decode.control.controller import Controller
from forerun.decode.control.cost import CostCurve
from forerun.decode.draft_context import DraftContext
from forerun.decode.drafter_pool import DrafterPool
from forerun.decode.drafters import Drafter, DraftRequest
from forerun.decode.drafters.grammar import prune
from forerun.decode.sampling import Context
from forerun.decode.state import DraftTask, SpeculationState
from forerun.decode.verifiers import make_verifier

THINKING = 0.02  # share of time that may go into drafts that come to nothing
PATIENCE, CROWD = 4, 16  # empty steps before a rest; sequences from which one is enough
LONGEST_REST = 64
ENOUGH = 8.0  # tokens that one free drafter can expect to be right about: then no other is asked
MODEL_WEIGHT = 4.0  # of a model's word against a free drafter's, where both guess at the same place


class Speculator:
    def __init__(self, ctx: DraftContext, controller: Controller | None = None) -> None:
        self.ctx = ctx
        self.controller = controller or Controller(CostCurve({1: 1.0}), {})
        self.drafter_pool = DrafterPool(ctx, self.controller)
        if controller is None:
            self.controller.target = self._target_costs()
        self.totals = Usage()
        self._empty, self._rest = 0, 0  # steps in a row without a draft; steps to come without an attempt
        self._made = 0  # tokens since the last step began
        self.drafter_pool.prepare(SamplingParams())

    def _target_costs(self) -> CostCurve:
        time_forward, limit = self.ctx.runner.time_forward, self.drafter_pool.limit
        curve = CostCurve.within(lambda tokens, context: time_forward(tokens, context, repeats=2), limit)
        nodes, context = 8, min(256, limit - 9)
        if context > 0:
            chain, star = (time_forward(1 + nodes, context, 3, branches) for branches in (0, nodes))
            curve.per_branch = max(0.0, star - chain) / (nodes - 1)
        return curve

    # -- requests ------------------------------------------------------------------------------------------------------

    def check(self, params: SamplingParams) -> None:
        """Reject a request that names a drafter or a verifier there is none of."""
        make_verifier(params.speculation)
        self.drafter_pool.check(params)

    def open(self, seq_id: int, context: Context, usage: Usage) -> SpeculationState | None:
        """Speculation for a new sequence; None where it is off."""
        if context.params.speculation.off:
            return None
        verifier, names = make_verifier(context.params.speculation), self.drafter_pool.able(context.params)
        self._empty = self._rest = 0  # it may be more predictable than those before
        draws = verifier.draws and not context.params.greedy and any(self.drafter_pool[name].draws for name in names)
        return SpeculationState(seq_id, context, usage, names, verifier, self.controller.open(), draws)

    # -- a step --------------------------------------------------------------------------------------------------------

    def draft(self, turns: list[DraftTask]) -> None:
        """Give each turn a draft, maybe an empty one."""
        start = time.perf_counter()
        context = sum(len(turn.spec_state.context.tokens) for turn in turns) // len(turns)
        for turn in turns:
            turn.spec_state.proposed, turn.spec_state.asked = [], {}
        able = [turn for turn in turns if turn.nodes > 0]
        self._ask_free([turn for turn in able if not turn.spec_state.at_random])
        self._join(able)
        paid_s = self._ask_paid(able, context)
        self._select(turns, context, paid_s)
        seconds = time.perf_counter() - start
        self._settle_down(turns, seconds)
        self.totals.draft_s += seconds
        for turn in turns:
            turn.spec_state.usage.draft_s += seconds

    def rests(self, batch: list[SpeculationState]) -> bool:
        """Whether to decode plainly in this step without thinking about it. To be asked once a step."""
        allowed = self.controller.allows(len(batch), self._made, time.perf_counter())
        self._made = 0
        self._rest -= self._rest > 0
        named = any(g.context.params.speculation.drafter != "auto" for g in batch)  # who names one wants it to guess
        return self._rest > 0 or not (allowed or named)

    def _settle_down(self, turns: list[DraftTask], seconds: float) -> None:
        """Where thinking about drafts takes long for a step and comes to nothing, think less often."""
        self._empty = 0 if any(len(turn.draft) for turn in turns) else self._empty + 1
        share = seconds / self.controller.target.seconds(len(turns), len(turns))
        if self._empty >= (PATIENCE if len(turns) < CROWD else 1):
            self._rest = min(LONGEST_REST, int(share / THINKING))

    def _ask_free(self, turns: list[DraftTask]) -> None:
        for name in dict.fromkeys(name for turn in turns for name in turn.spec_state.names):
            drafter = self.drafter_pool[name]
            mine = [turn for turn in turns if name in turn.spec_state.names]
            if not drafter.free or not mine or not self.controller.asks(name, len(turns)):
                continue
            start = time.perf_counter()
            drafts = self.drafter_pool.propose(drafter, mine, [turn.ask(turn.nodes) for turn in mine])
            seconds = (time.perf_counter() - start) / len(mine)
            usual = all(turn.spec_state.usage.steps > 1 for turn in mine)  # the first time a drafter reads the prompt
            for turn, draft in zip(mine, drafts, strict=True):
                if usual:
                    turn.spec_state.asked[name] = seconds
                self._offer(turn, draft)
            if len(turns) == 1 and self._foresees(turns[0]):
                return

    @staticmethod
    def _foresees(turn: DraftTask) -> bool:
        """Whether the last offer goes so far that others would only take time."""
        return bool(turn.offers) and sum(tree.path_probs(turn.offers[-1])) > min(ENOUGH, 0.7 * turn.nodes)

    def _ask_paid(self, turns: list[DraftTask], context: int) -> float:
        """Drafters that run a model, where the controller thinks it pays; returns the seconds that took."""
        start = time.perf_counter()
        for name in dict.fromkeys(name for turn in turns for name in turn.spec_state.names):
            drafter = self.drafter_pool[name]
            mine = [turn for turn in turns if name in turn.spec_state.names]
            if drafter.free:
                continue
            depths = self._depths(drafter, mine, context)
            chosen = [turn for turn, depth in zip(mine, depths, strict=True) if depth]
            asks = [turn.ask(depth) for turn, depth in zip(mine, depths, strict=True) if depth]
            for turn, ask in zip(chosen, asks, strict=True):
                ask.offered = turn.draft
                if not turn.spec_state.depth:
                    self._limit_cost(drafter, turn, ask, len(chosen), context)
            for turn, draft in zip(chosen, self.drafter_pool.propose(drafter, chosen, asks), strict=True):
                self._offer(turn, draft)
            for ran in drafter.rounds if chosen else ():
                self.controller.observe_round(name, ran.tokens, ran.sequences, context, ran.seconds)
            self._join(chosen)
        return time.perf_counter() - start

    def _limit_cost(self, drafter: Drafter, turn: DraftTask, ask: DraftRequest, sequences: int, context: int) -> None:
        """Tell a paid drafter when to stop."""
        stats = turn.spec_state.stats
        if drafter.on_device:
            ask.least = self.controller.least(stats, drafter.name, sequences, context)
        else:
            ask.worth = self.controller.worth(stats, drafter.name, sequences, context)

    def _depths(self, drafter: Drafter, turns: list[DraftTask], context: int) -> list[int]:
        curve = self.controller.drafters[drafter.name]
        behind = [self.drafter_pool.behind(drafter, turn) for turn in turns]
        depths = self.controller.depth(
            [turn.spec_state.stats for turn in turns],
            [turn.draft for turn in turns],
            [turn.draft.probs for turn in turns],
            drafter.name,
            [turn.nodes for turn in turns],
            context,
            start_s=[curve.seconds(tokens) if tokens > 8 else 0.0 for tokens in behind],
            remaining=[turn.spec_state.remaining for turn in turns],
        )
        return [turn.spec_state.depth or depth for turn, depth in zip(turns, depths, strict=True)]

    def _offer(self, turn: DraftTask, draft: Draft) -> None:
        """Join a drafter's guesses to what a turn has, with probabilities that experience has corrected."""
        g = turn.spec_state
        if g.context.constraint is not None and not draft.proposals:
            draft = prune(draft, g.context.constraint)
        if not len(draft):
            return
        g.proposed.append(draft)
        if draft.proposals:
            turn.draft = draft
            return
        turn.offers.append(replace(draft, probs=self.controller.calibrate(g.stats, draft)))

    def _join(self, turns: list[DraftTask]) -> None:
        """One tree of everything offered to each turn. A model has seen the whole text, so its word counts for more."""
        for turn in turns:
            if not turn.draft.proposals:
                weights = [1.0 if self.drafter_pool[draft.sources[0]].free else MODEL_WEIGHT for draft in turn.offers]
                turn.draft = tree.merge(turn.offers, weights)

    def _select(self, turns: list[DraftTask], context: int, spent_s: float) -> None:
        drafts = [turn.draft for turn in turns]
        if not any(len(draft) for draft in drafts):
            return
        probs = [draft.probs for draft in drafts]
        stats = [turn.spec_state.stats for turn in turns]
        kept = self.controller.select(stats, drafts, probs, [turn.nodes for turn in turns], context, spent_s)
        for turn, nodes in zip(turns, kept, strict=True):
            if not turn.draft.proposals:
                deep = turn.spec_state.depth
                turn.draft = tree.keep(turn.draft, tree.likeliest(turn.draft, turn.nodes, deep) if deep else nodes)

    # -- the outcome ---------------------------------------------------------------------------------------------------

    def observe(self, drafts: list[Draft], context: int, seconds: float) -> None:
        """What a step of pure decoding took: one token of each sequence, and the nodes of its draft."""
        curve, size = self.controller.target, len(drafts) + sum(map(len, drafts))
        branches = sum(parent != node - 1 for draft in drafts for node, parent in enumerate(draft.parents))
        curve.observe(size, len(drafts), context, seconds - branches * curve.per_branch)
        self.totals.steps += len(drafts)
        self.totals.verify_s += seconds

    def settle(self, spec_state: SpeculationState, draft: Draft, verdict: Verdict, emitted: list[int]) -> None:
        """Book a draft's outcome, and learn from it: every guess that was made, checked or not."""
        path = verdict.path[: len(emitted)]  # an answer may end inside it
        self._made += len(emitted)
        spec_state.usage.lengths.append(len(path))
        if not spec_state.asked and not spec_state.proposed:
            return
        for usage in (spec_state.usage, self.totals):
            usage.drafted += len(draft)
            usage.accepted += len(path)
            for node, source in enumerate(draft.sources):
                tally = usage.drafters.setdefault(source, Tally())
                tally.drafted += 1
                tally.accepted += node in path
        if len(draft):
            spec_state.usage.verifier = spec_state.verifier.name
            spec_state.usage.lossless = spec_state.verifier.lossless
        gained = {proposed.sources[0]: tree.came_true(proposed, emitted) for proposed in spec_state.proposed}
        known = 0  # to those who were asked before: only what goes further is a drafter's own merit
        for name, seconds in spec_state.asked.items():
            self.controller.asked(name, seconds, max(0, gained.get(name, 0) - known))
            known = max(known, gained.get(name, 0))
        for proposed in spec_state.proposed:
            self.controller.learn(spec_state.stats, proposed, emitted)
        spec_state.proposed, spec_state.asked = [], {}

    def figures(self) -> dict[str, Any]:
        """Guesses of all requests so far, and what the controller goes by."""
        t = self.totals
        by_drafter = {name: {"drafted": d.drafted, "accepted": d.accepted} for name, d in t.drafters.items()}
        return {
            "steps": t.steps,
            "drafted": t.drafted,
            "accepted": t.accepted,
            "drafters": by_drafter,
            "draft_s": t.draft_s,
            "verify_s": t.verify_s,
            "control": self.controller.report(),
        }
