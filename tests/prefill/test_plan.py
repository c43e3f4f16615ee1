"""Plans: what is always recomputed, where check spans lie, what it costs, and when exact prefill is taken."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forerun.models.config import ModelConfig
from forerun.params import Prefill
from forerun.prefill.plan import Costs, Policy, PrefillPlan, deepen, expected_plan, least_work, place, plan, too_short
from forerun.prefill.profile import CurvePoint
from forerun.prefill.sources import KVSource
from forerun.prefill.state import PrefillState
from tests.prefill.fakes import make_profile

CONFIG = ModelConfig("llama", 100, 64, 10, 4, 2, 16, 128, 4096)
LAYERS = CONFIG.num_layers
NONE = np.zeros(0, dtype=np.int64)


class Cheap(KVSource):
    name, base = "draft", 1

    def read(self, state: PrefillState, count: int) -> None:
        raise AssertionError("a plan runs nothing")

    def cost(self, tokens: int) -> float:
        return 0.2 * tokens


class Holes(Cheap):
    """Leaves entries without K/V."""

    leaves_gaps = True

    def missing(self, state: PrefillState) -> np.ndarray:
        return np.arange(300, 340)


def make_state(
    tokens: int = 1000, first: int = 0, settings: Prefill | None = None, policy: Policy | None = None
) -> PrefillState:
    end = max(first, tokens - (policy or Policy()).tail)
    return PrefillState(1, [7] * tokens, array("i"), first, end, settings or Prefill("speculative"), LAYERS)


def planned(
    state: PrefillState, share: float = 0.1, source: KVSource | None = None, policy: Policy | None = None, **about
) -> PrefillPlan:
    source, policy = source or Cheap(), policy or Policy()
    scores = np.random.default_rng(1).random(len(state.tokens))
    costs = Costs(state, source, CONFIG)
    return plan(
        state, scores, make_profile(share=share, **about), source, costs, policy, source.cost(len(state.tokens))
    )


@given(st.integers(600, 3000), st.sampled_from([0, 8, 16, 100]), st.floats(0.0, 0.5), st.integers(0, 6))
def test_a_plan_holds_what_it_must(tokens: int, first: int, share: float, spans: int):
    policy = Policy(spans=spans)
    state = make_state(tokens, first)
    made = planned(state, share, policy=policy)
    assert not made.exact and (np.diff(made.todo) > 0).all()
    assert made.todo.min(initial=first) >= first and made.todo.max(initial=0) < state.end
    assert set(range(first, 16)) <= set(made.todo.tolist())
    extra = len(made.todo) - max(0, 16 - first) - round(share * (state.end - max(first, 16)))
    assert 0 <= extra <= spans * policy.span
    assert {entry for span in made.spans for entry in span.entries} <= set(made.todo.tolist())


@given(st.integers(100, 2000), st.integers(0, 200), st.integers(0, 8), st.integers(1, 20), st.integers(0, 9))
def test_checkpoints_lie_apart_on_drafted_entries(end: int, first: int, spans: int, span: int, seed: int):
    policy = Policy(spans=spans, span=span, tail=1)
    state = make_state(end + 1, min(first, end), policy=policy)
    rng = np.random.default_rng(seed)
    state.depths[rng.choice(end, end // 20)] = LAYERS
    rows = np.sort(rng.choice(end, end // 10, replace=False))
    made = place(state, rows, NONE, policy)
    assert made == place(state, rows, NONE, policy) and len(made) <= spans
    taken = np.concatenate([c.entries for c in made]) if made else np.zeros(0, dtype=int)
    assert (np.diff(taken) > 0).all() and (state.depths[taken] < LAYERS).all()
    assert taken.min(initial=end) >= max(16, state.first) or not made
    if made:
        assert made[0].lo == state.first and made[-1].hi == end
        assert all(a.hi == b.lo for a, b in zip(made, made[1:], strict=False))
        assert all(c.lo <= c.first and c.first + c.count <= c.hi for c in made)


def test_checkpoints_go_where_they_cost_least():
    state = make_state(2000)
    rows = np.arange(700, 716)
    assert [c.first for c in place(state, rows, NONE, Policy(spans=1))] == [700]
    apart = [c.first for c in place(state, NONE, NONE, Policy(spans=4))]
    assert np.diff(apart) == pytest.approx([480] * 3, abs=2)


def test_checkpoints_avoid_what_was_not_drafted():
    state = make_state(2000)
    middle = place(state, NONE, NONE, Policy(spans=1))[0].first
    bare = np.arange(middle - 50, middle + 50)
    (moved,) = place(state, bare, bare, Policy(spans=1))  # not even where they are recomputed anyway
    assert not set(bare.tolist()) & set(moved.entries.tolist())
    assert place(state, NONE, np.arange(16, state.end), Policy()) == []


def test_expected_cost_counts_everything():
    state = make_state()
    made = planned(state)
    check = 64 * 2 * 64 / (2 * 64 + 2 * 32 + 3 * 128)
    assert made.cost == pytest.approx((200 + len(made.todo) + check + 64) / 1000)
    later = make_state(first=400)
    shorter = planned(later)  # the source reads all of it nevertheless
    assert shorter.cost == pytest.approx((200 + len(shorter.todo) + check + 64) / 600)


@given(st.floats(0.35, 1.0), st.integers(600, 3000))
def test_a_budget_limits_the_choice(budget: float, tokens: int):
    state = make_state(tokens, settings=Prefill("speculative", budget=budget))
    made = planned(state, curve=[CurvePoint(0.0, 0.2, 0.9, 0.1), CurvePoint(0.2, 0.3, 0.95, 0.05)])
    costs = Costs(state, Cheap(), CONFIG)
    least = 0.2 * tokens + least_work(state, np.arange(16), costs, Policy())
    if budget * tokens < least:
        assert "budget" in made.exact
    else:
        assert not made.exact and made.cost <= budget + 1e-9


@given(
    st.integers(30, 3000),
    st.sampled_from([0, 8, 16, 100]),
    st.floats(0.0, 1.0),
    st.sampled_from([None, 0.3, 0.4, 0.9]),
    st.sampled_from([Policy(), Policy(spans=0), Policy(spans=7, span=40, tail=1)]),
    st.sampled_from([Cheap(), Holes()]),
    st.booleans(),
)
def test_what_is_foreseen_is_what_a_plan_without_scores_says(
    tokens: int, first: int, share: float, budget: float | None, policy: Policy, source: KVSource, known: bool
):
    state = make_state(max(tokens, 500), first, Prefill("speculative", budget=budget), policy)
    state.depths[first : first + 200 * known] = LAYERS
    costs, profile, spent = Costs(state, source, CONFIG), make_profile(share=share), source.cost(len(state.tokens))
    expected = plan(state, None, profile, source, costs, policy, spent)
    found = expected_plan(state, profile, source, costs, policy, spent)
    assert found.exact == expected.exact and found.cost == pytest.approx(expected.cost)


def test_a_budget_without_a_curve_is_used_up():
    made = planned(make_state(settings=Prefill("speculative", budget=0.6)))
    assert 0.5 < made.cost <= 0.6


def test_what_cannot_be_had_is_exact_prefill():
    curve = [CurvePoint(0.0, 0.3, 0.9, 0.1), CurvePoint(0.2, 0.5, 0.95, 0.05)]
    best = planned(make_state(settings=Prefill("speculative", quality=0.99)), curve=curve)
    assert "0.99" in best.exact and "0.950" in best.exact
    asked = make_state(settings=Prefill("speculative", quality=0.95))
    assert len(planned(asked, policy=Policy(spans=0), curve=curve).todo) == 16 + 184
    poor = planned(make_state(settings=Prefill("speculative", budget=0.25)), curve=curve)
    assert "0.25" in poor.exact and "0.30" in poor.exact
    assert "cost" in planned(make_state(), share=0.9).exact


def test_each_token_is_chosen_by_its_own_score():
    """A single token that the tail looks at is taken, whatever lies beside it."""
    state, source = make_state(), Cheap()
    scores = np.random.default_rng(1).random(1000)
    best = 16 + np.sort(np.argsort(-scores[16 : state.end], kind="stable")[:92])  # a tenth of them
    costs, profile, read = Costs(state, source, CONFIG), make_profile(share=0.1), source.cost(1000)
    made = plan(state, scores, profile, source, costs, Policy(spans=0), read)
    assert made.todo.tolist() == [*range(16), *best.tolist()]


def test_what_the_source_left_out_is_recomputed_and_not_chosen():
    made = planned(make_state(), source=Holes())
    assert set(range(300, 340)) <= set(made.todo.tolist())
    unchecked = planned(make_state(), source=Holes(), policy=Policy(spans=0))
    assert len(unchecked.todo) == 16 + 40 + round(0.1 * (1000 - 64 - 16 - 40))
    assert len(made.spans) == 4 and not set(range(300, 340)) & {e for c in made.spans for e in c.entries}


def test_what_is_deep_already_is_left_alone():
    state = make_state()
    state.depths[:500] = LAYERS
    made = planned(state)
    assert made.todo.min() >= 500
    assert made.cost < planned(make_state()).cost


def test_deepening_takes_the_best_of_failed_regions():
    state = make_state()
    scores = np.arange(1000, dtype=float)
    spans = place(state, NONE, NONE, Policy())
    state.depths[spans[1].entries] = LAYERS
    half = deepen(state, [spans[1]], scores, 0.5)
    assert set(spans[1].entries) <= set(half.tolist())
    fresh = np.setdiff1d(half, spans[1].entries)
    region = np.setdiff1d(np.arange(spans[1].lo, spans[1].hi), spans[1].entries)
    assert fresh.tolist() == region[len(region) // 2 :].tolist()
    assert deepen(state, [spans[1]], scores, 1.0).tolist() == list(range(spans[1].lo, spans[1].hi))


def test_short_prompts():
    assert "1535" in too_short(make_state(1535 + 64), Policy()) and not too_short(make_state(1536 + 64), Policy())
    third = 1 / 3
    assert "511" in too_short(make_state(511 + 64), Policy(), third) and not too_short(make_state(576), Policy(), third)
    assert "836 tokens are known exactly, 100 tokens" in too_short(make_state(1000, first=836), Policy())
    assert "least is 1" in too_short(make_state(10, first=10), Policy(shortest=0))


@pytest.mark.parametrize("value", [{"spans": -1}, {"span": 0}, {"tail": 0}, {"failing": 1.5}, {"chunk": 0}])
def test_policies_refuse_nonsense(value: dict[str, Any]):
    with pytest.raises(ValueError, match=next(iter(value))):
        Policy(**value)


class Keeping(Cheap):
    """Keeps hidden states as it reads, so that chosen tokens start above its layers."""

    name, base = "self", 3

    def cost(self, tokens: int) -> float:
        return 0.4 * tokens


@pytest.mark.parametrize("known", [0, 100])
def test_what_a_source_will_keep_is_foreseen(known: int) -> None:
    """Before anything is read nothing is kept, but a budget near 1 is still spent on drafting."""
    state, source, policy = make_state(2000, settings=Prefill("speculative", budget=0.95)), Keeping(), Policy()
    state.depths[:known] = LAYERS
    state.x = torch.empty(0, CONFIG.hidden_size)
    costs, profile, spent = Costs(state, source, CONFIG), make_profile(share=0.1), source.cost(len(state.tokens))
    assert expected_plan(state, profile, source, costs, policy, spent).exact == ""
    state.x = torch.empty(len(state.tokens), CONFIG.hidden_size)
    made = plan(state, np.random.default_rng(1).random(2000), profile, source, costs, policy, spent)
    assert not made.exact and 0.8 < made.cost <= 0.95
