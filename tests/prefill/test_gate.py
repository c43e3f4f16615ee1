"""The gate: its curve never falls, its bound holds on windows like those it was fitted on, and prompts get what they
need."""

from __future__ import annotations

from array import array
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.core import PrefillReport
from forerun.decode.draft_context import DraftContext
from forerun.models.config import ModelConfig
from forerun.params import Prefill
from forerun.prefill.forecast import MIN_SHOWN
from forerun.prefill.gate import (
    MIN_WINDOWS,
    DamageGate,
    GateLevel,
    conformal_quantile,
    fit_gate,
    gate_of,
    isotonic,
)
from forerun.prefill.plan import Costs, Policy, PrefillPlan, expected_plan, plan, uncovered
from forerun.prefill.profile import CurvePoint, Profile
from forerun.prefill.state import PrefillStage, PrefillState
from tests.prefill.fakes import POLICY, STRICT, Fake, drive, make_prefiller, make_profile, start
from tests.prefill.test_plan import Cheap

SHARES = (0.0, 0.05, 0.1, 0.2, 0.3)
CONFIG = ModelConfig("llama", 100, 64, 10, 4, 2, 16, 128, 4096)
LEVELS = tuple(GateLevel(s, round(0.6 - 2 * s, 3), s, 0.9, 0.1) for s in SHARES)
TIGHT = DamageGate((0.0, 1.0), (0.0, 1.0), 2.0, 100, tuple(GateLevel(s, 0.2, s, 0.9, 0.1) for s in SHARES))
GATE = DamageGate((0.0, 0.2, 0.6), (0.01, 0.05, 0.2), 2.0, 100, LEVELS)


