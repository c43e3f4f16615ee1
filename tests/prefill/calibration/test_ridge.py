"""Ridge: the right solution from sums, however the tokens came, and the best of each rank."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.prefill.calibration.ridge import KEY_WEIGHT, Ridge

INPUTS, KV, TRUE_RANK = 20, 6, 5
CPU = torch.device("cpu")


def data(noise: float = 0.0, rows: int = 3000) -> tuple[Tensor, Tensor]:
    """Outputs of two layers that depend on five directions of the inputs, each output of another size."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(rows, INPUTS, generator=draw) + 0.5
    weight = torch.randn(INPUTS, TRUE_RANK, generator=draw) @ torch.randn(TRUE_RANK, 4 * KV, generator=draw)
    y = (x @ weight) * torch.logspace(-1, 1, 4 * KV) + 3.0
    return x, y + noise * y.std(0) * torch.randn(y.shape, generator=draw)


def fitted(x: Tensor, y: Tensor, pieces: int = 1) -> Ridge:
    ridge = Ridge(INPUTS, 4 * KV, CPU)
    for part in zip(x.chunk(pieces), y.chunk(pieces), strict=True):
        ridge.add(*part)
    return ridge


def error(ridge: Ridge, x: Tensor, y: Tensor, rank: int) -> float:
    maps = ridge.fit((1, 2), 1, KV, rank, 8, 1e-6)
    return float(((maps(x) - y) / y.std(0)).square().mean())


def test_a_map_of_low_rank_is_found() -> None:
    x, y = data()
    ridge = fitted(x, y)
    assert error(ridge, x, y, TRUE_RANK) < 1e-6
    assert error(ridge, x, y, TRUE_RANK - 2) > 1e-2


def test_the_order_and_size_of_pieces_do_not_count() -> None:
    x, y = data(0.3)
    one, many = (fitted(x, y, pieces).fit((0,), 0, KV, 4, 8, 1e-3) for pieces in (1, 7))
    torch.testing.assert_close(one(x), many(x), atol=1e-3, rtol=1e-3)


def test_more_rank_is_never_worse() -> None:
    x, y = data(0.3)
    errors = [error(fitted(x, y), x, y, rank) for rank in (1, 2, 3, 5, 12, 20)]
    assert errors == sorted(errors, reverse=True)


def test_a_rank_is_spent_as_well_as_can_be() -> None:
    """Against the textbook: the least-squares predictions, weighted, cut down by a singular value decomposition."""
    x, y = data(0.3)
    weight = torch.cat([torch.full((KV,), KEY_WEIGHT), torch.ones(KV)]).repeat(2) / y.std(0)
    centred = x - x.mean(0)
    whole = centred @ torch.linalg.lstsq(centred.double(), ((y - y.mean(0)) * weight).double()).solution.float()
    u, s, v = torch.linalg.svd(whole, full_matrices=False)
    best = (u[:, :3] * s[:3]) @ v[:3] / weight + y.mean(0)
    given = fitted(x, y).fit((0,), 0, KV, 3, 8, 1e-6)(x)
    torch.testing.assert_close(given, best, atol=0.02 * float(y.std()), rtol=0.02)


def test_maps_are_linear_before_training() -> None:
    maps = fitted(*data()).fit((0, 3), 2, KV, 4, 9, 1e-3)
    assert maps.mix_out.eq(0).all() and not maps.mix_in.eq(0).all() and maps.mix_in.shape == (9, 4)
    assert (maps.taps, maps.base, maps.rank) == ((0, 3), 2, 4)


def test_sums_can_be_kept() -> None:
    x, y = data(0.3)
    half = fitted(x[:1500], y[:1500])
    again = Ridge(INPUTS, 4 * KV, CPU)
    again.load(half.state())
    again.add(x[1500:], y[1500:])
    assert again.count == 3000
    torch.testing.assert_close(again.xy, fitted(x, y).xy, rtol=1e-4, atol=1e-2)


def test_the_ridge_pulls_towards_the_mean() -> None:
    x, y = data(0.3)
    weak, strong = (fitted(x, y).fit((0,), 0, KV, 5, 8, strength)(x).std(0) / y.std(0) for strength in (1e-6, 10.0))
    assert weak.min() > 0.9 and strong.max() < 0.3
