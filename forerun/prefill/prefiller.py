"""Drafts a prompt's K/V, piece by piece: the source reads, the plan chooses, the target recomputes, checks decide.

`Prefiller` moves a `PrefillState` from stage to stage; each `advance` is a bounded piece of work, so that other
requests run in between. It knows neither the scheduler nor what becomes of the K/V; the tail of the prompt is the
engine's.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from forerun.core import PrefillReport
from forerun.decode.draft_context import DraftContext
from forerun.errors import BadProfile, BadRequest, ForerunError
from forerun.params import Prefill
from forerun.prefill import sources
from forerun.prefill.checks import Checker, Scores, check_thresholds, divergence, wipe
from forerun.prefill.choosers import CHOOSERS, COMPARED_TOKENS, chooser_for, chooser_problem, tail_rows, warm_up
from forerun.prefill.cross_scores import CrossScores
from forerun.prefill.forecast import MIN_SHOWN, PrefillForecast
from forerun.prefill.plan import (
    CheckSpan,
    Costs,
    Policy,
    PrefillPlan,
    deepen,
    expected_plan,
    first_look,
    least_work,
    length_problem,
    next_slice,
    plan,
    required,
    share_for,
    too_short,
    uncovered,
)
from forerun.prefill.profile import Profile, chunk_profile
from forerun.prefill.recompute import RaggedDepthPass, Recomputer
from forerun.prefill.rehearsal import rehearse
from forerun.prefill.sources import KVSource
from forerun.prefill.state import PrefillStage, PrefillState

# of a text that is drafted: beyond it calibration says nothing about the drafts. With a reference of code and essays
# other code, essays, questions and news had at most 1.3 (47 of 48 windows), tables, logs and base64 at least 2.2 (35)
MAX_DRIFT = 2.0
SLICE_GROWTH = 4  # each further round of a prompt whose damage is predicted takes so many times the tokens of the last
# of a signal's threshold, which 98% of calibration's prompts keep: no text like theirs comes so far, and zeroed or
# misplaced K/V goes beyond it. At least half of a prompt's check spans must, since more recomputing hardly helps one
BROKEN_FACTOR, BROKEN_SHARE = 1.5, 0.5


class Prefiller:
    """`make`: for sources of one's own. `cross`: scores of a draft model of another tokenizer, where there is one."""

    def __init__(
        self,
        ctx: DraftContext,
        profile: Profile,
        policy: Policy | None = None,
        make: Callable[[str, DraftContext, Profile], KVSource] = sources.make_source,
        cross: CrossScores | None = None,
    ) -> None:
        self._ctx, self.profile, self.policy = ctx, profile, policy or Policy()
        self._make, self._cross = make, cross
        self._chunk_profile = profile if profile.kind == "chunk" else chunk_profile()
        self._runner, self._config = ctx.runner, ctx.runner.decoder.config
        self._ragged_pass = RaggedDepthPass(ctx.runner)
        self._recomputer = Recomputer(ctx.runner, self.policy.beside(profile.gate))
        self._sources: dict[str, KVSource] = {}
        self.forecast = PrefillForecast(ctx.runner.decoder.device.type)
        warm_up(ctx.runner, self.policy.tail)
        ctx.runner.all_layers_kv.prepare()
        self._recomputer.warm_up(profile.maps.base, self.policy.spans)
        if ctx.runner.graphs is not None:
            rehearse(self, ctx)

    # -- before a prompt is drafted ------------------------------------------------------------------------------------

    def problem(self, settings: Prefill, num_tokens: int) -> ForerunError | None:
        """Why a prompt of so many tokens cannot be drafted as asked; being too short to be worth it is no problem."""
        if settings.exact:
            return None
        try:
            source = self.source(settings)
        except ForerunError as error:
            return error
        problem = chooser_problem(chooser_for(settings.chooser), source.name, self._cross is not None)
        problem = problem or length_problem(source, num_tokens) or self._quality_problem(settings, source.name)
        if problem is not None or settings.budget is None or num_tokens < self.policy.shortest + self.policy.tail:
            return problem
        least = self._least_cost(settings, source, num_tokens)
        if settings.budget >= least:
            return None
        return BadRequest(
            f"prefill: budget is {settings.budget}, drafting by {source.name!r} costs at least {least:.2f} here",
            f"give a budget of at least {math.ceil(100 * least) / 100}, or none",
        )

    def _quality_problem(self, settings: Prefill, source: str) -> BadRequest | None:
        profile = self.profile_of(source)
        if settings.quality is None or share_for(profile, None, settings.quality) is not None:
            return None
        best = max((point.top1 for point in profile.curve), default=0.0)
        reach = f"the profile's curve reaches {best:.3f}" if best else f"the source {source!r} has no curve of quality"
        give = f"give at most {math.floor(1000 * best) / 1000}" if best else "leave it out"
        return BadRequest(
            f"prefill: quality is {settings.quality}, {reach}",
            f"{give}, or allow exact prefill instead: allow_exact=True (--allow-exact)",
        )

    def _least_cost(self, settings: Prefill, source: KVSource, num_tokens: int) -> float:
        """Of a new prompt, as a share of exact prefill's."""
        end, layers = num_tokens - self.policy.tail, self._config.num_layers
        state = PrefillState(-1, array("i", bytes(4 * num_tokens)), array("i"), 0, end, settings, layers)
        self._assign(state, source)
        policy = self.policy.beside(self.profile_of(source.name).gate)
        least = least_work(state, np.arange(policy.first), state.costs, policy)
        work = self._reading_cost(state) + least
        return max(work / num_tokens, min((point.cost for point in self.profile_of(source.name).curve), default=0.0))

    def profile_of(self, source: str) -> Profile:
        """What was measured about a source's drafts: those of `chunk` have nothing to do with the models' profile."""
        return self._chunk_profile if source == "chunk" else self.profile

    def agreement(self, source: str) -> float:
        """Top-1 agreement with exact prefill at the default share, by the profile's curve; 1 where it has none."""
        return self.profile_of(source).agreement

    def max_shown(self, report: PrefillReport, limit: int) -> int:
        """Tokens to show of an answer over this prompt, `limit` over a usual one: fewer where the gate predicts more
        damage than the default share has in the mean. Agreement is lost in proportion to KL, so fewer words stand."""
        usual = self.profile_of(report.source).usual_kl
        if report.kl_bound is None or not report.predicted_kl or usual is None:
            return limit
        return max(MIN_SHOWN, min(limit, round(limit * usual / report.predicted_kl)))

    def expected_kl(self, report: PrefillReport) -> float | None:
        """Of the answer to exact prefill's, as it was predicted, or usual at the default share; None: not known."""
        return report.predicted_kl or self.profile_of(report.source).usual_kl

    def key(self, settings: Prefill) -> str:
        """Drafted K/V is shared under it: the same maps, source, chooser and share."""
        name = self._source_name(settings)
        share = share_for(self.profile_of(name), settings.budget, settings.quality)
        return f"{self.profile.key} {name} {chooser_for(settings.chooser)} {-1.0 if share is None else share:.3f}"

    def has_source(self, settings: Prefill) -> bool:
        """Whether there is nothing to make."""
        return self._source_name(settings) in self._sources

    def source(self, settings: Prefill) -> KVSource:
        """Made when it is first asked for, between steps; raises where it cannot be."""
        if self.profile.kind == "chunk" and settings.source != "chunk":
            raise BadProfile(
                f"prefill {settings.mode!r} needs a profile of this model, and there is none",
                "make one (forerun calibrate --target ... --out FILE) and open the model with it (--prefill-profile);"
                " or name the source chunk, which needs none; or allow exact prefill: allow_exact=True (--allow-exact)",
            )
        name = self._source_name(settings)
        if name not in self._sources:
            check_thresholds(self.profile.thresholds, self._config.num_layers)
            self._sources[name] = self._make(name, self._ctx, self.profile)
        return self._sources[name]

    def _source_name(self, settings: Prefill) -> str:
        return self.profile.kind if settings.source == "auto" else settings.source

    def open(self, state: PrefillState) -> PrefillState:
        """Start a prompt whose pages are there. What is not worth drafting, or cannot be, is `PrefillStage.EXACT` after
        it."""
        state.keep_tail(self.policy.tail)
        problem = self.problem(state.settings, len(state.tokens))
        if problem is not None:
            state.fall_back(str(problem))
            return state
        source = self.source(state.settings)
        if short := too_short(state, self.policy, source.min_length_scale):
            self._assign(state, source)
            state.fall_back(short)
            return state
        self.begin(state, source)
        profile = self.profile_of(source.name)
        made = expected_plan(state, profile, source, state.costs, self.policy, self._reading_cost(state))
        if why := made.exact or self._why_not_tried(state, profile, made.cost):
            state.fall_back(why)
        return state

    def _why_not_tried(self, state: PrefillState, profile: Profile, cost: float) -> str:
        """Why a prompt that could be drafted at this cost is not: this machine is too slow at it, or the text is unlike
        the profile's."""
        if profile.texts is not None:
            state.report.drift = round(profile.texts.drift(state.ids[state.first : state.end]), 3)
            if state.report.drift > MAX_DRIFT:
                return (
                    f"the text is unlike the profile's: its drift is {state.report.drift:.1f}, the limit {MAX_DRIFT:g}"
                )
        return self.forecast.why_exact(state.source.name, int(state.costs.exact), cost)

    def begin(self, state: PrefillState, source: KVSource) -> None:
        """Start a prompt that is drafted."""
        self._assign(state, source)
        source.open(state)
        state.opened = True
        state.compares_tail = self.profile_of(source.name).damage is not None

    def _assign(self, state: PrefillState, source: KVSource) -> None:
        state.source, state.costs = source, Costs(state, source, self._config)
        state.report.source, state.report.chooser = source.name, chooser_for(state.settings.chooser)

    def close(self, state: PrefillState) -> None:
        """The prompt is done, or its sequence loses its pages."""
        if state.opened:
            state.source.finish(state)
        state.close()

    def _reading_cost(self, state: PrefillState) -> float:
        """Work until all is read and scored."""
        chooser, tokens = state.report.chooser, state.read_end
        scoring = state.costs.tail if chooser == "tail" else 0.0
        if chooser == "cross" and self._cross is not None:
            scoring = self._cross.cost(len(state.tokens))
        return state.source.cost(tokens - state.read) + scoring

    # -- drafting ------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def advance(self, state: PrefillState, budget: int) -> int:
        """Work of about `budget` tokens of the target's prefill; how much it was, at least 1."""
        assert not state.finished and budget >= 1
        before = state.spent
        while not state.finished and (state.spent == before or state.spent - before <= budget / 2):
            left = max(1, int(budget - (state.spent - before)))
            if state.read < state.read_end:
                self._read(state, left)
            elif len(state.todo):
                self._recompute(state, left)
            elif state.stage is PrefillStage.READING and self._can_look(state):
                self._look(state)
            elif state.source.leaves_gaps and not state.gaps_filled:
                self._fill_gaps(state)
            elif state.stage is PrefillStage.READING:
                self._plan(state)
            else:
                self._check(state)
        if state.stage is PrefillStage.EXACT:
            tokens, report = int(state.costs.exact), state.report
            self.forecast.record_fallback(state.source.name, tokens, report.cost, report.drafting_s)
        return max(1, math.ceil(state.spent - before))

    def _read(self, state: PrefillState, budget: int) -> None:
        start, missing = time.perf_counter(), state.read_end - state.read
        count = min(missing, max(1, int(budget / max(state.source.cost(missing) / missing, 1e-6))))
        if self._runner.decoder.device.type == "cpu":
            count = min(count, self.policy.chunk)
        state.source.read(state, count)
        drafted = slice(state.first, min(state.read, state.end))
        new = max(0, drafted.stop - max(state.first, state.read - count))
        state.report.token_layers += (0 if state.copied else state.source.base) * new
        state.depths[drafted] = np.maximum(state.depths[drafted], state.source.base)
        state.spent += state.source.cost(count)
        state.report.read_s += time.perf_counter() - start
        enough = state.read - max(state.first, state.known) >= self.policy.first_check_tokens
        if enough and not state.first_checked and state.read < state.end:
            self._first_check(state)

    def _first_check(self, state: PrefillState) -> None:
        """Check a first span, so that a prompt whose drafts are no good is not read to its end. A text that is like the
        profile's has good ones, as far as its gate knows, and a gap is no sample of the rest."""
        state.first_checked, profile, drift = True, self.profile_of(state.source.name), state.report.drift
        known = profile.gate is not None and drift is not None and drift <= 1.0
        if known or not profile.thresholds or state.source.leaves_gaps:
            return
        scores, entries = self._recomputer.first_check(state)
        state.spent += state.costs.rows(entries) + state.costs.checks(self.policy.span)
        if not scores.finite.all():
            wipe(self._runner, state.pages, state.first, len(state.tokens))
        if not self._verdict(state, scores).all():
            state.fall_back(f"a first check of {self.policy.span} of {state.read} tokens failed")

    def _fill_gaps(self, state: PrefillState) -> None:
        """What has no drafted K/V is computed before the tail is asked what it attends to."""
        state.gaps_filled = True
        state.todo = required(state, state.source, self.policy)

    def _can_look(self, state: PrefillState) -> bool:
        """Whether K/V may be good enough as it is: a few spans tell, with nothing ranked and little recomputed."""
        asked = state.settings.budget is not None or state.report.chooser != "tail" or state.gaps_filled
        return not asked and self.profile_of(state.source.name).looks_first

    def _look(self, state: PrefillState) -> None:
        """A first round of what must be computed and of check spans, in one pass."""
        state.gaps_filled = True
        state.todo, state.spans = first_look(state, state.source, self.policy)
        if state.spans:  # else nothing can be compared, and the tail is asked
            state.stage = PrefillStage.RECOMPUTING
            self._begin_round(state, state.todo, state.spans)

    def _rank(self, state: PrefillState) -> np.ndarray | None:
        """The chooser's scores, once all is read; none where it has none."""
        start = time.perf_counter()
        if state.report.chooser == "cross":
            scores = None if self._cross is None else self._cross.scores(state)
        else:
            scores = CHOOSERS[state.report.chooser](state, state.source, self._runner)
        state.spent += self._reading_cost(state)  # all is read: what is left is the scoring
        state.report.token_layers += int(state.costs.tail) * state.layers if state.report.chooser == "tail" else 0
        state.report.read_s += time.perf_counter() - start
        return scores

    def _plan(self, state: PrefillState) -> None:
        scores = self._rank(state)
        if scores is None:
            chooser = state.report.chooser
            made = PrefillPlan(exact=f"the source {state.source.name!r} has no scores for the chooser {chooser!r}")
        else:
            profile = self.profile_of(state.source.name)
            made = plan(state, scores, profile, state.source, state.costs, self.policy, state.spent)
        if scores is None or made.exact:
            state.fall_back(made.exact)
            return
        state.scores, state.spans = scores, made.spans
        self._predict(state, made.todo)
        state.stage = PrefillStage.RECOMPUTING
        start = time.perf_counter()
        if state.compares_tail and state.tail_logits is None:
            state.tail_logits = self._tail_logits(state)
        self._begin_round(state, made.todo, made.spans)
        state.report.check_s += time.perf_counter() - start

    def _predict(self, state: PrefillState, todo: np.ndarray) -> None:
        """Write into the report how far the answer will be from exact prefill's when these entries are recomputed."""
        if state.attention is None:
            return
        gate, report = self.profile_of(state.source.name).gate, state.report
        report.uncovered = round(uncovered(state, todo), 5)
        if gate is not None:
            report.predicted_kl = round(gate.predict(report.uncovered), 5)
            report.kl_bound = round(gate.bound(report.uncovered), 5)
            report.covered = gate.knows(report.uncovered) and (report.drift is None or report.drift <= 1.0)

    def _begin_round(self, state: PrefillState, todo: np.ndarray, spans: list[CheckSpan]) -> None:
        state.todo = todo
        state.report.rounds += 1
        sinks, base = min(self.policy.first, state.end), state.source.base
        whole = not self.profile_of(state.source.name).looks_first  # else V alone is looked at
        state.checker = Checker(self._runner, state.pages, spans, base, sinks, whole) if spans else None

    def _recompute(self, state: PrefillState, budget: int) -> None:
        entries = state.todo[: min(budget, self._recomputer.most or budget)]
        last = len(entries) == len(state.todo) and state.stage is PrefillStage.RECOMPUTING
        entries = entries[: self._recomputer.run(state, entries, state.checker, last)]
        state.todo = state.todo[len(entries) :]
        state.spent += state.costs.rows(entries)

    # -- checking ------------------------------------------------------------------------------------------------------

    def _check(self, state: PrefillState) -> None:
        """A round of recomputation is over: done, another round where checks failed, or exact prefill."""
        report, checker = state.report, state.checker
        state.describe()  # what is so if checks pass: now, while a device is still at it
        if checker is None:
            state.finish()
            return
        start = time.perf_counter()
        kl, before, profile = None, state.tail_logits, self.profile_of(state.source.name)
        state.spent += state.costs.checks(sum(span.count for span in checker.spans))
        if before is not None:
            state.tail_logits = self._tail_logits(state)
            kl = divergence(state.tail_logits, before)
        scores = checker.scores(kl)
        passed = self._verdict(state, scores)
        scores.write(report, checker.spans, passed)
        failed = [span for span, good in zip(checker.spans, passed, strict=True) if not good]
        deepened = report.rounds - 1
        if not scores.finite.all():
            wipe(self._runner, state.pages, state.first, len(state.tokens))
            state.fall_back("drafted K/V held values that are no finite numbers")
        elif not failed or (deepened >= self.policy.deepenings and profile.damage is None):
            state.finish()
        elif profile.gate is not None:
            state.fall_back(f"{len(failed)} of {len(checker.spans)} check spans are broken")
        elif profile.damage is not None:
            self._take_next_slice(state, report.predicted_kl or 0.0)
        else:
            self._deepen(state, failed, 1.0 / (self.policy.deepenings - deepened))
        report.check_s += time.perf_counter() - start

    def _verdict(self, state: PrefillState, scores: Scores) -> np.ndarray:
        """[spans] what passed: by the damage that is predicted for the answer, or by the profile's thresholds. Where a
        gate has decided how much is recomputed, only broken drafts fail."""
        profile = self.profile_of(state.source.name)
        if profile.gate is not None:
            good = scores.passed(profile.thresholds, self.policy.failing, BROKEN_FACTOR)
            return good | ((~good).sum() < BROKEN_SHARE * len(good)) & scores.finite
        if profile.damage is None or (scores.kl is None and not profile.looks_first):
            return scores.verdict(profile.thresholds, self.policy.failing)
        value_error = float(np.nan_to_num(scores.values["value"][scores.base :], nan=1.0, posinf=1.0).mean())
        state.report.predicted_kl = round(profile.damage.predict(scores.kl, value_error), 5)
        return scores.finite & (state.report.predicted_kl <= profile.damage.max_kl)

    def _take_next_slice(self, state: PrefillState, predicted_kl: float) -> None:
        """More of the same ranking, or exact prefill where that would cost more or enough was tried."""
        tried = state.report.rounds - 1
        if not len(state.scores):  # so far it was only looked at
            state.scores = np.asarray(self._rank(state))  # by the tail, which scores any text
            if state.tail_logits is None:
                state.tail_logits = self._tail_logits(state)
        share = self.profile_of(state.source.name).share * SLICE_GROWTH ** (tried + 1)
        todo, spans = next_slice(state, share, self.policy)
        checks = sum(span.count for span in spans)
        work = state.spent + state.costs.rows(todo) + state.costs.checks(checks) + state.costs.tail
        if tried >= self.policy.deepenings or not spans or work > state.costs.exact:
            state.fall_back(f"the predicted KL to exact prefill is {predicted_kl:.3f} after {tried + 1} rounds")
        else:
            self._begin_round(state, todo, spans)

    def _deepen(self, state: PrefillState, failed: list[CheckSpan], share: float) -> None:
        """Exact prefill, if all that failed might have to be recomputed at a cost beyond it."""
        whole = deepen(state, failed, state.scores, 1.0)
        checks = state.costs.checks(sum(span.count for span in failed))
        tails = 3 if state.tail_logits is None else 2  # to compare the rounds, and the engine's own
        work = state.spent + state.costs.rows(whole) + checks + tails * state.costs.tail
        if work > state.costs.exact:
            failures = f"{len(failed)} of {len(state.spans)} check spans failed"
            state.fall_back(f"{failures}, recomputing them would cost {work / state.costs.exact:.2f} of exact prefill")
            return
        if state.tail_logits is None:
            state.tail_logits = self._tail_logits(state)
        self._begin_round(state, deepen(state, failed, state.scores, share), failed)

    def _tail_logits(self, state: PrefillState) -> Tensor:
        """What the tail makes of the K/V as it is now: logits [COMPARED_TOKENS, V]."""
        state.spent += state.costs.tail
        state.report.token_layers += int(state.costs.tail) * state.layers
        logits = self._ragged_pass.run(tail_rows(state, state.source.base, COMPARED_TOKENS)).logits.clone()
        state.filled, state.logits, state.tail_ran = len(state.tokens) - 1, logits[-1:], True
        return logits
