"""The two stages that make maps, each of which can be stopped and go on: ridge over all text, then distillation.

Knows what to keep of a stage and which of the maps seen on the way are the best; not how either of them works.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from forerun.core.progress import track
from forerun.prefill.calibration.distill import Distiller, Schedule, batches
from forerun.prefill.calibration.evaluate import score
from forerun.prefill.calibration.model_pair import FIRST, ModelPair
from forerun.prefill.calibration.resume import CalibrationState
from forerun.prefill.calibration.ridge import Ridge
from forerun.prefill.calibration.setup import MOST_RANK, FitSettings
from forerun.prefill.calibration.text import Windows, WindowSettings
from forerun.prefill.maps import Maps

TIMED = 3  # steps of distillation that tell how long one takes
REVIEWS = 8  # times that distilled maps are judged
JUDGED = 16  # windows for that
JUDGED_SHARE = 0.1  # of tokens recomputed meanwhile


def fit(
    pair: ModelPair,
    windows: Windows,
    settings: FitSettings,
    recipe: WindowSettings,
    keeper: CalibrationState,
    quiet: bool,
) -> tuple[Maps, dict[str, Any]]:
    """Maps, and how they came about."""
    if "maps" not in keeper.values:
        keeper.values = {"maps": _ridge(pair, windows.train, settings, keeper, quiet).tensors()}
        keeper.save(keeper.values)
    maps = _restored(pair, keeper.values["maps"])
    if not settings.distill:
        return maps, {"steps": 0}
    return Distillation(pair, maps, windows, settings, recipe, keeper).run(quiet)


def _ridge(pair: ModelPair, rows: Tensor, settings: FitSettings, keeper: CalibrationState, quiet: bool) -> Maps:
    """Sums over all windows, then one solution."""
    device, config = pair.target.device, pair.target.config
    ridge = Ridge(pair.inputs, pair.width, device)
    done = 0
    if "ridge" in keeper.values:
        ridge.load(keeper.values["ridge"])
        done = int(keeper.values["windows"])
        keeper.values = {}  # large, and not needed twice
    for at in track(range(done, len(rows), settings.batch), "fitting maps", quiet):
        ridge.add(*_examples(pair, rows[at : at + settings.batch].to(device).long()))
        keeper.tick(partial(_sums, ridge, at + settings.batch))
    asked = settings.rank or min(MOST_RANK, config.hidden_size)
    rank = min(asked, *ridge.xy.shape)  # more than there is to span would be zeros
    return ridge.fit(pair.taps, pair.base, config.kv_size, rank, rank, settings.strength, pair.own)


def _sums(ridge: Ridge, windows: int) -> dict[str, Any]:
    return {"ridge": ridge.state(), "windows": windows}


@torch.no_grad()
def _examples(pair: ModelPair, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Features and outputs [N, ..] of all tokens but the first of each window: those are always recomputed, and their
    K and V are like nobody else's."""
    exact = pair.target.trace(tokens)
    features, _ = pair.read(tokens, slice(0, 0), exact)
    outputs = torch.cat([part for kv in exact.kv[pair.base :] for part in kv], -1)
    return features[:, FIRST:].flatten(0, 1), outputs[:, FIRST:].flatten(0, 1)


class Distillation:
    """Steps, with a look at held-out text now and then: more of them can be worse, so the best maps are kept."""

    def __init__(
        self,
        pair: ModelPair,
        maps: Maps,
        windows: Windows,
        settings: FitSettings,
        recipe: WindowSettings,
        keeper: CalibrationState,
    ) -> None:
        self._pair, self._ridge, self._settings, self._keeper = pair, maps, settings, keeper
        # From the end: the curve is measured from the start, and what was selected on a window flatters itself there
        self._held, self._ahead = windows.held[-JUDGED:], recipe.continuation
        # Until it is known how many steps there are, the rate is next to nothing
        steps = settings.steps or 1_000_000
        self._distiller = Distiller(pair, maps, Schedule(steps, ahead=2 * recipe.continuation))
        self._feed = batches(windows.train, min(settings.batch, len(windows.train)), recipe.seed)
        state = keeper.values
        if "distill" in state:
            self._distiller.load(state["distill"])
            self._distiller.schedule = replace(self._distiller.schedule, steps=state["steps"])
            self._best, self._kl, self._first = _restored(pair, state["best"]), state["kl"], state["first_kl"]
            for _ in range(self._distiller.done):
                next(self._feed)
        else:
            self._best = maps
            self._kl = self._first = self._judge(maps)

    def run(self, quiet: bool) -> tuple[Maps, dict[str, Any]]:
        distiller = self._distiller
        if self._settings.steps is None and not distiller.done:
            steps = self._affordable(self._settings.minutes)
            distiller.schedule = replace(distiller.schedule, steps=steps)
        steps = distiller.schedule.steps
        every = max(1, steps // REVIEWS)
        for step in track(range(distiller.done, steps), "distilling maps", quiet):
            self._step(self._feed)
            if (step + 1) % every == 0 or step + 1 == steps:
                self._review()
            self._keeper.tick(self._state)
        self._keeper.values = self._state()
        self._keeper.save(self._keeper.values)
        return self._best, {"steps": steps, "ridge_kl": self._first, "distilled_kl": self._kl}

    def _step(self, feed: Iterator[Tensor]) -> None:
        self._distiller.step(next(feed).to(self._pair.target.device).long())

    def _affordable(self, minutes: float) -> int:
        """Steps that fit into the time, by the first few."""
        times = []
        for _ in range(TIMED):
            start = time.monotonic()
            self._step(self._feed)
            times.append(time.monotonic() - start)
        return max(TIMED + 1, round(60.0 * minutes / min(times)))

    def _review(self) -> None:
        maps = self._distiller.result()
        kl = self._judge(maps)
        if kl < self._kl:
            self._kl = kl
            self._best = maps.holding({name: t.clone() for name, t in maps.tensors().items()})

    def _judge(self, maps: Maps) -> float:
        pair, batch = self._pair, self._settings.batch
        return score(pair, maps, self._held, self._ahead, JUDGED_SHARE, batch=batch).divergence

    def _state(self) -> dict[str, Any]:
        figures = {"kl": self._kl, "first_kl": self._first, "steps": self._distiller.schedule.steps}
        maps = {"maps": self._ridge.tensors(), "best": self._best.tensors()}
        return {**maps, **figures, "distill": self._distiller.state()}


def _restored(pair: ModelPair, tensors: dict[str, Tensor]) -> Maps:
    return Maps(pair.taps, pair.base, **tensors, own=pair.own).to(pair.target.device, torch.float32)
