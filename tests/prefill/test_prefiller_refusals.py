"""What a prefiller does not draft, and why; and the sources that there are."""

from __future__ import annotations

import numpy as np
import pytest

from forerun.decode.draft_context import DraftContext
from forerun.errors import BadProfile, BadRequest
from forerun.models.execution.runner import Span
from forerun.params import Prefill
from forerun.prefill.plan import Policy
from forerun.prefill.prefiller import Prefiller
from forerun.prefill.profile import CurvePoint, chunk_profile
from forerun.prefill.state import PrefillStage, PrefillState
from tests.prefill.fakes import (
    END,
    IDS,
    POLICY,
    SETTINGS,
    STRICT,
    Fake,
    answer,
    apart,
    drive,
    make_prefiller,
    make_profile,
    new_state,
    start,
)
from tests.prefill.sources import common

GARBAGE = (0, len(IDS))


# -- what is not drafted -----------------------------------------------------------------------------------------------


def test_short_prompts_are_exact(ctx: DraftContext):
    prefiller = make_prefiller(ctx, source := Fake(ctx), policy=Policy())
    state = start(prefiller, ctx)
    assert state.stage is PrefillStage.EXACT and "too few" in state.report.fell_back
    assert state.report.cost == 1.0 and source.read_entries == []


def test_drafting_that_costs_more_than_it_saves_is_not_begun(ctx: DraftContext):
    prefiller = make_prefiller(ctx, source := Fake(ctx, price=0.7))
    state = start(prefiller, ctx)
    assert state.stage is PrefillStage.EXACT and "would cost" in state.report.fell_back and source.read_entries == []


def test_a_quality_beyond_the_curve_is_refused_or_exact_prefill(ctx: DraftContext):
    curve = [CurvePoint(0.0, 0.3, 0.9, 0.1), CurvePoint(0.2, 0.5, 0.95, 0.05)]
    prefiller = make_prefiller(ctx, Fake(ctx), curve=curve)
    settings = Prefill("speculative", quality=0.99)
    problem = prefiller.problem(settings, len(IDS))
    assert problem is not None and "reaches 0.950" in str(problem) and "at most 0.95, or allow exact" in problem.hint
    copied = Prefiller(ctx, chunk_profile()).problem(Prefill("speculative", source="chunk", quality=0.9), len(IDS))
    assert "has no curve of quality" in str(copied)
    state = start(prefiller, ctx, settings)
    assert state.stage is PrefillStage.EXACT and "0.950" in state.report.fell_back
    assert start(prefiller, ctx, Prefill("speculative", quality=0.94)).stage is PrefillStage.READING


def test_a_budget_below_the_sources_own_cost_is_refused(ctx: DraftContext):
    prefiller = make_prefiller(ctx, Fake(ctx))
    problem = prefiller.problem(Prefill("speculative", budget=0.15), len(IDS))
    assert isinstance(problem, BadRequest) and "0.15" in str(problem)
    enough = float(problem.hint.split()[6].rstrip(","))
    assert prefiller.problem(Prefill("speculative", budget=enough), len(IDS)) is None
    state = start(prefiller, ctx, Prefill("speculative", budget=enough))
    assert drive(prefiller, state).stage is PrefillStage.DONE


def test_problems_say_what_is_wrong(ctx: DraftContext):
    bare = Prefiller(ctx, chunk_profile())
    problem = bare.problem(SETTINGS, 1000)
    assert isinstance(problem, BadProfile) and "forerun calibrate" in problem.hint
    assert bare.problem(Prefill(), 1000) is None
    real = Prefiller(ctx, make_profile())
    assert "draft model" in str(real.problem(SETTINGS, 1000))
    assert "'unknown'" in str(real.problem(Prefill("speculative", source="unknown"), 1000))
    fake = make_prefiller(ctx, Fake(ctx))
    for chooser, part in [("none", "'none'"), ("cross", "another tokenizer"), ("lower", "self")]:
        problem = fake.problem(Prefill("speculative", chooser=chooser), 1000)
        assert isinstance(problem, BadRequest) and part in str(problem)
    assert fake.problem(SETTINGS, 1000) is None


