"""The drafters of one engine: made when first needed, called with their errors contained, notified when requests end.

A drafter may come from a user. One that raises or returns a malformed draft is dropped for the request it failed on,
with one warning in the log; other requests keep it. `SpeculationState` is what is known of one sequence, `DraftTask`
its part of a step. Knows drafters and what their rounds cost; not which drafts are verified.
"""

from __future__ import annotations

import logging
import math
from array import array
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch

from forerun.core import Draft, SamplingParams, Usage
from forerun.core.progress import counter
from forerun.decode.control.acceptance import ELSEWHERE, STATED_OUTCOMES
from forerun.decode.control.controller import Controller, DraftedBatch, PaidPlan, RequestStats
from forerun.decode.control.cost import PROBED_STEPS, TIMED_CONTEXTS, TIMED_STARTS, TIMED_TOKENS, CostCurve, Slowdown
from forerun.decode.control.kinds import kind_of
from forerun.decode.control.waiting import MAX_TURN_DEPTH
from forerun.decode.draft_context import DraftContext
from forerun.decode.drafters import Drafter, DraftRequest, find, registered
from forerun.decode.drafters.model import ModelDrafter
from forerun.decode.sampling import Context
from forerun.decode.tree import path_probs
from forerun.decode.verifiers.base import Verifier
from forerun.errors import BadRequest, ForerunError, OutOfPages
from forerun.text.tokenizer import Tokenizer

log = logging.getLogger("forerun")

KIND_TOKENS = 16  # of an answer, after which it shows of what kind it is
AUTO_FREE_DRAFTERS = ("grammar", "lookup", "copy", "suffix")  # of `auto`, in order, beside a draft model's drafter


@dataclass(eq=False)
class SpeculationState:
    """A sequence's drafters, verifier and acceptance record."""

    seq_id: int
    context: Context
    usage: Usage
    drafter_names: list[str]  # a drafter that fails on this sequence is removed
    verifier: Verifier
    stats: RequestStats
    sampled: bool  # whether drafters that can sample from their own distribution should
    drafts: list[Draft] = field(default_factory=list)  # of this step, as proposed
    free_run_s: dict[str, float] = field(default_factory=dict)  # by free drafter, in this step
    beside: list[Draft] = field(default_factory=list)  # of free drafters, made beside the step in flight,
    beside_at: int = -1  # and of how many tokens; -1: none ran
    followed: list[Draft] = field(default_factory=list)  # such drafts that no token has refuted yet,
    followed_from: int = 0  # and the place of their first token
    kind_final: bool = False  # whether its kind is that of the answer's own first tokens
    plan: PaidPlan | None = None  # of a paid drafter that pays, for it alone,
    plan_steps: int = 0  # which holds for so many more steps

    @property
    def fixed_depth(self) -> int:
        """The depth that the request fixes; 0 where the controller decides."""
        return self.context.params.speculation.depth

    @property
    def waits(self) -> bool:
        """Whether drafts made beside steps in flight are compared with the tokens that come."""
        return bool(self.beside or self.followed)

    def count_step(self, accepted: int, why: str) -> None:
        """A step of it, which drafted so or not at all, and why."""
        usage = self.usage
        usage.lengths.append(accepted)
        usage.plain_s = self.stats.plain_s
        usage.decisions[why] = usage.decisions.get(why, 0) + 1

    def refine_kind(self, tokenizer: Tokenizer | None) -> None:
        """A question in prose may be answered in code: an answer's first tokens show it."""
        if self.kind_final or self.stats.tokens < KIND_TOKENS:
            return
        self.kind_final = True
        kind = kind_of(self.context.tokens[self.context.num_prompt :], tokenizer)
        sampled = "" if self.context.params.greedy else ", sampled"
        if kind != "text" and kind + sampled != self.stats.kind:
            self.stats.kind = kind + sampled
            for own in self.stats.own.values():
                own.skip_until = 0  # what does not pay for one kind may for another