def made_windows(count: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Windows whose KL grows with what is uncovered, which differs between them: [windows, shares] each."""
    draw = np.random.default_rng(seed)
    hard = draw.uniform(0.1, 0.8, (count, 1))
    left = hard * np.exp(-6 * np.array(SHARES))
    kl = 0.3 * left**1.5 * draw.lognormal(0.0, 0.5, (count, 1))
    return left, kl, 1.0 - kl


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 5)), min_size=1, max_size=60))
def test_an_isotonic_fit_never_falls_and_keeps_the_mean(points: list[tuple[float, float]]) -> None:
    xs, values = isotonic(*zip(*points, strict=True))
    assert (np.diff(xs) >= 0).all() and (np.diff(values) >= -1e-12).all()
    assert values.mean() == pytest.approx(np.mean([y for _, y in points]), abs=1e-9)


def test_an_isotonic_fit_is_the_points_where_they_rise() -> None:
    assert isotonic([3, 1, 2], [0.3, 0.1, 0.2])[1].tolist() == [0.1, 0.2, 0.3]
    assert isotonic([1, 2, 3], [0.3, 0.2, 0.1])[1] == pytest.approx([0.2] * 3)


def test_the_bound_holds_on_other_windows_and_not_by_its_width() -> None:
    gate = fit_gate(SHARES, *made_windows(400, 0))
    assert gate is not None and gate.windows == 400
    left, kl, _ = made_windows(2000, 1)
    bounds = np.vectorize(gate.bound)(left)
    assert 0.92 < (kl <= bounds).mean() < 0.98
    predicted = np.vectorize(gate.predict)(left[:, 2])
    low, high = kl[predicted < np.median(predicted), 2], kl[predicted >= np.median(predicted), 2]
    assert high.mean() > 2 * low.mean()
    grid = np.vectorize(gate.predict)(np.linspace(0, 1, 50))
    assert (np.diff(grid) >= 0).all()
    assert gate.knows(0.3) and not gate.knows(0.95)
    assert fit_gate(SHARES, *made_windows(2 * MIN_WINDOWS - 1, 0)) is None


def test_a_gate_is_one_of_text_as_it_was_found() -> None:
    found, made = made_windows(120, 3), made_windows(60, 4)
    made[1][:] *= 20.0  # as windows are that repeat themselves where nothing looks for repeats
    rows = [np.concatenate(both).tolist() for both in zip(found, made, strict=True)]
    windows = dict(zip(("uncovered", "kl", "top1"), rows, strict=True))
    windows["kinds"] = ["plain code"] * 120 + ["copy prose"] * 60
    gate, alone = gate_of(windows, SHARES), fit_gate(SHARES, *found)
    assert gate is not None and gate == alone and gate.windows == 120
    few = ["plain"] * (2 * MIN_WINDOWS - 1)
    everything = gate_of(windows | {"kinds": few + ["copy"] * (180 - len(few))}, SHARES)
    assert everything is not None and everything.windows == 180 and everything.predict(0.4) > 2 * gate.predict(0.4)


def test_a_profile_is_opened_with_the_gate_of_its_windows(tmp_path: Path) -> None:
    found = [values.tolist() for values in made_windows(100, 5)]
    windows = dict(zip(("uncovered", "kl", "top1"), found, strict=True)) | {"kinds": ["plain"] * 100}
    curve = [CurvePoint(share, share, 0.9, 0.1) for share in SHARES]
    make_profile(gate=GATE, curve=curve, facts={"windows": windows}).save(tmp_path / "a")
    assert Profile.load(tmp_path / "a").gate == fit_gate(SHARES, *made_windows(100, 5)) != GATE
    make_profile(gate=GATE, curve=curve).save(tmp_path / "b")  # of a version that kept no windows
    assert Profile.load(tmp_path / "b").gate == GATE


def test_levels_let_nine_of_ten_windows_pass_and_help_the_rest() -> None:
    left, kl, top1 = made_windows(300, 2)
    gate = fit_gate(SHARES, left, kl, top1)
    assert gate is not None and [level.share for level in gate.levels] == list(SHARES)
    levels = [level.uncovered for level in gate.levels]
    assert levels == sorted(levels, reverse=True) and gate.max_share == 0.3
    for at, level in enumerate(gate.levels[:-1]):
        assert (left[:, at] > level.uncovered).sum() == 30
        assert level.share < level.mean_share < level.share + 0.02 and level.kl < kl[:, at].mean()
    assert gate.level(0.075) == pytest.approx((levels[1] + levels[2]) / 2)
    assert DamageGate.from_record(asdict(gate)) == gate


def test_a_conformal_quantile_has_its_rank() -> None:
    values = np.arange(1.0, 100.0)  # 99 of them: the 95th is exceeded by a new one with 5%
    assert conformal_quantile(values, 0.05) == 95.0
    assert conformal_quantile(values[:9], 0.05) == 9.0  # too few: the largest
    assert conformal_quantile(np.repeat(values, 3), 0.05, each=3) == 95.0


# -- plans -------------------------------------------------------------------------------------------------------------


def planned(
    peak: float, settings: Prefill | None = None, gate: DamageGate | None = GATE
) -> tuple[PrefillState, PrefillPlan]:
    """Of a prompt whose tail puts this share of its attention on 100 drafted tokens, and next to none on others."""
    state = PrefillState(1, [7] * 1000, array("i"), 0, 1000 - Policy.tail, settings or Prefill("speculative"), 10)
    state.attention = np.full(1000, 1e-5)
    state.attention[400:500] = peak / 100
    source = Cheap()
    profile, costs = make_profile(share=0.02, gate=gate), Costs(state, source, CONFIG)
    return state, plan(state, state.attention, profile, source, costs, Policy(), 0.2 * 1000)


def test_a_prompt_whose_tail_needs_more_gets_more() -> None:
    fixed = len(planned(0.5, gate=None)[1].todo) - (Policy.spans - Policy.gated_spans) * Policy.span
    counts = []
    for peak in (0.1, 0.5, 0.95):
        state, made = planned(peak, gate=TIGHT)
        counts.append(len(made.todo))
        assert uncovered(state, made.todo) <= TIGHT.level(0.02) + 1e-9
    assert counts[0] == fixed < counts[1] < counts[2]
    wide = PrefillState(1, [7] * 1000, array("i"), 0, 1000 - Policy.tail, Prefill("speculative"), 10)
    wide.attention = np.full(1000, 1e-3)  # on all alike: no share of the tokens is enough
    source = Cheap()
    made = plan(wide, wide.attention, make_profile(gate=GATE), source, Costs(wide, source, CONFIG), Policy(), 200.0)
    most = round(GATE.max_share * (wide.end - Policy.first))
    least = Policy.first + Policy.spans * Policy.span
    assert most + Policy.first <= len(made.todo) <= most + least and not made.exact


def test_quality_takes_exact_prefill_rather_than_less_and_a_budget_no_more() -> None:
    curve = [CurvePoint(s, 0.3 + s, 0.9 + s, 0.1 - 0.2 * s) for s in SHARES]
    source, flat = Cheap(), np.full(1000, 1e-3)
    for settings, exact in ((Prefill("speculative", quality=0.99), True), (Prefill("speculative", budget=0.45), False)):
        state = PrefillState(1, [7] * 1000, array("i"), 0, 1000 - Policy.tail, settings, 10)
        state.attention = flat
        profile = make_profile(gate=GATE, curve=curve)
        made = plan(state, flat, profile, source, Costs(state, source, CONFIG), Policy(), 200.0)
        assert bool(made.exact) == exact
        if exact:
            assert "a KL of at most" in made.exact and "30% of the tokens" in made.exact
        else:
            assert made.cost <= 0.45


# -- prompts -----------------------------------------------------------------------------------------------------------


def test_the_report_says_what_is_predicted_and_whether_that_covers_the_text(ctx: DraftContext) -> None:
    prefiller = make_prefiller(ctx, Fake(ctx, (0, 200), noise=0.3), gate=GATE)
    report = drive(prefiller, start(prefiller, ctx)).report
    assert (
        report.uncovered is not None and 0.0 < report.uncovered < GATE.knots[-1]
    )  # attention of random weights is flat
    assert report.predicted_kl == pytest.approx(GATE.predict(report.uncovered), abs=1e-5)
    assert report.kl_bound == pytest.approx(2 * report.predicted_kl, abs=2e-5) and report.covered is True
    far = DamageGate((0.0, 1e-6), (0.01, 0.02), 2.0, 100, LEVELS)
    prefiller = make_prefiller(ctx, Fake(ctx), gate=far)
    assert drive(prefiller, start(prefiller, ctx)).report.covered is False
    plain = make_prefiller(ctx, Fake(ctx))
    report = drive(plain, start(plain, ctx)).report
    assert report.uncovered is not None and report.predicted_kl is report.kl_bound is report.covered is None
    report = drive(plain, start(plain, ctx, Prefill("speculative", chooser="random"))).report
    assert report.uncovered is None


def test_beside_a_gate_one_bad_span_passes_and_broken_drafts_end_exact(ctx: DraftContext) -> None:
    end = 203 - POLICY.tail
    one = make_prefiller(ctx, Fake(ctx, (16 + 3 * (end - 16) // 4, end)), gate=GATE, thresholds=STRICT)
    state = drive(one, start(one, ctx))
    assert state.stage is PrefillStage.DONE and state.report.rounds == 1
    broken = make_prefiller(ctx, Fake(ctx, (0, 203)), gate=GATE, thresholds=STRICT)
    state = drive(broken, start(broken, ctx))
    assert state.stage is PrefillStage.EXACT and state.report.fell_back == "3 of 3 check spans are broken"
    assert state.report.rounds == 1


def test_beside_a_gate_there_are_fewer_check_spans() -> None:
    for gate, spans in ((None, 4), (GATE, 3)):
        state = PrefillState(1, [7] * 4000, array("i"), 0, 3936, Prefill("speculative"), CONFIG.num_layers)
        profile, costs = make_profile(share=0.1, gate=gate), Costs(state, Cheap(), CONFIG)
        made = plan(state, np.random.default_rng(0).random(4000), profile, Cheap(), costs, Policy())
        assert len(made.spans) == spans
        assert expected_plan(state, profile, Cheap(), costs, Policy()).cost == pytest.approx(made.cost, rel=0.02)
    assert Policy(spans=1).beside(GATE).spans == 1 and Policy().beside(None) == Policy()


@pytest.mark.parametrize("drift", [None, 0.5, 1.5])
def test_a_text_that_the_gate_knows_is_not_checked_before_it_is_read(drift: float | None, ctx: DraftContext) -> None:
    texts = None if drift is None else SimpleNamespace(drift=lambda ids: drift)
    policy = replace(POLICY, first_check_tokens=48, chunk=40)
    about: dict[str, Any] = {"gate": GATE, "thresholds": STRICT, "policy": policy, "texts": texts}
    broken = make_prefiller(ctx, Fake(ctx, (0, 203)), **about)
    state = drive(broken, start(broken, ctx))
    assert state.stage is PrefillStage.EXACT
    assert state.report.fell_back.startswith("3 of 3" if drift == 0.5 else "a first check")


def test_fewer_words_are_shown_where_the_gate_doubts_them(ctx: DraftContext) -> None:
    curve = [CurvePoint(share, 0.3 + share, 0.9, 0.1 - 0.2 * share) for share in SHARES]  # 0.08 at the default share
    prefiller = make_prefiller(ctx, Fake(ctx), gate=GATE, curve=curve)
    report = PrefillReport(source="draft", predicted_kl=0.04, kl_bound=0.1)
    assert prefiller.max_shown(report, 20) == 20
    report.predicted_kl = 0.16
    assert prefiller.max_shown(report, 20) == 10
    report.predicted_kl = 9.0
    assert prefiller.max_shown(report, 20) == MIN_SHOWN
    report.kl_bound = None  # of copied chunks
    assert prefiller.max_shown(report, 20) == 20
