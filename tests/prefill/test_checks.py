"""Checks: each signal against the obvious way to compute it, and what passes."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.decode.draft_context import DraftContext
from forerun.errors import BadProfile
from forerun.models.execution.runner import Span
from forerun.models.linear import rms_norm
from forerun.prefill.checks import SIGNALS, Checker, CheckSpan, Scores, check_thresholds, divergence
from forerun.prefill.recompute import RaggedDepthPass, Rows
from tests.prefill.fakes import IDS, make_draft_context, own_pages, slots, stored

SPANS = [CheckSpan(30, 8, 0, 80), CheckSpan(110, 8, 80, 190)]
ENTRIES = np.concatenate([span.entries for span in SPANS])
SINKS, BASE = 16, 1


def disturb(ctx: DraftContext, pages: array[int], entries: np.ndarray, amount: float) -> None:
    draw, at = torch.Generator().manual_seed(1), slots(pages, entries)
    for layer in ctx.pool.kv[BASE:]:
        for cache in layer:
            cache[at] += amount * cache[at].std() * torch.randn(cache[at].shape, generator=draw)


def recomputed(ctx: DraftContext, pages: array[int], checker: Checker, rows: np.ndarray, chunk: int) -> None:
    for lo in range(0, len(rows), chunk):
        part = rows[lo : lo + chunk]
        ids = np.array(IDS)[part]
        depths = np.full(len(part), ctx.runner.decoder.config.num_layers)
        RaggedDepthPass(ctx.runner).run(Rows(ids, part, pages, depths), checker.watch(part))


def slow_cosine(ctx: DraftContext, layer: int, t: int, x: Tensor, q: Tensor, true, drafted) -> tuple[float, float]:
    """One row over the sampled keys, head by head."""
    decoder = ctx.runner.decoder
    config, w = decoder.config, decoder.layers[layer]
    window = config.windows[layer] or 1 << 30
    keys = [e for e in (*range(SINKS), *ENTRIES.tolist()) if t - window < e <= t]
    outs = []
    for now in (True, False):
        heads = []
        for head in range(config.num_heads):
            shared = head * config.num_kv_heads // config.num_heads
            k, v = (
                torch.stack([(true if now or e < SINKS else drafted)[layer][j][e, shared] for e in keys])
                for j in (0, 1)
            )
            heads.append(torch.softmax(k @ q[head] * config.scale, 0) @ v)
        outs.append(torch.cat(heads))
    added = [w.o(out[None])[0] for out in outs]
    if w.post_attn_norm is not None:
        added = [rms_norm(a, w.post_attn_norm) for a in added]
    pairs = (outs[0], outs[1]), (x + added[0], x + added[1])
    attention, hidden = (float(F.cosine_similarity(a, b, dim=0)) for a, b in pairs)
    return attention, hidden


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
@pytest.mark.parametrize("chunk", [5, 100])
def test_signals_are_what_they_say(family: str, chunk: int, tiny_folder: Callable[[str], Path]):
    ctx = make_draft_context(tiny_folder(family))
    pages, layers = own_pages(ctx), ctx.runner.decoder.config.num_layers
    inputs: dict[int, tuple[Tensor, Tensor]] = {}

    def keep(layer: int, x: Tensor, q: Tensor | None, a: Tensor | None) -> None:
        if q is not None:
            inputs[layer] = (x.clone(), q.clone())

    ctx.runner.forward([Span(IDS, 0, pages, ())], watch=keep)
    true = stored(ctx, pages, 0, len(IDS))
    disturb(ctx, pages, ENTRIES, 0.5)
    drafted = stored(ctx, pages, 0, len(IDS))
    checker = Checker(ctx.runner, pages, SPANS, BASE, SINKS)
    recomputed(ctx, pages, checker, np.sort(np.concatenate(([20, 25, 60], ENTRIES))), chunk)
    values = checker.scores().values
    assert set(values) == set(SIGNALS)
    for s, span in enumerate(SPANS):
        for layer in range(BASE, layers):
            for j, signal in enumerate(("key", "value")):
                old, new = (kv[layer][j][span.entries] for kv in (drafted, true))
                assert values[signal][layer, s] == pytest.approx(float((old - new).norm() / new.norm()), rel=1e-3)
            if layer == layers - 1:
                assert values["attention"][layer, s] == values["hidden"][layer, s] == 1.0
                continue
            x, q = inputs[layer]
            both = [slow_cosine(ctx, layer, t, x[t], q[t], true, drafted) for t in span.entries.tolist()]
            assert values["attention"][layer, s] == pytest.approx(np.mean([b[0] for b in both]), abs=1e-4)
            assert values["hidden"][layer, s] == pytest.approx(np.mean([b[1] for b in both]), abs=1e-4)
    assert (values["key"][:BASE] == 0.0).all() and (values["attention"][:BASE] == 1.0).all()


def test_worse_drafts_have_worse_scores(tiny_folder: Callable[[str], Path]):
    ctx = make_draft_context(tiny_folder("llama"))
    pages = own_pages(ctx)
    found = []
    for amount in (0.0, 0.1, 0.5, 2.0):
        ctx.runner.forward([Span(IDS, 0, pages, ())])
        disturb(ctx, pages, ENTRIES, amount)
        checker = Checker(ctx.runner, pages, SPANS, BASE, SINKS)
        recomputed(ctx, pages, checker, ENTRIES, 100)
        found.append(checker.scores())
    for signal, sign in (("key", 1), ("value", 1), ("attention", -1), ("hidden", -1)):
        means = [sign * s.values[signal][BASE:].mean() for s in found]
        assert means == sorted(means) and means[-1] > means[0]
    assert found[0].values["key"].max() < 1e-4


def make_scores(**bad: float) -> Scores:
    """Ten layers, two spans; the second span's layers 2 to 5 have these values, everything else is perfect."""
    values = {s: np.full((10, 2), float(s in ("attention", "hidden"))) for s in SIGNALS}
    for signal, value in bad.items():
        values[signal][2:6, 1] = value
    return Scores(values, 1, finite=np.ones(2, dtype=bool))