@dataclass(eq=False)
class DraftTask:
    """One sequence that decodes in this step."""

    spec_state: SpeculationState
    pages: array[int]
    max_nodes: int  # that can become part of the answer and have room
    device_rows: int = 0  # of it in a launch, where a device can draft for it without the host
    draft: Draft = field(default_factory=Draft)
    candidates: list[Draft] = field(default_factory=list)  # with calibrated probabilities, to be merged into `draft`

    @property
    def covered(self) -> float:
        """The probability that a candidate has the next token."""
        return max((d.probs[0] for d in self.candidates), default=0.0)  # a drafter's first node is its most probable

    @property
    def offered(self) -> float:
        """Tokens that the best candidate is expected to have right."""
        return max((sum(path_probs(d)) for d in self.candidates), default=0.0)

    def held_plan(self, drafter: str) -> PaidPlan | None:
        """What the step before planned, where that still holds: one step less from now on."""
        state, plan = self.spec_state, self.spec_state.plan
        if plan is None or plan.drafter != drafter or state.plan_steps <= 0:
            return None
        state.plan_steps -= 1
        return replace(plan, rounds=[min(plan.rounds[0], self.max_nodes)])

    def request(self, depth: int) -> DraftRequest:
        state = self.spec_state
        depth = min(state.fixed_depth or depth, self.max_nodes)
        return DraftRequest(state.seq_id, state.context, depth, self.max_nodes, self.pages, sampled=state.sampled)


def _kind(name: str) -> type[Drafter]:
    found = find(name)
    if found is None:
        families = "remote:HOST:PORT, list:N"
        hint = f"use auto, off, one of {', '.join(registered())}, {families}, or several of these joined by +"
        raise BadRequest(f"no drafter is called {name!r}", hint)
    return found


