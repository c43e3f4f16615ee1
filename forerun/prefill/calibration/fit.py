"""The two stages that fit maps, both resumable: ridge regression over all text, then distillation.

Knows what to save of a stage and which of the distilled maps are the best; not how either stage works.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from forerun.core.progress import track
from forerun.prefill.calibration.distill import Distiller, Schedule, batches
from forerun.prefill.calibration.model_pair import FIRST_TOKENS, ModelPair
from forerun.prefill.calibration.quality import evaluate
from forerun.prefill.calibration.resume import CalibrationState
from forerun.prefill.calibration.ridge import Ridge
from forerun.prefill.calibration.setup import MAX_DEFAULT_RANK, FitSettings
from forerun.prefill.calibration.windows import Windows, WindowSettings
from forerun.prefill.maps import Maps

TIMED_STEPS = 3  # of distillation, to estimate how long one takes
EVALUATIONS = 8  # of distilled maps on held-out text, spread over all steps: the best ones are kept
SELECTION_WINDOWS = 16  # held-out windows for that
SELECTION_SHARE = 0.1  # of tokens recomputed in them


@dataclass
class CalibrationJob:
    """What a calibration works on, once everything is opened and checked."""

    pair: ModelPair
    windows: Windows
    settings: FitSettings
    text: WindowSettings
    saved: CalibrationState
    quiet: bool = False


def fit(job: CalibrationJob) -> tuple[Maps, dict[str, Any]]:
    """The maps, and facts about how they were fitted."""
    saved = job.saved
    if "maps" not in saved.values:
        saved.values = {"maps": _ridge(job).tensors()}
        saved.save(saved.values)
    maps = _restored(job.pair, saved.values["maps"])
    return Distillation(job, maps).run() if job.settings.distill else (maps, {"steps": 0})


def _ridge(job: CalibrationJob) -> Maps:
    """Sums over all windows, then one solution."""
    pair, rows, settings, saved = job.pair, job.windows.train, job.settings, job.saved
    device, config = pair.target.device, pair.target.config
    ridge = Ridge(pair.inputs, pair.width, device)
    done = 0
    if "ridge" in saved.values:
        ridge.load(saved.values["ridge"])
        done = int(saved.values["windows"])
        saved.values = {}  # large, and not needed twice
    for at in track(range(done, len(rows), settings.batch), "fitting maps", job.quiet):
        ridge.add(*_examples(pair, rows[at : at + settings.batch].to(device).long()))
        saved.save_point(lambda at=at: {"ridge": ridge.state(), "windows": at + settings.batch})  # type: ignore[misc]
    asked = settings.rank or min(MAX_DEFAULT_RANK, config.hidden_size)
    rank = min(asked, *ridge.xy.shape)  # beyond the rank of the sums all would be zeros
    return ridge.fit(pair.taps, pair.base, config.kv_size, rank, rank, settings.strength, pair.target_embedding)


@torch.no_grad()
def _examples(pair: ModelPair, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Features and outputs [N, ..] of all tokens but the first of each window: those are always recomputed, and their
    K and V are unlike all others."""
    exact = pair.target.trace(tokens)
    features = pair.features(tokens, exact)
    outputs = torch.cat([part for kv in exact.kv[pair.base :] for part in kv], -1)
    return features[:, FIRST_TOKENS:].flatten(0, 1), outputs[:, FIRST_TOKENS:].flatten(0, 1)


class Distillation:
    """Distillation steps, evaluated on held-out text now and then: more can be worse, so the best maps are kept."""

    def __init__(self, job: CalibrationJob, maps: Maps) -> None:
        self._job, self._pair, self._ridge = job, job.pair, maps
        settings, text, windows, state = job.settings, job.text, job.windows, job.saved.values
        # From the end: the curve is measured from the start, and would be too good on windows the maps were selected on
        self._held, self._ahead = windows.held[-SELECTION_WINDOWS:], text.continuation
        # Until the number of steps is known, the rate stays next to nothing (warm-up)
        steps = settings.steps or 1_000_000
        self._distiller = Distiller(job.pair, maps, Schedule(steps, ahead=2 * text.continuation))
        self._feed = batches(windows.train, min(settings.batch, len(windows.train)), text.seed)
        if "distill" in state:
            self._distiller.load(state["distill"])
            self._distiller.schedule = replace(self._distiller.schedule, steps=state["steps"])
            self._best, self._kl, self._first = _restored(job.pair, state["best"]), state["kl"], state["first_kl"]
            for _ in range(self._distiller.done):
                next(self._feed)
        else:
            self._best = maps
            self._kl = self._first = self._evaluate(maps)

    def run(self) -> tuple[Maps, dict[str, Any]]:
        distiller = self._distiller
        settings, saved = self._job.settings, self._job.saved
        if settings.steps is None and not distiller.done:
            distiller.schedule = replace(distiller.schedule, steps=self._affordable(settings.minutes))
        steps = distiller.schedule.steps
        every = max(1, steps // EVALUATIONS)
        for step in track(range(distiller.done, steps), "distilling maps", self._job.quiet):
            self._step()
            if (step + 1) % every == 0 or step + 1 == steps:
                self._keep_best()
            saved.save_point(self._state)
        saved.values = self._state()
        saved.save(saved.values)
        return self._best, {"steps": steps, "ridge_kl": self._first, "distilled_kl": self._kl}

    def _step(self) -> None:
        self._distiller.step(next(self._feed).to(self._pair.target.device).long())

    def _affordable(self, minutes: float) -> int:
        """Steps that fit into the time, by the duration of the first few."""
        times = []
        for _ in range(TIMED_STEPS):
            start = time.monotonic()
            self._step()
            times.append(time.monotonic() - start)
        return max(TIMED_STEPS + 1, round(60.0 * minutes / min(times)))

    def _keep_best(self) -> None:
        maps = self._distiller.result()
        kl = self._evaluate(maps)
        if kl < self._kl:
            self._kl = kl
            self._best = maps.with_tensors({name: t.clone() for name, t in maps.tensors().items()})

    def _evaluate(self, maps: Maps) -> float:
        batch = self._job.settings.batch
        return evaluate(self._pair, maps, self._held, self._ahead, SELECTION_SHARE, batch=batch).divergence

    def _state(self) -> dict[str, Any]:
        figures = {"kl": self._kl, "first_kl": self._first, "steps": self._distiller.schedule.steps}
        maps = {"maps": self._ridge.tensors(), "best": self._best.tensors()}
        return {**maps, **figures, "distill": self._distiller.state()}


def _restored(pair: ModelPair, tensors: dict[str, Tensor]) -> Maps:
    maps = Maps(pair.taps, pair.base, **tensors, target_embedding=pair.target_embedding)
    return maps.to(pair.target.device, torch.float32)
