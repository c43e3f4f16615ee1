"""The curve and what follows from it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from forerun.prefill.calibration.fit import _examples
from forerun.prefill.calibration.model_pair import ModelPair
from forerun.prefill.calibration.quality import (
    CURVE_SHARES,
    default_share,
    evaluate,
    measure_curve,
    reading_cost,
    total_cost,
)
from forerun.prefill.calibration.ridge import Ridge
from forerun.prefill.maps import Maps
from forerun.prefill.profile import CurvePoint


def points(*figures: tuple[float, float, float]) -> list[CurvePoint]:
    return [CurvePoint(share, cost, top1, 0.0) for share, cost, top1 in figures]


def test_the_default_is_the_smallest_share_that_is_good_enough() -> None:
    curve = points((0.0, 0.3, 0.90), (0.1, 0.4, 0.96), (0.2, 0.5, 0.975), (0.3, 0.58, 0.99))
    assert default_share(curve, 0.97) == (0.2, True)
    assert default_share(curve, 0.5) == (0.0, True)


def test_what_costs_too_much_is_no_default() -> None:
    curve = points((0.0, 0.4, 0.90), (0.1, 0.55, 0.93), (0.2, 0.65, 0.98))
    assert default_share(curve, 0.97) == (0.1, False)
    assert default_share(points((0.0, 0.7, 0.9), (0.1, 0.8, 0.99)), 0.97) == (0.0, False)


def test_out_of_reach_a_default_stays_modest() -> None:
    curve = points((0.0, 0.2, 0.90), (0.05, 0.25, 0.91), (0.1, 0.3, 0.93), (0.2, 0.4, 0.95), (0.3, 0.5, 0.96))
    assert default_share(curve, 0.97) == (0.1, False)
    assert default_share(curve, 0.955) == (0.3, True)  # what is within reach is paid for


def test_costs(pair: ModelPair) -> None:
    target, draft = pair.target.config, pair.source.config
    by_hand = sum(w.numel() for n, w in pair.target.weights.items() if n.startswith("layers.0.") and w.ndim == 2)
    assert target.layer_macs == by_hand and target.macs == 4 * by_hand
    assert reading_cost(target, None, 1, 1) == 0.25
    assert reading_cost(target, draft, 1, draft.num_layers) == draft.macs / target.macs < 0.5
    maps = Maps((0,), 1, *(torch.zeros(n, n) for n in (4, 1, 4, 4, 4, 1)))
    small = maps.macs / target.macs
    assert total_cost(target, maps, 0.25, False, 0.1, 800) == pytest.approx(0.25 + small + 0.1 + 80 / 800)
    assert total_cost(target, maps, 0.25, True, 0.1, 800) == pytest.approx(0.25 + small + 0.75 * (0.1 + 80 / 800))
    assert total_cost(target, maps, 0.0, False, 1.0, 800) == pytest.approx(1.0 + small)  # no token counts twice


def test_recomputing_more_is_better_and_kinds_are_kept_apart(pair: ModelPair) -> None:
    tokens = torch.randint(3, 512, (5, 480), generator=torch.Generator().manual_seed(0))
    ridge = Ridge(pair.inputs, pair.width, torch.device("cpu"))
    ridge.add(*_examples(pair, tokens))
    maps = ridge.fit(pair.taps, pair.base, pair.target.config.kv_size, 16, 16, 1e-3, pair.target_embedding)
    calls: list[int] = []
    kinds = [("plain", "code"), ("copy",), ("plain",), ("recall",), ("plain", "code")]
    curve, found, each = measure_curve(pair, maps, tokens, kinds, 64, 0.2, 2, lambda: calls.append(1), True)
    assert [p.share for p in curve] == list(CURVE_SHARES) and len(calls) == 3
    assert sorted(p.cost for p in curve) == [p.cost for p in curve]
    assert each.kl.shape == each.top1.shape == each.uncovered.shape == (5, len(CURVE_SHARES))
    assert (np.diff(each.uncovered) < 0).all() and each.uncovered.min() > 0 and each.uncovered.max() < 1
    assert each.kl[[0, 2, 4], 0].mean() == pytest.approx(curve[0].kl)
    assert np.allclose(each.record()["kl"], each.kl, rtol=1e-3)
    assert curve[-1].kl < curve[0].kl and curve[-1].top1 > curve[0].top1
    assert set(found) == {"plain", "copy", "recall", "code"} and found["code"][0]["windows"] == 2
    plain = evaluate(pair, maps, tokens[::2], 64, 0.0)
    assert curve[0].top1 == pytest.approx(plain.agreement) and curve[0].kl == pytest.approx(plain.divergence, rel=1e-3)
    copy = evaluate(pair, maps, tokens[1:2], 64, CURVE_SHARES[1])
    assert found["copy"][1]["kl"] == pytest.approx(copy.divergence, rel=1e-3)
    _, some, few = measure_curve(pair, maps, tokens, kinds, 64, 0.2, 2, lambda: True, True)  # the time is up
    assert set(some) == {"plain", "copy", "code"} and some["plain"][0]["windows"] == 1 and len(few.kl) == 2