class DrafterPool:
    def __init__(self, ctx: DraftContext, controller: Controller) -> None:
        self.ctx, self.controller = ctx, controller
        self._drafters: dict[str, Drafter] = {}
        self._warned: set[str] = set()

    def made(self, name: str) -> Drafter | None:
        """The drafter of this name, where a request has named it."""
        return self._drafters.get(name)

    def __getitem__(self, name: str) -> Drafter:
        return self._drafters[name]

    # -- which drafters ------------------------------------------------------------------------------------------------

    def names(self, params: SamplingParams) -> list[str]:
        """The drafters of a request; `grammar` always drafts for answers with a grammar."""
        wanted = params.speculation.drafter
        if params.speculation.off:
            return []
        if wanted != "auto":
            names = [name.strip() for name in wanted.split("+")]
            for name in names:
                _kind(name)
            return names if params.grammar is None or "grammar" in names else ["grammar", *names]
        free = [name for name in AUTO_FREE_DRAFTERS if name != "grammar" or params.grammar is not None]
        return [*free, *self.ctx.paid_drafters, *self.ctx.remote_drafters]

    def check(self, params: SamplingParams) -> None:
        """Raise where a request names a drafter that does not exist or cannot work here."""
        for name in self.names(params):
            problem = _kind(name).problem(self.ctx)
            if problem is not None:
                raise problem

    def ready(self, params: SamplingParams) -> bool:
        return all(name in self._drafters for name in self.names(params))

    def remove(self, name: str) -> None:
        """Make it anew when a request next needs it."""
        drafter = self._drafters.pop(name, None)
        if drafter is not None:
            drafter.close()

    def close(self) -> None:
        for name in list(self._drafters):
            self.remove(name)

    def prepare(self, params: SamplingParams) -> None:
        """Make the drafters of a request, between steps: timing one or searching its layers can take long."""
        self.check(params)
        for name in self.names(params):
            if name not in self._drafters:
                self._make(name)

    def available(self, params: SamplingParams) -> list[str]:
        """The drafters of a request that starts, without those that cannot be made."""
        names = []
        for name in self.names(params):
            if _kind(name).cross_request and not params.cache:
                continue
            try:
                if name not in self._drafters:
                    self._make(name)
                names.append(name)
            except ForerunError as error:
                self._warn(name, str(error))
        return names

    def _make(self, name: str) -> None:
        """A paid drafter is timed too; it joins only when both worked."""
        try:
            drafter = _kind(name)(self.ctx)
            if drafter.elsewhere and name not in self.controller.slowdowns:
                self.controller.slowdowns[name] = self._slowdown(drafter)
            if drafter.elsewhere_model:  # what is accepted depends on it, not on its address
                records = self.controller.acceptance.records
                records[name] = records[ELSEWHERE + drafter.elsewhere_model]
                records[name].add_measured(drafter.outcomes, STATED_OUTCOMES)
            if not drafter.free:
                known = self.controller.drafters.get(name) or self._round_costs(drafter)
                self.controller.drafters[name] = known
                known.tokens_per_round = drafter.tokens_per_round
                self.controller.acceptance.records[name].add_measured(drafter.outcomes)
        except ForerunError:
            raise
        except Exception as error:
            problem = f"the drafter {name!r} cannot be made: {type(error).__name__}: {error}"
            raise BadRequest(problem, "repair it, or name another") from error
        self._drafters[name] = drafter

    def _slowdown(self, drafter: Drafter) -> Slowdown:
        """Of the target's steps by a server: measured where the two share a machine, while no request waits."""
        made, runner = Slowdown(drafter.shares_memory), self.ctx.runner
        if not drafter.shares_memory or self.ctx.pool.free < self.ctx.pool.pages_for(TIMED_CONTEXTS[0] + 1):
            return made

        def step() -> float:
            return runner.time_forward(1, TIMED_CONTEXTS[0], repeats=0)

        alone_s = median(step() for _ in range(PROBED_STEPS))
        beside_s = drafter.time_beside(step)
        if beside_s is not None:
            made.measured(alone_s, beside_s)
            made.round_s, made.way_s, made.rounds = drafter.turn_costs()
        return made

    def _round_costs(self, drafter: Drafter) -> CostCurve:
        """Timed with as many pages as are free; drafters that run the same forwards are timed once."""
        for name, other in self._drafters.items():
            if isinstance(drafter, ModelDrafter) and drafter.same_forwards(other):
                return CostCurve.from_record(self.controller.drafters[name].record())
        limit = min(self.max_timed_tokens, drafter.max_context)
        while True:
            try:
                curve = CostCurve.within(drafter.time_round, limit)
                self._time_reading(curve, drafter, limit // 2)
                return curve
            except OutOfPages:
                if limit <= 4:
                    raise
                limit //= 2

    def _time_reading(self, curve: CostCurve, drafter: Drafter, limit: int) -> None:
        """Reading a prompt: other kernels may run than in rounds. On a device a long one takes little more than a short
        one; on a CPU the time is in proportion, and so much of it is not spent twice."""
        on_cpu = self.ctx.runner.decoder.device.type == "cpu"
        sizes = [size for size in TIMED_STARTS if size <= limit][: 1 if on_cpu else None]
        read_s = {size: drafter.time_round(size, 0) for size in sizes}
        if len(read_s) > 1:
            curve.reading = CostCurve(read_s)
        elif read_s:
            curve.start_factor = read_s[sizes[0]] / curve.seconds(sizes[0])

    @property
    def max_timed_tokens(self) -> int:
        """Of the longest forward that can be timed, its context included."""
        pool = self.ctx.pool
        return min(self.ctx.max_context, pool.num_pages * pool.page_size)

    # -- drafting ------------------------------------------------------------------------------------------------------

    def catch_up_tokens(self, drafter: Drafter, task: DraftTask) -> int:
        try:
            return int(drafter.catch_up_tokens(task.request(1)))
        except Exception as error:
            self.drop(drafter.name, task, f"{type(error).__name__}: {error}")
            return 1 << 20

    def propose(self, drafter: Drafter, tasks: list[DraftTask], requests: list[DraftRequest]) -> list[Draft]:
        """A drafter's drafts, one per request; an empty one, and none ever again for that sequence, where it fails."""
        if not requests:
            return []
        try:
            drafts: list[Any] = list(drafter.propose(requests))
            problem = None if len(drafts) == len(requests) else f"{len(drafts)} drafts for {len(requests)} sequences"
        except Exception as error:
            drafts, problem = [], f"{type(error).__name__}: {error}"
        if problem is not None:
            if len(requests) > 1:  # one of them may have caused it; the others keep their drafter
                return [d for t, r in zip(tasks, requests, strict=True) for d in self.propose(drafter, [t], [r])]
            self.drop(drafter.name, tasks[0], problem)
            return [Draft()]
        return [self._validated(drafter.name, t, r, d) for t, r, d in zip(tasks, requests, drafts, strict=True)]

    def _validated(self, name: str, task: DraftTask, request: DraftRequest, draft: Any) -> Draft:
        try:
            problem = self._draft_problem(request, draft)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if problem is not None:
            self.drop(name, task, problem)
            return Draft()
        draft.sources = [name] * len(draft)  # a drafter cannot draft in another's name
        return draft

    def _draft_problem(self, request: DraftRequest, draft: Any) -> str | None:
        if not isinstance(draft, Draft):
            return f"a {type(draft).__name__} is no Draft"
        vocab = self.ctx.runner.decoder.config.vocab_size
        if draft.proposals:
            if not request.sampled:
                return "proposals for a request that wants the most probable tokens"
            if len(draft) > request.max_nodes:
                return f"{len(draft)} sampled nodes, the limit is {request.max_nodes}"
            if any(not torch.is_tensor(q) or q.shape != (vocab,) for q in draft.proposals.values()):
                return f"a proposal that is not a distribution over {vocab} tokens"
        return draft.problem(vocab)

    def drop(self, name: str, task: DraftTask, problem: str) -> None:
        """A drafter failed on a sequence: it drafts for it no longer."""
        task.spec_state.drafter_names = [other for other in task.spec_state.drafter_names if other != name]
        self._warn(name, problem)

    def _warn(self, name: str, problem: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            log.warning("drafter %r failed and is left out of the requests it fails on: %s", name, problem)

    # -- after a request -----------------------------------------------------------------------------------------------

    def finish(self, spec_state: SpeculationState) -> None:
        for drafter in self._drafters.values():
            if drafter.cross_request and not spec_state.context.params.cache:
                continue
            try:
                drafter.finish(spec_state.seq_id, spec_state.context.tokens, spec_state.context.num_prompt)
            except Exception as error:
                self._warn(drafter.name, f"{type(error).__name__}: {error}")

    def computed_elsewhere(self) -> list[str]:
        """Drafters for which another process computed since the last call."""
        return [name for name, each in self._drafters.items() if each.elsewhere and each.computed_elsewhere()]

    def forget(self) -> None:
        """Drop what drafters remember of requests that ended."""
        for drafter in self._drafters.values():
            drafter.forget()

    def figures(self) -> dict[str, dict[str, float]]:
        """What drafters report beside drafted and accepted tokens, where they do."""
        return {name: found for name, drafter in self._drafters.items() if (found := drafter.figures())}


def mean_context(tasks: list[DraftTask]) -> int:
    return sum(len(task.spec_state.context.tokens) for task in tasks) // len(tasks)


def on_device_rows(tasks: list[DraftTask]) -> int:
    """Of each sequence in a launch, where all of these can draft without the host; else 0."""
    return min((task.device_rows for task in tasks), default=0)


def drafted_batch(tasks: list[DraftTask], context: int, spent_s: float, rows: int = 0) -> DraftedBatch:
    """`rows`: as steps on the device see it, without the drafts."""
    drafts = [Draft() if rows else task.draft for task in tasks]
    limits = [task.max_nodes for task in tasks]
    return DraftedBatch([task.spec_state.stats for task in tasks], drafts, limits, context, spent_s, rows)


def free_request(controller: Controller, drafter: Drafter, task: DraftTask, least: float, beside: bool) -> DraftRequest:
    """Of a free drafter; `least`: path probability of nodes that are of use; `beside` a step in flight."""
    wait_s, first_prob = math.inf if task.spec_state.fixed_depth else 0.0, 1.0
    if drafter.elsewhere and not wait_s and not beside:
        wait_s, first_prob = controller.max_wait_s(task.spec_state.stats, drafter.name)
    request = replace(task.request(task.max_nodes), min_prob=least, max_wait_s=wait_s, first_prob=first_prob)
    if drafter.name in controller.slowdowns and 0.0 < wait_s < math.inf:
        stats, name = task.spec_state.stats, drafter.name
        # Token by token the server's own probabilities say how deep to go; of one round all has to be asked for
        if controller.slowdowns[name].rounds.tokens > 1:
            request.max_depth = min(request.max_depth, controller.block_depth(stats, name))
        if (turn := controller.turn(stats, name)).depth:
            request.max_wait_s, least = controller.turn_limits(stats, name, turn)
            request.max_depth, request.first_prob = min(request.max_depth, MAX_TURN_DEPTH), 1.0
            request.min_path_probs, request.in_turn = [least], True
    return request


def time_target(ctx: DraftContext, limit: int) -> CostCurve:
    """What forwards of the target cost; `limit`: tokens of the longest one that can be timed."""
    nodes = 8
    with counter(len(TIMED_TOKENS) + 4, "timing forwards", ctx.quiet) as advance:

        def time_forward(tokens: int, context: int, repeats: int = 2, branches: int = 0) -> float:
            advance()
            return ctx.runner.time_forward(tokens, context, repeats, branches)

        curve, context = CostCurve.within(time_forward, limit), min(256, limit - 1 - nodes)
        if context > 0:
            chain, star = (time_forward(1 + nodes, context, 3, branches) for branches in (0, nodes))
            curve.per_branch = max(0.0, star - chain) / (nodes - 1)
    return curve