def test_open_with_a_problem_is_exact_prefill_with_the_reason(ctx: DraftContext):
    state = start(Prefiller(ctx, make_profile()), ctx)
    assert state.stage is PrefillStage.EXACT and "draft model" in state.report.fell_back


def test_keys_differ_by_what_is_planned(ctx: DraftContext):
    prefiller = make_prefiller(ctx, Fake(ctx), curve=[CurvePoint(0.0, 0.3, 0.9, 0.1), CurvePoint(0.2, 0.5, 0.95, 0.05)])
    asked = [
        Prefill("speculative"),
        Prefill("speculative", budget=0.5),
        Prefill("speculative", chooser="draft"),
        Prefill("speculative", source="self"),
    ]
    assert len({prefiller.key(settings) for settings in asked}) == 4
    assert prefiller.key(Prefill("speculative")) == prefiller.key(Prefill("provisional", chooser="tail"))
    other = make_prefiller(ctx, Fake(ctx), kind="self")
    assert other.key(SETTINGS) != prefiller.key(SETTINGS)


class Stranger:
    """Scores of another tokenizer's draft."""

    def __init__(self, best: int) -> None:
        self.best = best

    def scores(self, state: PrefillState) -> np.ndarray:
        scores = np.zeros(len(state.tokens))
        scores[self.best : self.best + 10] = 1.0
        return scores

    def cost(self, tokens: int) -> float:
        return 0.1 * tokens


def test_scores_from_elsewhere_choose_and_are_paid_for(ctx: DraftContext):
    source, profile = Fake(ctx), make_profile(share=10 / (END - 16))
    cross = Prefiller(ctx, profile, POLICY, lambda *_: source, Stranger(90))  # type: ignore[arg-type]
    state = drive(cross, start(cross, ctx, Prefill("speculative", chooser="cross")))
    assert (state.depths[90:100] == state.layers).all()
    plain = drive(cross, start(cross, ctx, Prefill("speculative", chooser="start")))
    assert state.report.cost == pytest.approx(plain.report.cost + 0.1, abs=0.07)
    assert (plain.depths[16:26] == plain.layers).all()


def test_thresholds_of_another_target_are_refused(ctx: DraftContext):
    prefiller = make_prefiller(ctx, Fake(ctx), thresholds={"key": [0.1] * 5})
    problem = prefiller.problem(SETTINGS, 1000)
    assert isinstance(problem, BadProfile) and "5 thresholds for 'key'" in str(problem)


# -- the sources that there are ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "base", "taps"), [("draft", 1, (1, 2, 3)), ("self", 3, (3,))])
@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("by_source", [False, True])
def test_mapped_sources_are_checked_and_recomputed(
    by_source: bool, kind: str, base: int, taps, right: bool, tiny_folder, monkeypatch
):
    """Maps that are exactly right pass; with others every checkpoint fails, and exact prefill is cheaper."""
    folder = tiny_folder("llama")
    ctx = common.make_draft_context(folder)
    profile = common.make_profile(kind, common.make_maps(folder, base, taps if right else (0,)))
    profile.thresholds = STRICT
    logits = ctx.runner.forward([Span(common.IDS, 0, common.PAGES, (len(common.IDS) - 1,))]).logits.clone()
    common.clear(ctx.pool)
    prefiller = Prefiller(ctx, profile, Policy(first=8, tail=common.TAIL, shortest=16, spans=2, span=4))
    chooser = "tail" if not by_source else "draft" if kind == "draft" else "lower"
    settings = Prefill("speculative", chooser=chooser) if by_source else SETTINGS
    price = 0.4 if by_source else 0.2  # maps dwarf tiny models; asking the tail costs about as much as the difference
    monkeypatch.setattr(prefiller.source(settings), "cost", lambda tokens: price * tokens)
    state = drive(prefiller, prefiller.open(new_state(prefiller, common.IDS, common.PAGES, settings)), 13)
    assert state.report.source == kind and state.report.chooser == chooser
    assert [span["passed"] for span in state.report.spans] == [right, right]
    assert state.stage is (PrefillStage.DONE if right else PrefillStage.EXACT)
    if right:
        assert apart(answer(ctx, state), logits) < 1e-4
    prefiller.close(state)