LIMITS = {"key": [0.3] * 10, "value": [0.5] * 10, "attention": [0.9] * 10, "hidden": [0.9] * 10}


@pytest.mark.parametrize(
    ("signal", "fails", "passes"),
    [("key", 0.31, 0.3), ("value", 0.51, 0.5), ("attention", 0.89, 0.9), ("hidden", 0.89, 0.9), ("key", np.nan, 0.0)],
)
def test_a_span_fails_by_its_share_of_failing_layers(signal: str, fails: float, passes: float):
    assert make_scores(**{signal: fails}).passed(LIMITS, 0.25).tolist() == [True, False]
    assert make_scores(**{signal: fails}).passed(LIMITS, 4 / 9).tolist() == [True, True]  # of nine drafted layers
    assert make_scores(**{signal: passes}).passed(LIMITS, 0.0).tolist() == [True, True]
    assert make_scores(**{signal: fails}).passed({}, 0.0).tolist() == [True, True]  # no threshold, no failure


def test_layers_that_were_not_drafted_do_not_count():
    scores = make_scores()
    scores.values["key"][0] = 9.0
    assert scores.passed(LIMITS, 0.0).all()


def test_reports_are_plain_numbers():
    scores = make_scores(key=np.nan)
    assert scores.of_spans()[0] == {"key": 0.0, "value": 0.0, "attention": 1.0, "hidden": 1.0}
    assert all(np.isfinite(v) for values in scores.means().values() for v in values)


def test_no_watch_where_no_checkpoint_runs(tiny_folder: Callable[[str], Path]):
    ctx = make_draft_context(tiny_folder("llama"))
    checker = Checker(ctx.runner, own_pages(ctx), SPANS, BASE, SINKS)
    assert checker.watch(np.array([1, 29, 38, 190])) is None
    assert checker.watch(np.array([1, 37])) is not None


def test_divergence_is_the_mean_kl():
    p, q = torch.tensor([[0.5, 0.5], [0.9, 0.1]]), torch.tensor([[0.5, 0.5], [0.6, 0.4]])
    expected = (0.9 * np.log(0.9 / 0.6) + 0.1 * np.log(0.1 / 0.4)) / 2
    assert divergence(p.log() + 3.0, q.log()) == pytest.approx(expected, rel=1e-5)
    assert divergence(p.log(), p.log()) == pytest.approx(0.0, abs=1e-7)


def test_thresholds_must_fit_the_target():
    check_thresholds({"key": [0.1] * 4, "kl": [0.1]}, 4)
    for wrong in ({"key": [0.1] * 3}, {"kl": [0.1] * 4}):
        with pytest.raises(BadProfile, match="thresholds"):
            check_thresholds(wrong, 4)
