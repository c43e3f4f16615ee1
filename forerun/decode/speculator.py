"""The drafting side of a step: runs the drafters of each sequence, merges their drafts, and records the outcome.

Each step `draft` runs the free drafters, then the paid ones where the controller expects them to pay, merges the trees
and keeps the nodes that pay to verify; `record_outcome` compares all drafts with the tokens that came. A drafter that
fails is dropped for the requests it failed on. Knows drafters and the controller; not the scheduler, the target's
logits or how drafts are accepted.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import replace
from typing import Any

from forerun.core import Draft, SamplingParams, Tally, Usage, Verdict
from forerun.decode import tree
from forerun.decode.control.controller import ASKED_SEQUENCES, Controller, PaidPlan
from forerun.decode.control.cost import CostCurve
from forerun.decode.control.kinds import kind_of
from forerun.decode.draft_context import DraftContext
from forerun.decode.drafter_pool import (
    DrafterPool,
    DraftTask,
    SpeculationState,
    drafted_batch,
    free_request,
    mean_context,
    on_device_rows,
    time_target,
)
from forerun.decode.drafters import Drafter, DraftRequest
from forerun.decode.drafters.base import MAX_CATCH_UP_TOKENS
from forerun.decode.drafters.grammar import prune
from forerun.decode.sampling import Context
from forerun.decode.verifiers import make_verifier

log = logging.getLogger("forerun")

MAX_COVERED = 0.5  # probability that a free draft has the next token, from which no other drafter runs beside it
MIN_WAIT_S = 20e-6  # for a step in flight: the host that waits less was late, and what ran beside the step was not free
# Steps of one sequence that a plan holds for: acceptance is a mean of some twenty outcomes and changes less than that,
# and planning takes the host 0.2 ms beside an H200's step of 4
PLAN_STEPS = 4
MAX_PAUSE_STEPS = 31  # of a batch in which no draft paid: asking took 3 to 6% of steps of 4 to 16 (docs/log.md)


class Speculator:
    def __init__(self, ctx: DraftContext, controller: Controller | None = None) -> None:
        self.ctx = ctx
        self.controller = controller or Controller(CostCurve({1: 1.0}), {})
        self.drafter_pool = DrafterPool(ctx, self.controller)
        if controller is None:
            self.controller.target = time_target(ctx, self.drafter_pool.max_timed_tokens)
        self.totals = Usage()
        self._turn, self._beside_s = 0, 0.0  # steps in flight so far; what drafters took beside the last one
        self._left = False  # a free draft made beside it is why the coming step was not launched
        self._pause, self._pauses = 0, 0  # steps until a batch is asked again; of the last pause
        self.drafter_pool.prepare(SamplingParams())

    def draft_remotely(self, name: str) -> None:
        """`auto` drafts with this drafter on another machine, too."""
        self.ctx.remote_drafters.append(name)
        self.drafter_pool.prepare(SamplingParams())

    # -- requests ------------------------------------------------------------------------------------------------------

    def check(self, params: SamplingParams) -> None:
        """Raise where a request names a drafter or a verifier that does not exist or cannot work here."""
        spec = params.speculation
        if spec.off and spec.verify == "auto" and not spec.bound:
            return
        make_verifier(spec)
        self.drafter_pool.check(params)

    def open(self, seq_id: int, context: Context, usage: Usage) -> SpeculationState | None:
        """Speculation for a new sequence; None where it is off."""
        if context.params.speculation.off:
            return None
        self._pause, self._pauses = 0, 0
        verifier, names = make_verifier(context.params.speculation), self.drafter_pool.available(context.params)
        sampled = (
            verifier.uses_proposals
            and not context.params.greedy
            and any(self.drafter_pool[name].can_sample for name in names)
        )
        params, prompt = context.params, context.tokens[: context.num_prompt]
        kind = kind_of(prompt, self.ctx.tokenizer) + ("" if params.greedy else ", sampled")
        named = params.speculation.drafter != "auto"
        stats = self.controller.new_request(kind, len(prompt), params.max_tokens, named)
        return SpeculationState(seq_id, context, usage, names, verifier, stats, sampled)

    # -- a step --------------------------------------------------------------------------------------------------------

    def should_draft(self, batch: list[SpeculationState], launches: bool = False) -> bool:
        """Whether this step drafts at all. Called once before every step that could and was not launched ahead."""
        context = sum(len(state.context.tokens) for state in batch) // len(batch)
        stats, names = [state.stats for state in batch], [state.drafter_names for state in batch]
        pays = self.controller.should_draft(stats, names, context, launches)
        return pays or any(state.fixed_depth for state in batch)

    def passes(self, sequences: int) -> bool:
        """Whether a step of so many is launched ahead without asking: in large batches deciding takes the host longer
        than a step, and drafts rarely pay there; a batch in which none paid is asked ever more rarely. Called once
        before every step that may be."""
        self._turn += 1
        if self._pause > 0 and sequences > 1:
            self._pause -= 1
            return True
        return sequences > ASKED_SEQUENCES and self._turn % (sequences // ASKED_SEQUENCES) > 0

    def should_leave(self, tasks: list[DraftTask]) -> bool:
        """Whether the step after the one in flight drafts, so that it must not be launched yet. Free drafters run
        beside the step in flight, as far as the host would else wait for it; in large batches sequences take turns.
        For one sequence paid ones are planned for whether it waits or not, which is rare where they do not pay; for
        a batch that takes as many times as long."""
        start, context = time.perf_counter(), mean_context(tasks)
        fixed = any(task.spec_state.fixed_depth for task in tasks)
        idle_s = self.controller.idle_s([task.spec_state.stats for task in tasks], context)
        if not idle_s and not fixed and len(tasks) > 1 and not on_device_rows(tasks):  # nothing could be drafted
            self._left = self.controller.record_plain(context, "the host has no time for drafts beside a step")
            return False
        end, first = start + idle_s, self._turn % len(tasks)
        self.draft_beside([*tasks[first:], *tasks[:first]], end)
        with_room = [task for task in tasks if task.max_nodes > 0]
        for task in with_room:
            task.draft = tree.below_likeliest(task.draft)
        pays = fixed
        for drafter, own in self._by_drafter(with_room, free=False):
            in_time = len(tasks) == 1 or on_device_rows(tasks) or time.perf_counter() < end
            pays = pays or bool(in_time and self._plan(drafter, own, context, 0.0) is not None)
        self._left = not pays and self.controller.should_leave(drafted_batch(tasks, context, 0.0))
        self._beside_s = time.perf_counter() - start
        self._pauses = 0 if pays or self._left else min(MAX_PAUSE_STEPS, 2 * self._pauses + 1)
        self._pause = self._pauses
        return pays or self._left

    def draft_beside(self, tasks: list[DraftTask], end: float = math.inf) -> None:
        """Free drafters run beside the step in flight until this time, and their drafts are merged."""
        for task in tasks:
            self._open_step(task.spec_state)
            if task.max_nodes > 0 and not task.spec_state.sampled and time.perf_counter() < end:
                self._run_free([task], beside=True)
                task.spec_state.beside_at = len(task.spec_state.context.tokens)
        self._merge([task for task in tasks if task.max_nodes > 0])

    def _open_step(self, state: SpeculationState) -> None:
        self._follow(state)
        state.drafts, state.free_run_s, state.beside, state.beside_at = [], {}, [], -1
        state.refine_kind(self.ctx.tokenizer)

    @staticmethod
    def _follow(state: SpeculationState) -> None:
        """What its last drafts were worth shows though none is verified: the step is launched without them."""
        if state.drafts and not state.followed:
            state.followed, state.followed_from = state.drafts, len(state.context.tokens)
        state.drafts = []

    def draft(self, tasks: list[DraftTask]) -> PaidPlan | None:
        """Give each task a draft, which may be empty; or none, and the plan of steps that draft on the device."""
        start = time.perf_counter()
        context = mean_context(tasks)
        with_room = [task for task in tasks if task.max_nodes > 0]
        fresh = [task for task in with_room if not self._take_beside(task)]
        for task in tasks:
            self._open_step(task.spec_state)
        for task in tasks if self._left else ():
            task.spec_state.stats.gain.begin_left()
        self._run_free(fresh)
        self._left = False
        self._merge(with_room)
        spent_s = time.perf_counter() - start
        unasked = [task for task in with_room if task not in fresh and not len(task.draft)]
        if len(with_room) == len(tasks) and (plan := self.plan_on_device(tasks, spent_s, unasked)):
            for task in tasks:
                task.draft = Draft()
                self._follow(task.spec_state)
            return plan
        before = time.perf_counter()
        forwards_s = self._run_paid(with_room, context, start)
        self._select(tasks, context, time.perf_counter() - start)
        now = time.perf_counter()
        seconds = now - start
        self.controller.record_drafting(seconds, None if forwards_s is None else now - before - forwards_s)
        self.totals.draft_s += seconds
        for task in tasks:
            task.spec_state.usage.draft_s += seconds
        return None

    def plan_on_device(
        self, tasks: list[DraftTask], spent_s: float, unasked: list[DraftTask] | None = None
    ) -> PaidPlan | None:
        """The plan of steps that draft without the host, where these can, that beats plain decoding and the drafts that
        the tasks have. Before the draft model reads, which takes longer than free drafters do, those that are `unasked`
        since their last drafts were wrong are asked."""
        if not on_device_rows(tasks):
            return None
        context, ((drafter, own),) = mean_context(tasks), self._by_drafter(tasks, free=False)
        plan = self._plan(drafter, own, context, 0.0)
        if plan is None or len(own) < len(tasks) or not all(plan.rounds):
            return None
        if unasked and any(plan.start_s):
            self._run_free(unasked, every=True)
            self._merge(unasked)
        return None if self.controller.free_is_better(drafted_batch(tasks, context, spent_s), plan) else plan

    def _take_beside(self, task: DraftTask) -> bool:
        """What free drafters drafted beside the step whose token has just come, as far as that token agrees: they need
        not run again. False where they did not run."""
        state = task.spec_state
        if state.beside_at + 1 != len(state.context.tokens):
            return False
        for draft in state.beside:
            left = tree.below(draft, state.context.tokens[-1])
            if len(left):
                task.candidates.append(replace(left, probs=self.controller.calibrate(state.stats, left)))
        return True

    def _run_free(self, tasks: list[DraftTask], beside: bool = False, every: bool = False) -> None:
        """`beside` a step in flight it costs nothing, and its outcome counts only as far as plain steps show it.
        `every` drafter runs, whether it is expected to pay or not."""
        least = self.controller.min_grown_prob() if tasks else 0.0
        every, runs = every or beside or self._left, self.controller.should_run
        for drafter, own in self._by_drafter(tasks, free=True):
            able = [t for t in own if drafter.can_sample or not t.spec_state.sampled]
            chosen = [
                t
                for t in able
                if (every and t.covered < MAX_COVERED)
                or runs(t.spec_state.stats, drafter.name, t.covered, drafter.elsewhere and t.offered)
            ]
            if not chosen:
                continue
            if slowdown := self.controller.slowdowns.get(drafter.name):
                slowdown.round_s, slowdown.way_s, slowdown.rounds = drafter.turn_costs()
            requests = [free_request(self.controller, drafter, task, least, beside) for task in chosen]
            start = time.perf_counter()
            drafts = self.drafter_pool.propose(drafter, chosen, requests)
            seconds = (time.perf_counter() - start) / len(chosen)
            for task, request, draft in zip(chosen, requests, drafts, strict=True):
                if slowdown and slowdown.rounds.tokens > 1 and len(draft):
                    task.spec_state.stats.own[drafter.name].asked = min(request.max_depth, slowdown.rounds.tokens)
                counted_s = drafter.counted_s(task.spec_state.seq_id, seconds)
                if not beside and counted_s is not None:
                    task.spec_state.free_run_s[drafter.name] = counted_s
                self._add_candidate(task, draft, beside)

    def _by_drafter(self, tasks: list[DraftTask], free: bool) -> list[tuple[Drafter, list[DraftTask]]]:
        """The free or the paid drafters of these tasks, each with the tasks that use it."""
        names = dict.fromkeys(name for task in tasks for name in task.spec_state.drafter_names)
        drafters = [self.drafter_pool[name] for name in names]
        return [
            (drafter, [task for task in tasks if drafter.name in task.spec_state.drafter_names])
            for drafter in drafters
            if drafter.free == free
        ]

    def _run_paid(self, tasks: list[DraftTask], context: int, start: float) -> float | None:
        """Of the drafters that run a model the one that the controller expects most of, where it pays. Returns what its
        forwards took; None: none ran."""
        options, forwards_s = [], None
        for drafter, own in () if on_device_rows(tasks) else self._by_drafter(tasks, free=False):  # there or not at all
            plan = self._plan(drafter, own, context, time.perf_counter() - start)
            if plan is not None:
                options.append((plan.rate, drafter, own, plan))
        drafted: set[int] = set()
        for _, drafter, own, plan in sorted(options, key=lambda option: -option[0]):
            rounds = [n if t.spec_state.seq_id not in drafted else 0 for t, n in zip(own, plan.rounds, strict=True)]
            chosen = [task for task, n in zip(own, rounds, strict=True) if n]
            requests = [task.request(n) for task, n in zip(own, rounds, strict=True) if n]
            if not chosen:
                continue
            self.controller.record_plan(plan)
            drafted |= {task.spec_state.seq_id for task in chosen}
            for task, request in zip(chosen, requests, strict=True):
                request.candidates = task.draft
                if not task.spec_state.fixed_depth:
                    self._limit_rounds(drafter, task, request, plan, own.index(task))
            began = time.perf_counter()
            drafts = self.drafter_pool.propose(drafter, chosen, requests)
            for task, request, draft in zip(chosen, requests, drafts, strict=True):
                if drafter.tokens_per_round > 1 and len(draft):
                    task.spec_state.stats.own[drafter.name].asked = request.max_depth
                self._add_candidate(task, draft)
            rounds_s = sum(ran.seconds for ran in drafter.rounds)
            seconds = time.perf_counter() - began - rounds_s
            reads = any(n and s for s, n in zip(plan.start_s, rounds, strict=False))
            forwards_s = (forwards_s or 0.0) + rounds_s + (seconds if reads else 0.0)
            if foreseen_s := sum(s for s, n in zip(plan.start_s, rounds, strict=False) if n):
                self.controller.observe_start(drafter.name, foreseen_s, seconds)
            for ran in drafter.rounds:
                self.controller.observe_round(drafter.name, ran.tokens, ran.sequences, context, ran.seconds)
            self._merge(chosen)
        return forwards_s

    def _limit_rounds(self, drafter: Drafter, task: DraftTask, request: DraftRequest, plan: PaidPlan, i: int) -> None:
        """Give a paid drafter its stopping rule."""
        stats = task.spec_state.stats
        if drafter.stops_on_device:
            request.min_path_probs = self.controller.raw_path_probs(stats, plan, i)
        else:
            request.keep_drafting = self.controller.keep_drafting(stats, plan, i)

    def _plan(self, drafter: Drafter, tasks: list[DraftTask], context: int, spent_s: float) -> PaidPlan | None:
        """What a drafter that runs a model should do; a depth that a request fixes is not planned for."""
        stats, fixed = [task.spec_state.stats for task in tasks], [task.spec_state.fixed_depth for task in tasks]
        plan = None
        if not all(fixed) and any(s.tokens >= s.own[drafter.name].skip_until for s in stats):
            curve = self.controller.drafters[drafter.name]
            catch_up = [self.drafter_pool.catch_up_tokens(drafter, task) for task in tasks]
            unread = [tokens if tokens > drafter.max_unread_tokens else 0 for tokens in catch_up]
            rows = on_device_rows(tasks)
            alone = tasks[0] if len(tasks) == 1 and not unread[0] and (rows or not len(tasks[0].draft)) else None
            if alone is not None and (held := alone.held_plan(drafter.name)) is not None:
                return held
            batch = drafted_batch(tasks, context, spent_s, rows)
            plan = self.controller.plan_rounds(batch, drafter.name, [curve.start_s(tokens) for tokens in unread])
            if plan is not None:
                plan.start_s = [curve.start_s(min(tokens, MAX_CATCH_UP_TOKENS)) for tokens in unread]
            if alone is not None and plan is not None and not plan.lost_s:
                alone.spec_state.plan, alone.spec_state.plan_steps = plan, PLAN_STEPS - 1
        if any(fixed):
            rounds = plan.rounds if plan is not None else [0] * len(tasks)
            stop = plan.min_path_probs if plan is not None else [[] for _ in tasks]
            rounds = [depth or n for depth, n in zip(fixed, rounds, strict=True)]
            plan = PaidPlan(drafter.name, rounds, math.inf, stop, f"{drafter.name} at a fixed depth")
        return plan

    def _add_candidate(self, task: DraftTask, draft: Draft, beside: bool = False) -> None:
        """Add a draft to a task, with calibrated probabilities; a sampled draft becomes the task's draft as it is."""
        state = task.spec_state
        if state.context.constraint is not None and not draft.proposals:
            try:
                draft = prune(draft, state.context.constraint)
            except Exception as error:  # of this sequence's grammar: it decodes without this draft
                log.warning("a draft was dropped: its grammar raised %s", type(error).__name__)
                return
        if not len(draft):
            return
        (state.beside if beside else state.drafts).append(draft)
        if draft.proposals:
            task.draft = draft
            return
        task.candidates.append(replace(draft, probs=self.controller.calibrate(state.stats, draft, beside)))

    def _merge(self, tasks: list[DraftTask]) -> None:
        """One tree of all candidates of each task."""
        for task in tasks:
            if not task.draft.proposals:
                drafters = [self.drafter_pool[draft.sources[0]] for draft in task.candidates]
                task.draft = tree.merge(task.candidates, [not each.free or each.can_sample for each in drafters])

    def _select(self, tasks: list[DraftTask], context: int, spent_s: float) -> None:
        """Keep the nodes that pay to verify."""
        drafts = [task.draft for task in tasks]
        if not any(len(draft) for draft in drafts):
            self.controller.record_plain(context, "nothing was drafted")
            return
        selected = self.controller.select(drafted_batch(tasks, context, spent_s))
        for task, nodes in zip(tasks, selected, strict=True):
            if task.draft.proposals:
                continue
            if depth := task.spec_state.fixed_depth:
                nodes = tree.most_probable_nodes(task.draft, task.max_nodes, depth)
            task.draft = tree.subtree(task.draft, nodes)

    # -- the outcome ---------------------------------------------------------------------------------------------------

    def observe(self, drafts: list[Draft], context: int, seconds: float, waited_s: float | None = None) -> None:
        """What a step of pure decoding took: one token of each sequence, and the nodes of its draft. `waited_s`: of one
        that was launched, what the host waited for it if that was ahead of the host, else 0."""
        size = len(drafts) + sum(map(len, drafts))
        branches = sum(parent != node - 1 for draft in drafts for node, parent in enumerate(draft.parents))
        beside_s, self._beside_s = self._beside_s if (waited_s or 0.0) > MIN_WAIT_S else 0.0, 0.0
        idle_s = waited_s and waited_s + beside_s
        elsewhere = self.drafter_pool.computed_elsewhere()
        now = time.perf_counter()
        self.controller.observe_forward(size, len(drafts), context, branches, seconds, now, idle_s, elsewhere)
        self.totals.steps += len(drafts)
        self.totals.verify_s += seconds

    def record_plain(self, states: list[SpeculationState]) -> None:
        """`record_outcome` of a step that was launched ahead without a draft, before its tokens are appended: drafts
        that are compared with them get them by `resolve_beside`."""
        self.controller.record_single([state.stats for state in states])
        for state in states:
            state.count_step(0, self.controller.last_why)

    def record_outcome(self, spec_state: SpeculationState, draft: Draft, verdict: Verdict, emitted: list[int]) -> None:
        """Count what was drafted and accepted, and learn from every draft of the step, verified or not."""
        path = verdict.path[: len(emitted)]  # an answer may end inside it
        stats = spec_state.stats
        self.controller.record_tokens(stats, len(emitted))
        spec_state.count_step(len(path), self.controller.last_why)
        self.resolve_beside(spec_state, len(emitted))
        if not spec_state.free_run_s and not spec_state.drafts and not len(draft):
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
            spec_state.usage.distance = spec_state.verifier.spent
        accepted = {each.sources[0]: tree.accepted_length(each, emitted) for each in spec_state.drafts}
        # Accepted tokens that drafters before it had right, a model's too: only what goes further counts for a drafter.
        models = (name for name in accepted if name in self.controller.drafters)
        covered = min(len(path), max((accepted[name] for name in models), default=0))
        for name, seconds in spec_state.free_run_s.items():
            gained = min(accepted.get(name, 0), len(path))  # what was not verified is not gained
            own_nodes = draft.sources.count(name)
            self.controller.record_run(stats, name, max(0, gained - covered), seconds, own_nodes)
            covered = max(covered, gained)
        for each in spec_state.drafts:
            self.controller.record_draft(stats, each, emitted, len(path))
        spec_state.drafts, spec_state.free_run_s = [], {}

    def resolve_beside(self, state: SpeculationState, new: int) -> None:
        """Learn from drafts that were made beside steps in flight, once a token refutes them or all of theirs came; the
        next ones are followed from then on, as tokens that several predicted are one outcome."""
        if not state.followed and state.beside and state.beside_at + new == len(state.context.tokens):
            state.followed, state.followed_from = state.beside, len(state.context.tokens) - new
            state.stats.gain.follow()
        if not state.followed:
            return
        came = state.context.tokens[state.followed_from :]
        right = [tree.accepted_length(draft, came) for draft in state.followed]
        if max(right) < len(came):
            for draft, accepted in zip(state.followed, right, strict=True):
                self.controller.record_draft(state.stats, draft, came, accepted)
            self.controller.record_followed(state.stats, max(right))
            state.followed = []

    def finish(self, spec_state: SpeculationState) -> None:
        """A request ended."""
        self.controller.record_end(spec_state.stats)
        self.drafter_pool.finish(spec_state)

    def stats(self) -> dict[str, Any]:
        """Drafted and accepted tokens of all requests so far, and the controller's measurements."""
        t = self.totals
        by_drafter = {name: {"drafted": d.drafted, "accepted": d.accepted} for name, d in t.drafters.items()}
        counted = {name: getattr(t, name) for name in ("steps", "drafted", "accepted", "draft_s", "verify_s")}
        beside = self.drafter_pool.figures()
        return {**counted, "drafters": by_drafter, "figures": beside, "control": self.controller.stats()}
