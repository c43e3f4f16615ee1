"""The whole way of a drafted prompt, with sources that are right, wrong, or wrong in places."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from forerun.decode.draft_context import DraftContext
from forerun.models.execution.runner import Span
from forerun.params import Prefill
from forerun.prefill.recompute import RaggedDepthPass, Rows
from forerun.prefill.state import PrefillStage, PrefillState
from tests.prefill.fakes import (
    BY_SOURCE,
    END,
    IDS,
    POLICY,
    STRICT,
    Fake,
    answer,
    apart,
    drive,
    exact_kv,
    make_draft_context,
    make_prefiller,
    new_state,
    slots,
    start,
    stored,
)

GARBAGE = (0, len(IDS))


# -- exactness ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
@pytest.mark.parametrize("first", [0, 40])
def test_recomputing_everything_is_exact_whatever_was_drafted(family: str, first: int, tiny_folder):
    ctx = make_draft_context(tiny_folder(family))
    prefiller = make_prefiller(ctx, Fake(ctx, GARBAGE, price=0.0), share=1.0)
    prefiller.policy = replace(POLICY, spans=0)
    state = drive(prefiller, start(prefiller, ctx, BY_SOURCE, first), 50)
    assert state.stage is PrefillStage.DONE
    true, logits = exact_kv(ctx)
    for mine, exact in zip(stored(ctx, state.pages, 0, END), true, strict=True):
        assert all(torch.allclose(a, b[:END], rtol=1e-4, atol=1e-4) for a, b in zip(mine, exact, strict=True))
    assert apart(answer(ctx, state), logits) < 1e-4
    assert state.report.exact == len(IDS) and state.report.drafted == 0
    assert state.report.cost == pytest.approx(1.0)


def test_the_first_entries_and_layer_0_are_exact(ctx: DraftContext):
    prefiller = make_prefiller(ctx, Fake(ctx, GARBAGE))
    state = drive(prefiller, start(prefiller, ctx))
    assert state.stage is PrefillStage.DONE and state.report.exact >= 16
    true, _ = exact_kv(ctx)
    mine = stored(ctx, state.pages, 0, END)
    for layer, (now, exact) in enumerate(zip(mine, true, strict=True)):
        for a, b in zip(now, exact, strict=True):
            assert torch.allclose(a[:16], b[:16], rtol=1e-4, atol=1e-4)
            assert torch.allclose(a, b[:END], rtol=1e-4, atol=1e-4) == (layer == 0)


def test_a_perfect_source_passes_and_only_the_chosen_are_recomputed(ctx: DraftContext):
    prefiller = make_prefiller(ctx, source := Fake(ctx), thresholds=STRICT)
    state = drive(prefiller, start(prefiller, ctx))
    report = state.report
    assert state.stage is PrefillStage.DONE and report.rounds == 1 and not report.fell_back
    assert [span["passed"] for span in report.spans] == [True] * 4
    assert max(report.scores["key"]) < 1e-4 and min(report.scores["attention"]) > 0.9999
    chosen = round(0.1 * (END - 16))
    deep = int((state.depths == state.layers).sum())
    assert 16 + chosen <= deep <= 16 + chosen + 4 * 8
    assert apart(answer(ctx, state), exact_kv(ctx)[1]) < 1e-4
    prefiller.close(state)
    assert source.finished == 1


def test_garbage_fails_the_checks_and_ends_exact(ctx: DraftContext):
    prefiller = make_prefiller(ctx, Fake(ctx, GARBAGE), thresholds=STRICT)
    state = drive(prefiller, start(prefiller, ctx))
    report = state.report
    assert state.stage is PrefillStage.EXACT
    assert report.fell_back.startswith("4 of 4 check spans failed")
    assert report.cost > 1.0 and report.exact == len(IDS) and report.drafted == report.accepted == 0
    assert report.depth_runs == [(state.layers, len(IDS))]


def answer_exactly(ctx: DraftContext, state: PrefillState) -> torch.Tensor:
    """The next token's logits after the engine has computed the prompt on the same pages."""
    return ctx.runner.forward([Span(IDS, 0, state.pages, [len(IDS) - 1])]).logits


@pytest.mark.parametrize("read", [40, 25])
def test_a_first_check_saves_reading_what_is_no_good(ctx: DraftContext, read: int):
    policy = replace(POLICY, first_check_tokens=48, chunk=read)
    bad = make_prefiller(ctx, Fake(ctx, GARBAGE), thresholds=STRICT, policy=policy)
    state = drive(bad, start(bad, ctx))
    assert state.stage is PrefillStage.EXACT and state.report.fell_back.startswith("a first check of 8 of")
    assert 48 <= state.read < 48 + read < END and state.report.cost < 1.3
    assert apart(answer_exactly(ctx, state), exact_kv(ctx)[1]) < 1e-4
    good = make_prefiller(ctx, Fake(ctx), thresholds=STRICT, policy=policy)
    state = drive(good, start(good, ctx))
    assert state.stage is PrefillStage.DONE and apart(answer(ctx, state), exact_kv(ctx)[1]) < 1e-4


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_fails_without_any_threshold_and_leaves_no_trace(value: float, ctx: DraftContext):
    source = Fake(ctx)
    for pair in source._kv[1:]:
        pair[0][60:70] = value
    prefiller = make_prefiller(ctx, source)
    state = drive(prefiller, start(prefiller, ctx, first=24))
    assert state.stage is PrefillStage.EXACT and "finite" in state.report.fell_back
    assert all(cache.isfinite().all() for layer in ctx.pool.kv for cache in layer)
    for lo in range(24, len(IDS), 50):  # as the engine goes on, looking past its own end at what was drafted
        logits = ctx.runner.forward([Span(IDS[lo : lo + 50], lo, state.pages, range(len(IDS[lo : lo + 50])))]).logits
    assert apart(logits[-1:], exact_kv(ctx)[1]) < 1e-4


