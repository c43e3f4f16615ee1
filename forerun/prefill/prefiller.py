"""Drafts a prompt's K/V, piece by piece: the source reads, the plan chooses, the target recomputes, checks decide.

Drives a `Job` from phase to phase; each `advance` is a bounded piece of work, so that other requests run in between.
Knows neither the scheduler nor what becomes of the K/V; the tail of the prompt is the engine's.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from forerun.decode.draft_context import DraftContext
from forerun.errors import BadProfile, BadRequest, ForerunError
from forerun.params import Prefill
from forerun.prefill import sources
from forerun.prefill.checks import Checker, check_thresholds, divergence, wipe
from forerun.prefill.choosers import (
    CHOOSERS,
    ChooserInput,
    TokenScorer,
    chooser_for,
    chooser_problem,
    tail_rows,
    warm_up,
)
from forerun.prefill.depth import RaggedDepthPass
from forerun.prefill.plan import (
    CheckSpan,
    Costs,
    Gapped,
    Policy,
    PrefillPlan,
    deepen,
    describe,
    foresee,
    least_work,
    leave,
    plan,
    settle,
    too_short,
)
from forerun.prefill.profile import Profile
from forerun.prefill.progress import Way
from forerun.prefill.recompute import Recomputer
from forerun.prefill.sources.base import KVSource
from forerun.prefill.state import PrefillStage, PrefillState

JUDGED = 16  # last tokens of the tail whose distributions two rounds are compared by


class Prefiller:
    """`make` and `scorers` are for sources and scores of one's own."""

    def __init__(
        self,
        ctx: DraftContext,
        profile: Profile | None,
        policy: Policy | None = None,
        make: Callable[[str, DraftContext, Profile | None], KVSource] = sources.make,
        scorers: dict[str, TokenScorer] | None = None,
    ) -> None:
        self._ctx, self.profile, self.policy = ctx, profile, policy or Policy()
        self._make, self._scorers = make, scorers or {}
        self._runner, self._config = ctx.runner, ctx.runner.decoder.config
        self._ragged_pass, self._repairs = (
            RaggedDepthPass(ctx.runner),
            Recomputer(ctx.runner, self.policy),
        )
        self._sources: dict[str, KVSource] = {}
        self._progress: dict[int, Way] = {}
        if profile is not None:  # without one nothing is drafted
            warm_up(ctx.runner, self.policy.tail)
            ctx.runner.planes.prepare()
            self._repairs.warm_up(profile.maps.base)

    # -- before a prompt is drafted ------------------------------------------------------------------------------------

    def problem(self, settings: Prefill, num_tokens: int) -> ForerunError | None:
        """Why a prompt of so many tokens cannot be drafted as asked; being too short to be worth it is no problem."""
        if settings.exact:
            return None
        try:
            source = self.source(settings)
        except ForerunError as error:
            return error
        problem = chooser_problem(chooser_for(settings.chooser, source.name), source.name, self._scorers)
        problem = problem or source.problem(num_tokens)
        if problem is not None or settings.budget is None or num_tokens < self.policy.shortest + self.policy.tail:
            return problem
        least = self._least_cost(settings, source, num_tokens)
        if settings.budget >= least:
            return None
        return BadRequest(
            f"prefill: budget is {settings.budget}, drafting by {source.name!r} costs at least {least:.2f} here",
            f"give a budget of at least {math.ceil(100 * least) / 100}, or none",
        )

    def _least_cost(self, settings: Prefill, source: KVSource, num_tokens: int) -> float:
        """Of a new prompt, as a share of exact prefill's."""
        assert self.profile is not None
        end, layers = num_tokens - self.policy.tail, self._config.num_layers
        state = PrefillState(-1, array("i", bytes(4 * num_tokens)), array("i"), 0, end, settings, layers)
        run = Way(source, chooser_for(settings.chooser, source.name), Costs(state, source, self._config))
        work = run.reading(state, self._scorers) + least_work(
            state, np.arange(self.policy.first), run.costs, self.policy
        )
        return max(work / num_tokens, min((point.cost for point in self.profile.curve), default=0.0))

    def key(self, settings: Prefill) -> str:
        """Drafted K/V is shared under it: the same maps, source, chooser and share."""
        assert self.profile is not None
        share, name = self.profile.share_for(settings.budget, settings.quality), self._source_name(settings)
        return (
            f"{self._profile_key} {name} {chooser_for(settings.chooser, name)} {-1.0 if share is None else share:.3f}"
        )

    @cached_property
    def _profile_key(self) -> str:
        return "" if self.profile is None else self.profile.key  # reads all of its maps

    def has_source(self, settings: Prefill) -> bool:
        """Whether there is nothing to make: the source exists, or cannot be without a profile."""
        return self.profile is None or self._source_name(settings) in self._sources

    def source(self, settings: Prefill) -> KVSource:
        """Made when it is first asked for, between steps; raises where it cannot be."""
        if self.profile is None or (self.profile.kind == "chunk" and settings.source != "chunk"):
            raise BadProfile(
                f"prefill {settings.mode!r} needs a profile of this model, and there is none",
                "make one: forerun calibrate --target ... --out PROFILE, and open the model with it (--profile); or "
                "name the source chunk, which needs none; or allow exact prefill: allow_exact=True (--allow-exact)",
            )
        name = self._source_name(settings)
        check_thresholds(self.profile.thresholds, self._config.num_layers)
        if name not in self._sources:
            self._sources[name] = self._make(name, self._ctx, self.profile)
        return self._sources[name]

    def _source_name(self, settings: Prefill) -> str:
        assert self.profile is not None
        return self.profile.kind if settings.source == "auto" else settings.source

    def open(
        self,
        seq_id: int,
        tokens: Sequence[int],
        pages: array[int],
        first: int,
        settings: Prefill,
        known: int = 0,
        depths: np.ndarray | None = None,
    ) -> PrefillState:
        """`first` entries are exact; those before `known` hold drafted K/V of these `depths`. What is not worth
        drafting, or cannot be, comes back as `Phase.EXACT`."""
        end = max(first, len(tokens) - self.policy.tail)
        state = PrefillState(seq_id, tokens, pages, first, end, settings, self._config.num_layers)
        if depths is not None:
            state.known = min(known, end)
            state.depths[first : state.known] = depths[first : state.known]
        problem = self.problem(settings, len(tokens))
        if problem is not None:
            return leave(state, str(problem))
        source = self.source(settings)
        state.report.source, state.report.chooser = source.name, chooser_for(settings.chooser, source.name)
        if short := too_short(state, self.policy, source.start):
            return leave(state, short)
        source.open(state)
        costs = Costs(state, source, self._config)
        run = self._progress[state.id] = Way(source, state.report.chooser, costs)
        assert self.profile is not None
        why = foresee(state, self.profile, source, costs, self.policy, run.reading(state, self._scorers))
        return leave(state, why) if why else state

    def close(self, state: PrefillState) -> None:
        """The state is done, or its sequence is gone."""
        run = self._progress.pop(state.id, None)
        if run is not None:
            run.source.finish(state)

    # -- drafting ------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def advance(self, state: PrefillState, budget: int) -> int:
        """Work of about `budget` tokens of the target's prefill; how much it was, at least 1."""
        assert not state.finished and budget >= 1
        run = self._progress[state.id]
        before = run.spent
        while not state.finished and (run.spent == before or run.spent - before <= budget / 2):
            left = max(1, int(budget - (run.spent - before)))
            if state.read < len(state.tokens):
                self._read(state, run, left)
            elif state.stage is PrefillStage.READING:
                self._plan(state, run)
            elif len(state.todo):
                self._repair(state, run, left)
            else:
                self._check(state, run)
        return max(1, math.ceil(run.spent - before))

    def _read(self, state: PrefillState, run: Way, budget: int) -> None:
        start, missing = time.perf_counter(), len(state.tokens) - state.read
        count = min(missing, max(1, int(budget / max(run.source.cost(missing) / missing, 1e-6))))
        if self._runner.decoder.device.type == "cpu":
            count = min(count, self.policy.chunk)
        run.source.read(state, count)
        drafted = slice(state.first, min(state.read, state.end))
        state.report.token_layers += run.source.base * max(0, drafted.stop - max(state.first, state.read - count))
        state.depths[drafted] = np.maximum(state.depths[drafted], run.source.base)
        run.spent += run.source.cost(count)
        state.report.read_s += time.perf_counter() - start
        if (
            not run.glanced
            and state.read - max(state.first, state.known) >= self.policy.glance
            and state.read < state.end
        ):
            self._glance(state, run)

    def _glance(self, state: PrefillState, run: Way) -> None:
        """A first look at drafts, so that a prompt they are no good for is not read to its end."""
        run.glanced = True
        assert self.profile is not None
        if not self.profile.thresholds or isinstance(run.source, Gapped):  # what is missing says nothing about the rest
            return
        scores, entries = self._repairs.first_look(state, run.costs, run.source.base)
        run.spent += run.costs.rows(entries) + run.costs.checks(self.policy.span)
        if not scores.finite.all():
            wipe(self._runner, state.pages, state.first, len(state.tokens))
        if not scores.passed(self.profile.thresholds, self.policy.failing).all():
            leave(state, f"a first look at {self.policy.span} of {state.read} tokens failed", run.spent)

    def _plan(self, state: PrefillState, run: Way) -> None:
        start = time.perf_counter()
        scores = CHOOSERS[run.chooser](ChooserInput(state, run.source, self._runner, self._scorers))
        run.spent += run.reading(state, self._scorers)  # all is read: what is left is the scoring
        state.report.token_layers += int(run.costs.tail) * state.layers if run.chooser == "tail" else 0
        state.report.read_s += time.perf_counter() - start
        assert self.profile is not None
        made = PrefillPlan(exact=f"the source {run.source.name!r} has no scores for the chooser {run.chooser!r}")
        if scores is not None:
            made = plan(state, scores, self.profile, run.source, run.costs, self.policy, run.spent)
        if scores is None or made.exact:
            leave(state, made.exact, run.spent)
            return
        run.scores, run.spans = scores, made.spans
        state.stage = PrefillStage.RECOMPUTING
        start = time.perf_counter()
        self._begin_round(state, run, made.todo, made.spans)
        state.report.check_s += time.perf_counter() - start

    def _begin_round(self, state: PrefillState, run: Way, todo: np.ndarray, spans: list[CheckSpan]) -> None:
        state.todo = todo
        state.report.rounds += 1
        sinks, base = min(self.policy.first, state.end), run.source.base
        run.checker = Checker(self._runner, state.pages, spans, base, sinks) if spans else None

    def _repair(self, state: PrefillState, run: Way, budget: int) -> None:
        entries = state.todo[: min(budget, self._repairs.most or budget)]
        last = len(entries) == len(state.todo)
        entries = entries[: self._repairs.run(state, run.costs, entries, run.checker, last)]
        state.todo = state.todo[len(entries) :]
        run.spent += run.costs.rows(entries)

    # -- checking ------------------------------------------------------------------------------------------------------

    def _check(self, state: PrefillState, run: Way) -> None:
        """A round of repair is over: done, another round where checks failed, or exact prefill."""
        report, checker = state.report, run.checker
        assert self.profile is not None
        describe(state)  # what is so if checks pass: now, while a device is still at it
        if checker is None:
            settle(state, run.costs, run.spent)
            return
        start = time.perf_counter()
        kl, before = None, run.logits
        run.spent += run.costs.checks(sum(span.count for span in checker.spans))
        if before is not None:
            run.logits = self._judge(state, run)
            kl = divergence(run.logits, before)
        scores = checker.scores(kl)
        passed = scores.verdict(self.profile.thresholds, self.policy.failing)
        scores.write(report, checker.spans, passed)
        failed = [span for span, good in zip(checker.spans, passed, strict=True) if not good]
        deepened = report.rounds - 1
        if not scores.finite.all():
            wipe(self._runner, state.pages, state.first, len(state.tokens))
            leave(state, "drafted K/V held values that are no finite numbers", run.spent)
        elif not failed or deepened >= self.policy.deepenings:
            settle(state, run.costs, run.spent)
        else:
            self._deepen(state, run, failed, 1.0 / (self.policy.deepenings - deepened))
        report.check_s += time.perf_counter() - start

    def _deepen(self, state: PrefillState, run: Way, failed: list[CheckSpan], share: float) -> None:
        """Exact prefill, if all that failed might have to be recomputed at a cost beyond it."""
        whole = deepen(state, failed, run.scores, 1.0)
        checks = run.costs.checks(sum(span.count for span in failed))
        tails = 3 if run.logits is None else 2  # to compare the rounds, and the engine's own
        work = run.spent + run.costs.rows(whole) + checks + tails * run.costs.tail
        if work > run.costs.exact:
            failures = f"{len(failed)} of {len(run.spans)} checkpoints failed"
            leave(state, f"{failures}, repair would cost {work / run.costs.exact:.2f} of exact prefill", run.spent)
            return
        if run.logits is None:
            run.logits = self._judge(state, run)
        self._begin_round(state, run, deepen(state, failed, run.scores, share), failed)

    def _judge(self, state: PrefillState, run: Way) -> Tensor:
        """What the tail makes of the K/V as it is now: logits [JUDGED, V]."""
        run.spent += run.costs.tail
        state.report.token_layers += int(run.costs.tail) * state.layers
        return self._ragged_pass.run(tail_rows(state, run.source.base, JUDGED)).logits.clone()
