"""The two stages that fit maps, both resumable: ridge regression over all text, then distillation.

Knows what to save of a stage and which of the distilled maps are the best; not how either stage works.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.core.progress import track
from forerun.prefill.calibration.distill import STEPS_PER_BATCH, Distiller, Schedule, batches
from forerun.prefill.calibration.model_pair import FIRST_TOKENS, ModelPair
from forerun.prefill.calibration.quality import evaluate
from forerun.prefill.calibration.resume import CalibrationState
from forerun.prefill.calibration.ridge import Ridge
from forerun.prefill.calibration.setup import MAX_DEFAULT_RANK, FitSettings
from forerun.prefill.calibration.windows import Windows, WindowSettings
from forerun.prefill.maps import Maps
from forerun.prefill.profile import Profile

TIMED_STEPS = 4  # of distillation, to estimate how long one takes; two on the same windows belong together
EVALUATIONS = 8  # of distilled maps on held-out text, spread over all steps: the best ones are kept
SELECTION_WINDOWS = 16  # held-out windows for that
SELECTION_SHARE = 0.1  # of tokens recomputed in them
DISTILL_MINUTES = 10.0  # where neither steps nor minutes are given
# up to which share of the time that is given each stage may run; measuring has the rest
RIDGE_END_SHARE, DISTILL_END_SHARE, CURVE_END_SHARE = 0.3, 0.75, 0.92
MAPS_FACTS = ("steps", "files", "train_tokens", "device", "seconds", "settings", "recipe")  # how kept maps were made
STAGES = ("reading text", "fitting maps", "distilling maps", "measuring quality")


@dataclass
class CalibrationJob:
    """What a calibration works on, once everything is opened and checked."""

    pair: ModelPair
    windows: Windows
    settings: FitSettings
    text: WindowSettings
    saved: CalibrationState
    quiet: bool = False

    def over(self, share: float) -> bool:
        """Whether this share of the time for the whole command is spent; never where it has no limit."""
        return self.settings.minutes is not None and self.saved.seconds >= 60.0 * share * self.settings.minutes


def fit(job: CalibrationJob) -> tuple[Maps, dict[str, Any]]:
    """The maps, and facts about how they were fitted."""
    saved = job.saved
    if job.settings.maps is not None:
        profile = Profile.load(Path(job.settings.maps))
        kept = {name: profile.facts[name] for name in MAPS_FACTS if name in profile.facts}
        return _restored(job.pair, profile.maps.tensors()), {"steps": 0, "maps": kept}
    if job.settings.start is not None and not saved.values:
        saved.values = {"maps": Profile.load(Path(job.settings.start)).maps.tensors()}
    if "maps" not in saved.values:
        announce(1, job.quiet, job.settings.minutes, RIDGE_END_SHARE)
        saved.values = {"maps": _ridge(job).tensors()}
        saved.save(saved.values)
    maps = _restored(job.pair, saved.values["maps"])
    if not job.settings.distill:
        return maps, {"steps": 0}
    announce(2, job.quiet, job.settings.minutes, DISTILL_END_SHARE)
    return Distillation(job, maps).run()


def announce(stage: int, quiet: bool, minutes: float | None = None, end_share: float = 1.0) -> None:
    """A line for each stage, also where there is no terminal."""
    if not quiet:
        limit = "" if minutes is None else f", until {end_share * minutes:.1f} of {minutes:g} minutes"
        print(f"calibrating, {stage + 1} of {len(STAGES)}: {STAGES[stage]}{limit}", file=sys.stderr, flush=True)


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
        if job.over(RIDGE_END_SHARE):
            break
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
        self._rows = windows.train[:0]  # [B, T] of this step
        if "distill" in state:
            self._distiller.load(state["distill"])
            self._distiller.schedule = replace(self._distiller.schedule, steps=state["steps"])
            self._best, self._kl, self._first = _restored(job.pair, state["best"]), state["kl"], state["first_kl"]
            for _ in range(self._distiller.done // STEPS_PER_BATCH):
                next(self._feed)
            if self._distiller.done % STEPS_PER_BATCH:
                self._rows = next(self._feed)
        else:
            self._best = maps
            start = time.monotonic()
            self._kl = self._first = self._evaluate(maps)
            self._evaluation_s = time.monotonic() - start

    def run(self) -> tuple[Maps, dict[str, Any]]:
        distiller = self._distiller
        settings, saved = self._job.settings, self._job.saved
        if settings.steps is None and not distiller.done:
            distiller.schedule = replace(distiller.schedule, steps=self._affordable())
        steps = distiller.schedule.steps
        every = max(1, steps // EVALUATIONS)
        for step in track(range(distiller.done, steps), "distilling maps", self._job.quiet):
            self._step()
            if (step + 1) % every == 0 or step + 1 == steps:
                self._keep_best()
            saved.save_point(self._state)
            if step + 1 < steps and self._job.over(DISTILL_END_SHARE):  # steps have become slower than the first few
                self._keep_best()
                break
        saved.values = self._state()
        saved.save(saved.values)
        return self._best, {"steps": distiller.done, "ridge_kl": self._first, "distilled_kl": self._kl}

    def _step(self) -> Tensor:
        if self._distiller.done % STEPS_PER_BATCH == 0:
            self._rows = next(self._feed)
        return self._distiller.step(self._rows)

    def _affordable(self) -> int:
        """Steps that fit into the time, by the duration of the first few."""
        minutes, spent = self._job.settings.minutes, self._job.saved.seconds
        seconds = 60.0 * DISTILL_MINUTES
        if minutes is not None:
            seconds = 60.0 * DISTILL_END_SHARE * minutes - spent - EVALUATIONS * self._evaluation_s
        times = []
        for _ in range(TIMED_STEPS):
            start = time.monotonic()
            float(self._step())  # waits for the device
            times.append(time.monotonic() - start)
        pairs = [(one + other) / 2 for one, other in zip(times[::2], times[1::2], strict=True)]
        return max(TIMED_STEPS + 1, round(seconds / min(pairs)))

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
