"""The stages that fit maps: stopped anywhere and resumed, they give the same maps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.prefill.calibration import fit as fitting
from forerun.prefill.calibration.fit import CalibrationJob, Distillation, _examples, fit
from forerun.prefill.calibration.model_pair import FIRST_TOKENS, ModelPair
from forerun.prefill.calibration.resume import CalibrationState
from forerun.prefill.calibration.ridge import Ridge
from forerun.prefill.calibration.setup import FitSettings
from forerun.prefill.calibration.windows import Windows, WindowSettings
from forerun.prefill.maps import unit

TEXT = WindowSettings(prompt=300, continuation=16)


@pytest.fixture(scope="module")
def windows() -> Windows:
    tokens = torch.randint(3, 512, (10, 316), generator=torch.Generator().manual_seed(0)).int()
    return Windows(tokens[:7], tokens[7:], [("plain", "prose")] * 3, 1)


def settings(**values: Any) -> FitSettings:
    return FitSettings(**({"rank": 12, "batch": 2, "steps": 4} | values))


class Stopping(CalibrationState):
    """Stops at this save point."""

    def __init__(self, out: Path, points: int) -> None:
        super().__init__(out, {})
        self._left = points

    def save_point(self, values: Any) -> None:
        self._left -= 1
        self.stop_requested = self._left == 0
        super().save_point(values)


@pytest.mark.parametrize("which", ["pair", "alone"])
def test_stopped_and_gone_on(which: str, windows: Windows, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    pair: ModelPair = request.getfixturevalue(which)
    straight, facts = fit(CalibrationJob(pair, windows, settings(), TEXT, CalibrationState(tmp_path / "a", {}), True))
    stops = 0
    for _ in range(20):
        saved = Stopping(tmp_path / "b", 3)
        try:
            maps, same = fit(CalibrationJob(pair, windows, settings(), TEXT, saved, True))
            break
        except KeyboardInterrupt:
            stops += 1
    assert stops == 2  # four save points of ridge and four of distillation
    assert same == pytest.approx(facts)
    assert maps.target_embedding == straight.target_embedding == (which == "pair")
    for name, tensor in maps.tensors().items():
        torch.testing.assert_close(tensor, straight.tensors()[name], atol=1e-4, rtol=1e-3)


def test_a_smaller_batch_may_go_on(pair: ModelPair, windows: Windows, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        fit(CalibrationJob(pair, windows, settings(distill=False, batch=3), TEXT, Stopping(tmp_path / "a", 1), True))
    maps, _ = fit(
        CalibrationJob(
            pair, windows, settings(distill=False, batch=1), TEXT, CalibrationState(tmp_path / "a", {}), True
        )
    )
    whole, facts = fit(
        CalibrationJob(pair, windows, settings(distill=False), TEXT, CalibrationState(tmp_path / "b", {}), True)
    )
    assert facts == {"steps": 0}
    x = torch.randn(5, 160)
    torch.testing.assert_close(maps(x), whole(x), atol=1e-2, rtol=1e-2)


def test_examples_leave_out_the_first_tokens(pair: ModelPair, windows: Windows) -> None:
    tokens = windows.train[:2].long()
    features, outputs = _examples(pair, tokens)
    assert features.shape == (2 * (316 - FIRST_TOKENS), 160) and outputs.shape == (2 * (316 - FIRST_TOKENS), pair.width)
    exact = pair.target.trace(tokens)
    torch.testing.assert_close(features[0, 96:], unit(exact.hidden[0][0, FIRST_TOKENS]))  # the target's own embedding
    kv = pair.target.config.kv_size
    torch.testing.assert_close(outputs[0, :kv], exact.kv[1][0][0, FIRST_TOKENS])  # K of the first mapped layer
    torch.testing.assert_close(outputs[-1, -kv:], exact.kv[3][1][1, -1])  # V of the last


def test_more_rank_than_there_is(pair: ModelPair, windows: Windows, tmp_path: Path) -> None:
    maps, _ = fit(
        CalibrationJob(pair, windows, settings(rank=4096, steps=1), TEXT, CalibrationState(tmp_path / "a", {}), True)
    )
    assert maps.rank == 160 and maps.target_embedding


@pytest.mark.parametrize(("most", "rank"), [(1536, 64), (40, 40)])
def test_the_rank_is_the_targets_width(
    pair: ModelPair, windows: Windows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, rank: int
) -> None:
    monkeypatch.setattr(fitting, "MAX_DEFAULT_RANK", most)
    maps, _ = fit(
        CalibrationJob(
            pair, windows, settings(rank=None, distill=False), TEXT, CalibrationState(tmp_path / "a", {}), True
        )
    )
    assert maps.rank == rank


def test_the_best_maps_are_kept_not_the_last(
    pair: ModelPair, windows: Windows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = iter([0.5, 0.4, 0.2, 0.3, 0.9])
    seen = []

    def evaluation(self: Distillation, maps: Any) -> float:
        seen.append({name: t.clone() for name, t in maps.tensors().items()})
        return next(figures)

    monkeypatch.setattr(Distillation, "_evaluate", evaluation)
    maps, facts = fit(CalibrationJob(pair, windows, settings(), TEXT, CalibrationState(tmp_path / "a", {}), True))
    assert facts == {"steps": 4, "ridge_kl": 0.5, "distilled_kl": 0.2}
    assert torch.equal(maps.up, seen[2]["up"]) and not torch.equal(maps.up, seen[4]["up"])


@pytest.mark.parametrize(("slower", "steps"), [(5.0, 18), (30.0, 7)])
def test_time_becomes_steps(
    slower: float, steps: int, pair: ModelPair, windows: Windows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of five seconds, later ones perhaps slower; 90 of 120 seconds are for fitting."""
    now, step = [0.0], Distillation._step

    def timed(self: Distillation) -> torch.Tensor:
        now[0] += 5.0 if self._distiller.done < 4 else slower
        return step(self)

    monkeypatch.setattr(Distillation, "_step", timed)
    monkeypatch.setattr(fitting.time, "monotonic", lambda: now[0])
    saved = CalibrationState(tmp_path / "a", {})
    _, facts = fit(CalibrationJob(pair, windows, settings(steps=None, minutes=2.0), TEXT, saved, True))
    assert facts["steps"] == steps


def test_the_first_fit_has_a_part_of_the_time(
    pair: ModelPair, windows: Windows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, add, seen = [0.0], Ridge.add, list[int]()

    def timed(self: Ridge, x: torch.Tensor, y: torch.Tensor) -> None:
        now[0] += 11.0
        seen.append(len(x))
        add(self, x, y)

    monkeypatch.setattr(Ridge, "add", timed)
    monkeypatch.setattr(fitting.time, "monotonic", lambda: now[0])
    job = CalibrationJob(
        pair, windows, settings(distill=False, minutes=1.0, batch=1), TEXT, CalibrationState(tmp_path / "a", {}), True
    )
    fit(job)
    assert len(seen) == 2  # 21 of 60 seconds
