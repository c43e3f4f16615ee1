"""Thresholds: signals that show errors in the K/V, and limits that let harmless windows pass."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from forerun.cache.pool import PagePool
from forerun.models.build import build_decoder
from forerun.models.execution.runner import Runner, Span
from forerun.models.formats.checkpoint import open_checkpoint
from forerun.prefill.calibration.dense import LayerActivations
from forerun.prefill.calibration.fit import _examples
from forerun.prefill.calibration.model_pair import (
    FIRST_TOKENS,
    TAIL_TOKENS,
    DraftedWindows,
    ModelPair,
    choose,
    repeated,
    tail_attention_over,
    with_ends,
)
from forerun.prefill.calibration.ridge import Ridge
from forerun.prefill.calibration.thresholds import (
    HARMLESS_QUANTILE,
    MIN_PASSING_SHARE,
    check_positions,
    choose_thresholds,
    harmless_windows,
    limits_for,
    measure_signals,
    recompute_checked,
)
from forerun.prefill.checks import COSINES, SIGNALS, Checker, CheckSpan, Scores, check_thresholds
from forerun.prefill.plan import Policy
from forerun.prefill.recompute import RaggedDepthPass, Rows

END = 350
NONE = torch.zeros(0, dtype=torch.int64)


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(3, 512, (2, 480), generator=torch.Generator().manual_seed(0))


def true_kv(pair: ModelPair, exact: LayerActivations) -> Tensor:
    """What perfect maps would give."""
    return torch.cat([part for kv in exact.kv[pair.base :] for part in kv], -1)


def recomputed(
    pair: ModelPair, tokens: Tensor, drafted: Tensor, exact: LayerActivations
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    positions = check_positions(END, NONE)
    ahead = tokens.shape[1] - END - TAIL_TOKENS
    windows = DraftedWindows(pair, tokens, ahead, exact, drafted, torch.zeros(2, 1, END))
    chosen = torch.cat((windows.choose(0.0), positions.expand(2, -1)), 1)
    return with_ends(chosen, END, tokens.shape[1]), *recompute_checked(windows, chosen, positions)


def test_perfect_drafts_look_perfect(pair: ModelPair, tokens: Tensor) -> None:
    exact = pair.target.trace(tokens)
    rows, x, values = recomputed(pair, tokens, true_kv(pair, exact), exact)
    wanted = exact.hidden[-1].gather(1, rows[..., None].expand(-1, -1, x.shape[-1]))
    torch.testing.assert_close(x, wanted, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(x, pair.recompute(exact, true_kv(pair, exact), rows), atol=1e-5, rtol=1e-5)
    for signal in SIGNALS:
        perfect = torch.full((2, 4, Policy().spans), float(signal in COSINES))
        torch.testing.assert_close(values[signal], perfect, atol=1e-3, rtol=0)


@pytest.mark.parametrize("part", [0, 1])
def test_an_error_of_known_size_in_one_layer(pair: ModelPair, tokens: Tensor, part: int) -> None:
    exact = pair.target.trace(tokens)
    drafted = true_kv(pair, exact)
    kv = pair.target.config.kv_size
    drafted[..., part * kv : (part + 1) * kv] *= 1.5  # K or V of the first mapped layer
    _, _, values = recomputed(pair, tokens, drafted, exact)
    hit, spared = ("key", "value") if part == 0 else ("value", "key")
    torch.testing.assert_close(values[hit][:, 1], torch.full((2, Policy().spans), 0.5), atol=1e-3, rtol=0)
    torch.testing.assert_close(values[spared][:, 1], torch.zeros(2, Policy().spans), atol=1e-3, rtol=0)
    assert (values["attention"][:, 1] < 0.9999).all() and (values["hidden"][:, 1] < 0.99999).all()
    assert values[hit][:, 0].eq(0).all()  # below the base nothing is drafted
    assert values["attention"][:, -1].eq(1).all()  # the engine does not measure it, either


def test_checkpoints_are_spans_apart() -> None:
    places = check_positions(2048 - TAIL_TOKENS, NONE)
    spans = places.view(Policy().spans, Policy().span)
    assert (spans.diff(dim=1) == 1).all() and spans[0, 0] >= FIRST_TOKENS and spans[-1, -1] < 2048 - TAIL_TOKENS
    assert (spans[1:, 0] - spans[:-1, -1] > 100).all()


def test_checkpoints_are_where_tokens_are_recomputed_anyway() -> None:
    chosen = torch.tensor([20, 300, 301, 305, 1000, 1990, 1991])
    spans = check_positions(2048 - TAIL_TOKENS, chosen[chosen < 2048 - TAIL_TOKENS]).view(4, 16)
    held = [sorted(set(span.tolist()) & set(chosen.tolist())) for span in spans]
    assert held == [[300, 301, 305], [], [1000], []]
    assert spans[1, 0] == (16 + 492 + 16 + 2 * 492 - 16) // 2  # nothing to gain: the middle


def test_harmless_windows_hold_the_quality() -> None:
    kl = torch.tensor([0.5, 0.1, 0.2, 0.9])
    agreement = torch.tensor([0.95, 1.0, 0.99, 0.6])
    assert harmless_windows(kl, agreement, 0.97).tolist() == [1, 2, 0]
    assert harmless_windows(kl, agreement, 0.5).tolist() == [1, 2, 0, 3]
    assert harmless_windows(kl, agreement, 1.0).tolist() == [1, 2]  # never fewer than half


def test_limits_are_wide_enough_for_whole_windows() -> None:
    """Values of one bad span in ten: each of them is rare, a window without any is rarer."""
    draw = torch.Generator().manual_seed(1)
    bad = (torch.rand(200, 1, 4, generator=draw) < 0.1).float()
    errors = torch.rand(200, 8, 4, generator=draw) * 0.1 + 0.3 * bad
    values = {signal: 1.0 - errors if signal in COSINES else errors for signal in SIGNALS}
    limits = limits_for(values, 1)
    assert all(len(found) == 8 for found in limits.values())

    def passing(limits: dict[str, list[float]]) -> float:
        scored = [
            Scores({s: v[n].numpy() for s, v in values.items()}, 1, finite=np.ones(4, dtype=bool)) for n in range(200)
        ]
        return float(np.mean([scores.passed(limits, Policy().failing).all() for scores in scored]))

    assert passing(limits) >= MIN_PASSING_SHARE
    tight = {signal: torch.tensor(found) for signal, found in limits.items()}
    near = {s: (1 - (1 - t) * 0.9 if s in COSINES else t * 0.9).tolist() for s, t in tight.items()}
    assert passing(near) < MIN_PASSING_SHARE  # not wider than it must be
    assert max(limits["key"]) < 0.5 and min(limits["attention"]) > 0.5  # what is much worse is still caught


def test_limits_of_what_is_no_number_end() -> None:
    values = {signal: torch.full((3, 4, 4), float("nan")) for signal in SIGNALS}
    assert set(limits_for(values, 1)) == set(SIGNALS)


@pytest.mark.parametrize("which", ["pair", "alone"])
def test_most_harmless_spans_pass(which: str, tokens: Tensor, request: pytest.FixtureRequest) -> None:
    pair: ModelPair = request.getfixturevalue(which)
    ridge = Ridge(pair.inputs, pair.width, torch.device("cpu"))
    ridge.add(*_examples(pair, tokens))
    maps = ridge.fit(pair.taps, pair.base, pair.target.config.kv_size, 16, 16, 1e-3, pair.target_embedding)
    windows = torch.cat((tokens, tokens.flip(0, 1)))
    calls: list[int] = []
    limits = choose_thresholds(pair, maps, windows, 64, 0.1, 0.5, lambda: calls.append(1), True)
    assert set(limits) == {*SIGNALS, "kl"} and len(calls) == 4
    check_thresholds(limits, 4)
    each = [measure_signals(pair, maps, window, 64, 0.1) for window in windows.split(1)]
    kl = torch.cat([seen.kl for seen in each])
    assert kl.min() < limits["kl"][0] <= kl.max() + 1e-5
    for signal in SIGNALS:
        values = torch.cat([seen.values[signal] for seen in each])
        limit = torch.tensor(limits[signal])[:, None] + (-2e-5 if signal in COSINES else 2e-5)
        passed = values >= limit if signal in COSINES else values <= limit
        assert passed[:, pair.base :].float().mean() >= HARMLESS_QUANTILE - 0.05
        mapped = values[:, pair.base : -1]
        assert mapped.std() > 0  # it was measured
    assert (torch.tensor(limits["key"][pair.base :]) > 0.01).all()


@pytest.mark.parametrize("which", ["pair", "alone"])
def test_what_is_recomputed_is_what_the_targets_tail_attends_to(
    which: str, tokens: Tensor, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair: ModelPair = request.getfixturevalue(which)
    ridge = Ridge(pair.inputs, pair.width, torch.device("cpu"))
    ridge.add(*_examples(pair, tokens))
    maps = ridge.fit(pair.taps, pair.base, pair.target.config.kv_size, 16, 16, 1e-3, pair.target_embedding)
    window, end = tokens[:1], tokens.shape[1] - 64 - TAIL_TOKENS
    exact = pair.target.trace(window)
    attention = tail_attention_over(pair, exact, maps(pair.features(window, exact)), end)
    chosen = choose(attention, repeated(window[:, :-64], end), 0.1)[0]
    wanted = with_ends(torch.cat((chosen, check_positions(end, chosen))).unique()[None], end, tokens.shape[1])
    seen: list[Tensor] = []

    recompute = ModelPair.recompute

    def recorded(self: ModelPair, exact: Any, drafted: Tensor, rows: Tensor, *hooks: Any, **more: Any) -> Tensor:
        seen.append(rows)
        return recompute(self, exact, drafted, rows, *hooks, **more)

    monkeypatch.setattr(ModelPair, "recompute", recorded)
    measure_signals(pair, maps, window, 64, 0.1)
    assert len(chosen) == round(0.1 * end) and torch.equal(seen[-1], wanted)


@pytest.mark.parametrize("base", [1, 2])
def test_signals_are_those_of_the_engines_checks(
    pair: ModelPair, models: tuple[Path, Path], tokens: Tensor, base: int
) -> None:
    """Limits found here are applied there: the same K/V must give the same signals in both."""
    pair = ModelPair(pair.target, pair.source, pair.taps, base)
    exact = pair.target.trace(tokens)
    noise = torch.randn(2, 480, pair.width, generator=torch.Generator().manual_seed(1))
    drafted = true_kv(pair, exact) + 0.3 * noise
    _, _, values = recomputed(pair, tokens, drafted, exact)

    decoder, _ = build_decoder(open_checkpoint(models[0]), torch.device("cpu"), "float32", 512, quiet=True)
    runner = Runner(decoder, PagePool(decoder.config, 64, 16, decoder.dtype, torch.device("cpu")), 512)
    ids, pages = tokens[0].numpy(), array("i", range(30))
    runner.forward([Span(ids.tolist(), 0, pages, logits_indices=())])  # exact for all, then drafts over it
    entries = torch.arange(END)
    parts = drafted[0].unflatten(-1, (pair.mapped, 2, -1, decoder.config.head_dim))  # [T, mapped, 2, Hkv, D]
    for i in range(base, decoder.config.num_layers):
        k, v = parts[:END, i - base].unbind(1)
        decoder.attention.write(k, v, i, runner.kv[i], entries, entries)
    rows = np.concatenate((np.arange(FIRST_TOKENS), check_positions(END, NONE).numpy()))
    depths = np.full(len(rows), decoder.config.num_layers)
    spans = [CheckSpan(int(s), 16, 0, END) for s in check_positions(END, NONE).view(-1, 16)[:, 0]]
    RaggedDepthPass(runner).run(Rows(ids[:FIRST_TOKENS], rows[:FIRST_TOKENS], pages, depths[:FIRST_TOKENS]))
    checker = Checker(runner, pages, spans, base, FIRST_TOKENS)
    checked = rows[FIRST_TOKENS:]
    RaggedDepthPass(runner).run(Rows(ids[checked], checked, pages, depths[FIRST_TOKENS:]), checker.watch(checked))
    scores = checker.scores()
    for signal in SIGNALS:
        torch.testing.assert_close(
            values[signal][0], torch.from_numpy(scores.values[signal]).float(), atol=2e-3, rtol=2e-3
        )
    assert values["key"][0, base:].min() > 0.05 and values["attention"][0, base:-1].max() < 0.9999
