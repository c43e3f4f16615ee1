"""Passes that a device does by itself, with a stand-in for it: the same K/V, checks and answers as step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from forerun.core import HostBatch
from forerun.decode.draft_context import DraftContext
from forerun.engine.engine import Engine
from forerun.models.decoder import RecomputePass
from forerun.models.execution.runner import Runner, Span
from forerun.prefill.checks import Checker
from forerun.prefill.plan import Costs
from forerun.prefill.recompute import RaggedDepthPass, Recomputer, Rows
from forerun.prefill.state import PrefillStage, PrefillState
from tests.engine.common import Answer, finish, leaked
from tests.engine.test_speculative_prefill import prompt
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
    make_prefiller,
    own_pages,
    slots,
    start,
    stored,
)
from tests.prefill.test_engine_prefill import DRAFTED
from tests.prefill.test_engine_prefill import make as make  # noqa: PLC0414 (a fixture)

LAST = len(IDS) - 1
BAD = (16 + 3 * (END - 16) // 4, END)  # what fails its checks and is recomputed in further rounds


@pytest.fixture
def recomputed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """Runners recompute, 150 rows at most; what they were given: (rows, picks) of each pass."""
    passes: list[tuple[int, int]] = []

    @torch.inference_mode()
    def recompute(runner: Runner, batch: HostBatch, picks: np.ndarray) -> RecomputePass:
        passes.append((len(batch.tokens), len(picks)))
        decoder, last = runner.decoder, len(runner.kv) - 1
        kept: list[tuple[Tensor, Tensor]] = []

        def watch(layer: int, x: Tensor, q: Tensor | None, a: Tensor | None) -> None:
            if q is not None:
                kept.append((x[picks], q[picks]))

        sent = batch.to(decoder.device)
        decoder.attention.plan(sent)
        x = decoder.run_layers(decoder.embed(sent.tokens), sent, runner.kv, range(last), watch=watch)
        logits = decoder.logits(decoder.run_layers(x, sent, runner.kv, range(last, last + 1))[-1:])
        return RecomputePass(torch.stack([x for x, _ in kept]), torch.stack([q for _, q in kept]), logits)

    monkeypatch.setattr(Runner, "max_recompute_rows", 150)
    monkeypatch.setattr(Runner, "recompute", recompute)
    yield passes


def last_logits(ctx: DraftContext, state: PrefillState) -> Tensor:
    """What the engine does in the end: all that is not filled yet."""
    rest = state.tokens[state.filled :]
    return ctx.runner.forward([Span(rest, state.filled, state.pages, (len(rest) - 1,))]).logits.clone()


def test_a_recompute_pass_leaves_what_steps_leave(ctx: DraftContext, recomputed: list[tuple[int, int]]):
    entries, layers = np.array([0, 3, 4, 90, 150, 151, 180]), ctx.runner.decoder.config.num_layers
    pages, seen = own_pages(ctx), []
    ctx.runner.forward([Span(IDS, 0, pages, ())])
    rows = Rows(np.array(IDS)[entries][::-1], entries, pages, np.full(7, layers))  # other tokens than lie there
    RaggedDepthPass(ctx.runner).run(rows, lambda i, x, q, a: seen.append((x, q)))
    by_steps = stored(ctx, pages, 0, len(IDS))
    ctx.runner.forward([Span(IDS, 0, pages, ())])
    recompute = RaggedDepthPass(ctx.runner).at_once(rows, np.array([1, 5]))
    assert recompute is not None and recomputed == [(7, 2)]
    for mine, theirs in zip(stored(ctx, pages, 0, len(IDS)), by_steps, strict=True):
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(mine, theirs, strict=True))
    for layer in range(layers - 1):
        assert torch.allclose(recompute.x[layer], seen[layer][0][[1, 5]], atol=1e-6)
        assert torch.allclose(recompute.q[layer], seen[layer][1][[1, 5]], atol=1e-6)


def test_entries_that_start_in_different_layers_run_in_passes_of_their_own(ctx: DraftContext):
    config, base, kept = ctx.runner.decoder.config, 2, 60  # inputs of layer 2 are kept of the first 60 entries
    pages, entries, (exact, _) = own_pages(ctx), np.arange(50, 70), exact_kv(ctx)
    ctx.runner.forward([Span(IDS, 0, pages, ())])
    state = PrefillState(1, IDS, pages, 0, END, BY_SOURCE, config.num_layers)
    rows = Rows(np.array(IDS[:kept]), np.arange(kept), pages, np.full(kept, base))
    state.x = RaggedDepthPass(ctx.runner).run(rows, keep=base).x
    for layer, caches in enumerate(ctx.pool.kv):
        for cache in caches:
            cache[slots(pages, entries if layer >= base else entries[10:])] = 9.0  # what is to be recomputed
    recomputer, state.costs = Recomputer(ctx.runner, POLICY), Costs(state, Fake(ctx, base=base), config)
    assert recomputer.run(state, entries, None) == 10
    assert (state.depths[50:60] == config.num_layers).all() and not state.depths[60:].any()
    assert state.report.token_layers == 10 * (config.num_layers - base)
    assert recomputer.run(state, entries[10:], None) == 10
    for mine, theirs in zip(stored(ctx, pages, 0, 70), exact, strict=True):
        assert all(torch.allclose(a, b[:70], atol=1e-5) for a, b in zip(mine, theirs, strict=True))


def test_only_rows_of_full_depth_run_in_one_pass(ctx: DraftContext, recomputed: list[tuple[int, int]]):
    ragged_pass, pages, none = RaggedDepthPass(ctx.runner), own_pages(ctx), np.zeros(0, dtype=np.int64)
    ids, entries, layers = np.array(IDS[:4]), np.arange(4), ctx.runner.decoder.config.num_layers
    x = torch.zeros(4, ctx.runner.decoder.config.hidden_size)
    assert ragged_pass.at_once(Rows(ids, entries, pages, np.array([layers] * 3 + [2])), none) is None
    assert ragged_pass.at_once(Rows(ids, entries, pages, np.full(4, layers), logits_indices=[3]), none) is None
    assert ragged_pass.at_once(Rows(ids, entries, pages, np.full(4, layers), x=x, first=1), none) is None
    assert ragged_pass.at_once(Rows(ids[:0], entries[:0], pages, np.zeros(0)), none) is None
    assert not recomputed


def test_checks_see_the_same(ctx: DraftContext, recomputed: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch):
    reports = []
    for most in (150, 0):
        monkeypatch.setattr(Runner, "max_recompute_rows", most)
        prefiller = make_prefiller(ctx, Fake(ctx, (40, 120), 0.2), share=0.2)
        if most:
            recomputed.clear()  # of the warm-up
        reports.append(drive(prefiller, start(prefiller, ctx, BY_SOURCE)).report)
    assert len(recomputed) == 1 and recomputed[0][1] == POLICY.spans * POLICY.span
    ours, theirs = reports
    assert ours.scores.keys() == theirs.scores.keys() == {"key", "value", "attention", "hidden"}
    for signal, values in ours.scores.items():
        assert values == pytest.approx(theirs.scores[signal], abs=1e-4)
    assert [s["passed"] for s in ours.spans] == [s["passed"] for s in theirs.spans]
    assert (ours.cost, ours.token_layers, ours.recomputed) == (theirs.cost, theirs.token_layers, theirs.recomputed)


def test_the_tail_runs_with_the_last_rows(ctx: DraftContext, recomputed: list[tuple[int, int]]):
    prefiller = make_prefiller(ctx, Fake(ctx, (30, 60), 0.1), share=0.3)
    recomputed.clear()  # of the warm-up
    state = drive(prefiller, start(prefiller, ctx, BY_SOURCE))
    assert state.stage is PrefillStage.DONE and state.filled == LAST and len(recomputed) == 1
    check_tail(ctx, state)


@pytest.mark.parametrize("read", [False, True])
def test_the_tail_runs_with_the_last_rows_step_by_step_unless_drafters_read_it(
    read: bool, ctx: DraftContext, monkeypatch: pytest.MonkeyPatch
):
    """Its work is counted once in either case."""
    prefiller = make_prefiller(ctx, Fake(ctx, (30, 60), 0.1), share=0.3)
    plain = drive(prefiller, start(prefiller, ctx, BY_SOURCE))
    assert plain.filled == LAST and plain.tail_ran
    check_tail(ctx, plain)
    if read:
        monkeypatch.setattr(ctx.runner, "features", object())
    state = drive(prefiller, start(prefiller, ctx, BY_SOURCE))
    assert state.stage is PrefillStage.DONE and state.filled == (END if read else LAST)
    assert (state.report.cost, state.report.token_layers) == (plain.report.cost, plain.report.token_layers)


def check_tail(ctx: DraftContext, state: PrefillState) -> None:
    """What is known of it, and what its last token gives, is what running it over the K/V as it is now gives."""
    known, mine, tail = state.logits, last_logits(ctx, state), state.tokens[state.end :]
    theirs = ctx.runner.forward([Span(tail, state.end, state.pages, (len(tail) - 1,))]).logits
    assert known is not None and apart(mine, theirs) < 1e-5 and apart(known, theirs) < 1e-5


def test_the_tail_runs_again_after_a_round_that_failed(ctx: DraftContext, recomputed: list[tuple[int, int]]):
    prefiller = make_prefiller(ctx, Fake(ctx, BAD, price=0.05), thresholds=STRICT)
    state = drive(prefiller, start(prefiller, ctx, BY_SOURCE))
    assert state.stage is PrefillStage.DONE and state.report.rounds > 1 and state.filled == LAST
    check_tail(ctx, state)


def test_more_rows_than_one_pass_takes_run_in_several(ctx: DraftContext, recomputed: list[tuple[int, int]]):
    prefiller = make_prefiller(ctx, Fake(ctx, (0, len(IDS)), price=0.0), share=1.0)
    recomputed.clear()  # of the warm-up
    prefiller.policy = replace(POLICY, spans=0)
    state = drive(prefiller, start(prefiller, ctx, BY_SOURCE))
    room = 150 - POLICY.tail
    assert [rows for rows, _ in recomputed] == [room, END - room + POLICY.tail]
    assert apart(last_logits(ctx, state), exact_kv(ctx)[1]) < 1e-4


def test_a_round_that_is_not_one_pass_leaves_no_tail_of_the_round_before(
    ctx: DraftContext, recomputed: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
):
    prefiller = make_prefiller(ctx, Fake(ctx, BAD, price=0.05), thresholds=STRICT)
    state = start(prefiller, ctx, BY_SOURCE)
    while state.report.rounds < 2:
        prefiller.advance(state, 1)
    assert state.filled == LAST
    monkeypatch.setattr(Runner, "recompute", lambda *_: None)
    before = state.logits
    drive(prefiller, state)
    assert state.stage is PrefillStage.DONE and state.filled == LAST and state.tail_ran  # to compare the rounds
    assert state.logits is not None and before is not None and not torch.equal(state.logits, before)
    torch.testing.assert_close(state.logits, answer(ctx, state), atol=2e-4, rtol=1e-3)


def test_warming_up_gives_its_pages_back(ctx: DraftContext, recomputed: list[tuple[int, int]]):
    free, seen = ctx.pool.free, []
    scores = Checker.scores
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checker, "scores", lambda checker, kl=None: seen.append(scores(checker, kl)))
        make_prefiller(ctx, Fake(ctx))
    assert len(recomputed) == len(seen) == 2 and ctx.pool.free == free  # of drafts, of copies


@pytest.mark.parametrize("prefill", ["speculative", "provisional"])
def test_answers_are_those_of_step_by_step(
    prefill: str, make: Callable[..., Engine], recomputed: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
):
    answers = []
    for most in (150, 0):
        monkeypatch.setattr(Runner, "max_recompute_rows", most)
        engine = make("draft")
        recomputed.clear()
        given = [Answer(engine, prompt(i, 150 + 30 * i), replace(DRAFTED, prefill=prefill)) for i in range(3)]
        finish(engine)
        assert (most > 0) == bool(recomputed) and leaked(engine) == 0
        answers.append([a.tokens() for a in given])
    assert answers[0] == answers[1]