# -- failing in places -------------------------------------------------------------------------------------------------


def test_a_failing_span_deepens_its_own_region(ctx: DraftContext):
    bad = (16 + 3 * (END - 16) // 4, END)  # the last of four regions
    plain = make_prefiller(ctx, Fake(ctx, bad, price=0.05), share=0.02)
    checked = make_prefiller(ctx, Fake(ctx, bad, price=0.05), share=0.02, thresholds=STRICT)
    before, after = drive(plain, start(plain, ctx)), drive(checked, start(checked, ctx))
    assert after.stage is PrefillStage.DONE and after.report.rounds == 3
    assert [s["passed"] for s in after.report.spans if s["round"] == 1] == [True, True, True, False]
    assert (after.depths[bad[0] + 16 :] == after.layers).all()
    assert (after.depths[: bad[0] - 32] == before.depths[: bad[0] - 32]).all()
    true = exact_kv(ctx)[1]
    assert apart(answer(ctx, after), true) < 0.5 * apart(answer(ctx, before), true)
    assert len(after.report.scores["kl"]) == 2
    assert before.report.cost < after.report.cost <= 1.0
    # four check spans, then one and one again; the tail chooses, runs with the first round and is asked three times,
    # the last of which the answer starts from; each row that ran is counted
    rows = int((after.depths == after.layers).sum()) + 2 * POLICY.span + 5 * POLICY.tail
    assert after.report.token_layers == after.layers * rows + END
    work = 0.05 * len(IDS) + rows + check_work(ctx, 6)
    assert after.report.cost * len(IDS) == pytest.approx(work)


def test_a_tail_that_no_longer_moves_ends_the_rounds(ctx: DraftContext):
    bad = (16 + 3 * (END - 16) // 4, END)
    for limit, rounds in ((100.0, 2), (0.0, 3)):
        thresholds = STRICT | {"kl": [limit]}
        prefiller = make_prefiller(ctx, Fake(ctx, bad, price=0.05), share=0.02, thresholds=thresholds)
        assert drive(prefiller, start(prefiller, ctx)).report.rounds == rounds


# -- pieces ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chooser", ["draft", "tail", "start", "random"])
@pytest.mark.parametrize("budget", [1, 7, 33])
def test_pieces_give_what_one_big_step_gives(chooser: str, budget: int, ctx: DraftContext):
    settings = Prefill("speculative", chooser=chooser)
    states = []
    for step in (budget, 100_000):
        prefiller = make_prefiller(ctx, Fake(ctx, GARBAGE, noise=0.3))
        states.append(drive(prefiller, start(prefiller, ctx, settings), step))
    parts, whole = states
    assert (parts.depths == whole.depths).all()
    kv = [stored(ctx, state.pages, 0, END) for state in states]
    for a, b in zip(*kv, strict=True):
        assert all(torch.allclose(x, y, rtol=1e-3, atol=1e-4) for x, y in zip(a, b, strict=True))
    for signal, values in whole.report.scores.items():
        assert parts.report.scores[signal] == pytest.approx(values, abs=1e-3)
    assert parts.report.cost == pytest.approx(whole.report.cost)
    assert parts.report.token_layers == whole.report.token_layers


def test_a_piece_is_no_larger_than_asked_for(ctx: DraftContext):
    prefiller = make_prefiller(ctx, Fake(ctx))
    state = start(prefiller, ctx)
    pieces = []
    while not state.finished:
        pieces.append(prefiller.advance(state, 20))
    assert max(pieces) <= 20 + 10  # what the checks cost may come on top of the last rows
    assert sum(pieces) >= state.report.cost * len(IDS) >= sum(pieces) - len(pieces)


# -- costs and the report ----------------------------------------------------------------------------------------------


def check_work(ctx: DraftContext, spans: int) -> float:
    """Both outputs of every checkpoint row, in tokens of the target's prefill."""
    config = ctx.runner.decoder.config
    layer = config.hidden_size * (2 * config.q_size + 2 * config.kv_size + 3 * config.intermediate_size)
    return spans * POLICY.span * 2 * config.hidden_size * config.q_size / layer


@pytest.mark.parametrize(
    ("asked", "chooser", "tails"), [("draft", "draft", 1), ("tail", "tail", 2), ("auto", "tail", 2)]
)
@pytest.mark.parametrize("first", [0, 40])
def test_costs_and_tokens_add_up(first: int, asked: str, chooser: str, tails: int, ctx: DraftContext):
    """The engine runs the tail in the end; asking it what to recompute runs it once more."""
    prefiller = make_prefiller(ctx, Fake(ctx, price=0.25))
    state = drive(prefiller, start(prefiller, ctx, Prefill("speculative", chooser=asked), first))
    report, rows, tail = state.report, int((state.depths[first:] == state.layers).sum()), tails * POLICY.tail
    assert report.chooser == chooser
    assert report.tokens == report.exact + report.accepted + report.recomputed + POLICY.tail
    assert report.drafted == report.accepted + report.recomputed
    exact = len(IDS) - first
    assert report.cost * exact == pytest.approx(0.25 * len(IDS) + rows + check_work(ctx, 4) + tail)
    assert report.token_layers == state.layers * (rows + tail) + (END - first)
    assert sum(count for _, count in report.depth_runs) == len(IDS)
    assert sum(count for depth, count in report.depth_runs if depth == state.layers) == first + rows + POLICY.tail
    assert set(report.scores) == {"key", "value", "attention", "hidden"}
    assert all(len(values) == state.layers for values in report.scores.values())
    assert report.read_s > 0 and report.recompute_s > 0 and report.check_s > 0


def test_a_budget_is_kept(ctx: DraftContext):
    costs = []
    for budget in (0.6, 0.8, 0.95):
        prefiller = make_prefiller(ctx, Fake(ctx))
        state = drive(prefiller, start(prefiller, ctx, Prefill("speculative", budget=budget)))
        assert state.stage is PrefillStage.DONE
        costs.append(state.report.cost)
        assert state.report.cost <= budget
    assert costs[0] < costs[1] < costs[2]


@pytest.mark.parametrize("first", [0, 40])
def test_rows_go_on_from_kept_inputs(first: int, ctx: DraftContext):
    """A source that ran the target's lower layers keeps what came out of them, and recomputing costs the rest only."""

    class Lower(Fake):
        def read(self, state: PrefillState, count: int) -> None:
            lo, hi = max(state.read, state.first), min(state.read + count, state.end)
            super().read(state, count)
            if lo < hi:
                rows = Rows(np.array(IDS[lo:hi]), np.arange(lo, hi), state.pages, np.full(hi - lo, self.base))
                x = RaggedDepthPass(ctx.runner).run(rows, keep=self.base).x
                assert x is not None
                state.x = x if state.x is None else torch.cat((state.x, x))

    prefiller = make_prefiller(ctx, Lower(ctx, GARBAGE, price=0.0, base=2), share=1.0)
    prefiller.policy = replace(POLICY, spans=0)
    state = drive(prefiller, start(prefiller, ctx, BY_SOURCE, first), 64)
    assert apart(answer(ctx, state), exact_kv(ctx)[1]) < 1e-4
    assert state.report.cost == pytest.approx(((END - first) * 2 / 4 + POLICY.tail) / (len(IDS) - first))
    assert state.report.token_layers == 4 * (len(IDS) - first)


# -- what lies around --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chooser", ["draft", "tail"])
def test_nothing_is_written_but_the_prompts_own_new_entries(chooser: str, ctx: DraftContext):
    bad = (16 + 3 * (END - 16) // 4, END)
    prefiller = make_prefiller(ctx, Fake(ctx, bad, price=0.05), thresholds=STRICT)
    state = start(prefiller, ctx, Prefill("speculative", chooser=chooser), first=24)
    before = [[cache.clone() for cache in layer] for layer in ctx.pool.kv]
    drive(prefiller, state, 30)
    assert state.report.rounds > 1
    mine = slots(state.pages, np.arange(24, len(IDS)))
    for old, new in zip(before, ctx.pool.kv, strict=True):
        for a, b in zip(old, new, strict=True):
            b = b.clone()
            b[mine] = a[mine]
            assert torch.equal(a, b)


def test_known_entries_are_not_read_and_only_the_chosen_are_recomputed(ctx: DraftContext):
    earlier = make_prefiller(ctx, Fake(ctx, GARBAGE, noise=0.5), share=0.05)
    state = drive(earlier, start(earlier, ctx))
    known, depths = 100, state.depths.copy()
    before = stored(ctx, state.pages, 0, known)
    later = make_prefiller(ctx, source := Fake(ctx, GARBAGE, noise=0.5), share=0.3)
    second = new_state(later, IDS, state.pages)
    second.add_known(depths[:known])
    again = drive(later, later.open(second))
    assert min(source.read_entries) == known
    fresh = (again.depths[:known] == again.layers) & (depths[:known] < again.layers)
    assert 0 < fresh.sum() < known
    for old, new in zip(before, stored(ctx, state.pages, 0, known), strict=True):
        changed = (old[0] != new[0]).flatten(1).any(1).numpy()
        assert not changed[~fresh].any()
    assert again.report.cost < 1.0
