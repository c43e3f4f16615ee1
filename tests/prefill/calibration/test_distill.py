"""Distillation: maps get better at what counts, nothing else moves, and a stopped run goes on as if it had not been."""

from __future__ import annotations

import io
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.prefill.calibration.dense import AttentionHook, DenseModel, LayerActivations
from forerun.prefill.calibration.distill import Distiller, Schedule, batches
from forerun.prefill.calibration.fit import _examples
from forerun.prefill.calibration.model_pair import (
    TAIL_TOKENS,
    DenseTailAttention,
    ModelPair,
    choose,
    repeated,
    with_ends,
)
from forerun.prefill.calibration.ridge import Ridge
from forerun.prefill.maps import Maps

TOKENS = torch.randint(3, 512, (4, 320), generator=torch.Generator().manual_seed(0))


def ridge_maps(pair: ModelPair) -> Maps:
    ridge = Ridge(pair.inputs, pair.width, torch.device("cpu"))
    ridge.add(*_examples(pair, TOKENS))
    return ridge.fit(pair.taps, pair.base, pair.target.config.kv_size, 16, 16, 1e-3, pair.target_embedding)


def loss(distiller: Distiller) -> float:
    """Of the whole windows with nothing recomputed, whatever the step."""
    done, distiller.done = distiller.done, 0
    with torch.no_grad():
        value = float(distiller.loss(TOKENS))
    distiller.done = done
    return value


@pytest.mark.parametrize("which", ["pair", "alone"])
def test_maps_get_better_and_the_models_stay(which: str, request: pytest.FixtureRequest) -> None:
    pair: ModelPair = request.getfixturevalue(which)
    before = {name: w.clone() for name, w in pair.target.weights.items()}
    maps = ridge_maps(pair)
    distiller = Distiller(pair, maps, Schedule(steps=12, rate=2e-2, ahead=32))
    first = loss(distiller)
    losses = [distiller.step(TOKENS) for _ in range(12)]
    assert all(value > 0 for value in losses) and distiller.done == 12
    assert loss(distiller) < 0.9 * first
    assert all(torch.equal(w, before[name]) for name, w in pair.target.weights.items())
    learnt = distiller.result()
    assert (learnt.taps, learnt.base, learnt.target_embedding) == (pair.taps, pair.base, which == "pair")
    assert not any(t.requires_grad for t in learnt.tensors().values())
    assert all(not torch.equal(t, maps.tensors()[name]) for name, t in learnt.tensors().items())


@pytest.mark.parametrize("which", ["pair", "alone"])
def test_the_targets_tail_says_what_is_recomputed(
    which: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair: ModelPair = request.getfixturevalue(which)
    end = 320 - 32 - TAIL_TOKENS
    tail_attention = DenseTailAttention(slice(end, end + TAIL_TOKENS), pair.target.config.scale)
    pair.target.trace(TOKENS, hook=tail_attention)
    wanted = with_ends(choose(tail_attention.mean(), repeated(TOKENS[:, :-32], end), 0.2), end, 320)
    seen: list[Tensor] = []
    recompute = ModelPair.recompute

    def watched(
        self: ModelPair, exact: LayerActivations, drafted: Tensor, rows: Tensor, hook: AttentionHook | None = None
    ) -> Tensor:
        seen.append(rows)
        return recompute(self, exact, drafted, rows, hook)

    monkeypatch.setattr(ModelPair, "recompute", watched)
    Distiller(pair, ridge_maps(pair), Schedule(steps=1, ahead=32, shares=(0.2,))).loss(TOKENS)
    (rows,) = seen
    assert torch.equal(rows, wanted)


@pytest.mark.parametrize("which", ["pair", "alone"])
def test_a_step_on_cut_windows_reads_them_once(
    which: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair: ModelPair = request.getfixturevalue(which)
    maps, schedule, traced = ridge_maps(pair), Schedule(steps=9, ahead=32, shares=(0.2,)), list[int]()
    trace = DenseModel.trace

    def counted(self: DenseModel, tokens: Tensor, *args: Any, **more: Any) -> LayerActivations:
        traced.append(tokens.shape[1])
        return trace(self, tokens, *args, **more)

    monkeypatch.setattr(DenseModel, "trace", counted)
    distiller = Distiller(pair, maps, schedule)
    distiller.loss(TOKENS)
    read, distiller.done = len(traced), 1
    cut = distiller.loss(TOKENS)
    assert len(traced) == read  # nothing was read again
    stop = int(320 * (0.5 + 0.5 * 0.618))
    alone = Distiller(pair, maps, schedule).loss(TOKENS[:, :stop])  # a first step: of windows that are no longer
    torch.testing.assert_close(cut, alone, atol=1e-5, rtol=1e-4)


def test_before_the_first_step_the_maps_are_those_given(pair: ModelPair) -> None:
    maps = ridge_maps(pair)
    for name, tensor in Distiller(pair, maps, Schedule(4)).result().tensors().items():
        torch.testing.assert_close(tensor, maps.tensors()[name], atol=1e-6, rtol=1e-5)


def test_a_state_goes_on_as_if_nothing_had_been(pair: ModelPair) -> None:
    maps, schedule = ridge_maps(pair), Schedule(steps=6, ahead=32)
    straight = Distiller(pair, maps, schedule)
    for _ in range(6):
        straight.step(TOKENS)
    first = Distiller(pair, maps, schedule)
    for _ in range(3):
        first.step(TOKENS)
    file = io.BytesIO()
    torch.save(first.state(), file)
    file.seek(0)
    second = Distiller(pair, maps, schedule)
    second.load(torch.load(file, weights_only=True))
    assert second.done == 3
    for _ in range(3):
        second.step(TOKENS)
    for name, tensor in second.result().tensors().items():
        torch.testing.assert_close(tensor, straight.result().tensors()[name])


def test_the_rate_rises_then_falls() -> None:
    factors = [Schedule(steps=100).factor(step) for step in range(101)]
    assert factors[0] == 0.0 and max(factors) > 0.99 and factors[100] < 1e-6
    peak = factors.index(max(factors))
    assert peak < 10 and factors[peak:] == sorted(factors[peak:], reverse=True)


def test_batches_visit_everything_in_turn() -> None:
    windows = torch.arange(7)[:, None]

    def some(seed: int) -> Tensor:
        return torch.stack(list(islice(batches(windows, 2, seed), 6)))

    assert len(set(some(0)[:3].flatten().tolist())) == 6  # none twice before a new round
    assert torch.equal(some(0), some(0)) and not torch.equal(some(0), some(1))
