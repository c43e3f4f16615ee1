"""Choosers and selection, and the tail's attention against the obvious way to compute it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forerun.models.execution.runner import Span
from forerun.params import PREFILL_CHOOSERS
from forerun.prefill.choosers import (
    CHOOSERS,
    chooser_for,
    chooser_problem,
    select,
    tail_attention,
    warm_up,
)
from forerun.prefill.state import PrefillState
from tests.prefill.fakes import END, IDS, SETTINGS, Fake, make_draft_context, own_pages, slots


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.integers(0, 70))
def test_selection_takes_the_best_in_order(values: list[int], count: int):
    scores = np.array(values, dtype=np.float64)
    candidates = np.arange(len(values))[len(values) // 3 :]
    taken = select(scores, candidates, count)
    assert len(taken) == min(count, len(candidates)) and (np.diff(taken) > 0).all()
    assert set(taken) <= set(candidates.tolist())
    left = np.setdiff1d(candidates, taken)
    if len(taken) and len(left):
        assert scores[taken].min() >= scores[left].max()


def test_of_equals_the_first_are_taken():
    assert select(np.ones(9), np.array([2, 4, 5, 8]), 2).tolist() == [2, 4]


@given(st.lists(st.sampled_from([0.0, -0.0, 1.0, 2.0, -3.0, np.nan]), min_size=1, max_size=60), st.integers(0, 70))
def test_selection_is_that_of_a_stable_sort(values: list[float], count: int):
    scores, candidates = np.array(values), np.arange(len(values))
    assert select(scores, candidates, count).tolist() == sorted(np.argsort(-scores, kind="stable")[:count].tolist())


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_tail_attention_is_the_softmax_of_its_queries(family: str, tiny_folder: Callable[[str], Path]):
    ctx = make_draft_context(tiny_folder(family))
    runner, config = ctx.runner, ctx.runner.decoder.config
    state = PrefillState(1, IDS, own_pages(ctx), 0, END, SETTINGS, config.num_layers)
    queries = {}

    def watch(layer: int, x: torch.Tensor, q: torch.Tensor | None, a: torch.Tensor | None) -> None:
        if q is not None:
            queries[layer] = q.clone()

    runner.forward([Span(IDS, 0, state.pages, ())], watch=watch)
    expected, layers = np.zeros(len(IDS)), config.num_layers - 1
    for layer in range(layers):
        keys = runner.kv[layer][0][slots(state.pages, np.arange(len(IDS)))]
        window = config.windows[layer] or len(IDS)
        for t in range(END, len(IDS)):
            low = max(0, t + 1 - window)
            for head in range(config.num_heads):
                shared = keys[low : t + 1, head * config.num_kv_heads // config.num_heads]
                weights = torch.softmax(shared @ queries[layer][t, head] * config.scale, 0)
                expected[low : t + 1] += weights.numpy() / config.num_heads / (len(IDS) - END) / layers
    assert tail_attention(runner, state, 1) == pytest.approx(expected, abs=1e-5)


def test_a_device_that_has_the_tail_ready_is_asked_for_it(
    monkeypatch: pytest.MonkeyPatch, tiny_folder: Callable[[str], Path]
):
    ctx = make_draft_context(tiny_folder("llama"))
    runner, asked = ctx.runner, []
    state = PrefillState(1, IDS, own_pages(ctx), 0, END, SETTINGS, runner.decoder.config.num_layers)
    weights = np.random.default_rng(1).random(len(IDS), dtype=np.float32)

    def on_device(span: Span) -> np.ndarray:
        asked.append((span.ids, span.first, span.pages, list(span.logits_indices)))
        return weights

    monkeypatch.setattr(runner, "tail_attention", on_device)
    assert tail_attention(runner, state, 1) is weights
    assert asked == [(IDS[END:], END, state.pages, [])]


def test_warming_up_borrows_pages_where_a_device_captures(
    monkeypatch: pytest.MonkeyPatch, tiny_folder: Callable[[str], Path]
):
    ctx = make_draft_context(tiny_folder("llama"))
    runner, pool, asked = ctx.runner, ctx.pool, []
    free = pool.free

    def on_device(span: Span) -> None:
        asked.append((len(span.ids), span.first, len(span.pages), free - pool.free))

    monkeypatch.setattr(runner, "tail_attention", on_device)
    warm_up(runner, 12)
    assert asked == []  # nothing to capture on a CPU
    monkeypatch.setattr(runner, "graphs", object())
    warm_up(runner, 12)
    warm_up(runner, free * pool.page_size + 1)  # no room: the first prompt waits instead
    assert asked == [(12, 0, 2, 2)] and pool.free == free


def test_choosers_without_a_model_of_their_own(tiny_folder: Callable[[str], Path]):
    ctx = make_draft_context(tiny_folder("llama"))
    state = PrefillState(1, IDS, own_pages(ctx), 0, END, SETTINGS, 4)
    source = Fake(ctx)
    case = (state, source, ctx.runner)
    first, draft = CHOOSERS["start"](*case), CHOOSERS["draft"](*case)
    assert first is not None and draft is not None
    assert select(first, np.arange(16, END), 5).tolist() == [16, 17, 18, 19, 20]
    assert (draft == source.scores(state)).all()
    one, other = CHOOSERS["random"](*case), CHOOSERS["random"](*case)
    assert one is not None and other is not None and (one == other).all() and len(set(one)) == len(IDS)
    source.name = "chunk"  # knows where its spans start
    spans = CHOOSERS["start"](*case)
    assert spans is not None and (spans == source.scores(state)).all()


def test_auto_is_the_tail():
    assert chooser_for("auto") == "tail"
    assert chooser_for("random") == "random" and chooser_for("draft") == "draft"
    assert all(chooser_problem("tail", source, False) is None for source in ("draft", "self", "chunk"))
    assert chooser_problem("draft", "self", False) is not None


def test_the_options_name_every_chooser_and_no_other() -> None:
    """The command line, the server and the docs derive their lists from `PREFILL_CHOOSERS`."""
    assert {"auto", "cross", *CHOOSERS} == set(PREFILL_CHOOSERS)
