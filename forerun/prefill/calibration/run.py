"""A whole calibration: text to windows, windows to maps, maps to a profile with measured quality.

The order of the stages, and the error when memory runs out. Each stage's own work lies in the modules beside this one.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from forerun.errors import BadRequest
from forerun.prefill.calibration.files import CHAT
from forerun.prefill.calibration.fit import CURVE_END_SHARE, SELECTION_WINDOWS, CalibrationJob, announce, fit
from forerun.prefill.calibration.quality import (
    CURVE_SHARES,
    QualityByKind,
    default_share,
    measure_curve,
    reading_cost,
)
from forerun.prefill.calibration.resume import CalibrationState
from forerun.prefill.calibration.setup import CalibrationModels, FitSettings, check_window, check_writable, open_models
from forerun.prefill.calibration.thresholds import choose_thresholds
from forerun.prefill.calibration.windows import Windows, WindowSettings, read_windows
from forerun.prefill.drift import TextReference
from forerun.prefill.gate import gate_of
from forerun.prefill.maps import Maps
from forerun.prefill.profile import Profile, as_stored

CURVE_WINDOWS = 192  # held-out windows that the curve and the gate are measured on
THRESHOLD_WINDOWS = 64  # of these, for the thresholds, one at a time
MIN_AGREEMENT = 0.8  # with exact prefill, at the default share: a worse profile is saved only where that is asked for
HOLDS_AGREEMENT = 0.9  # at the default share, from which on a profile is said to hold on a kind of text
TEXT_KINDS = ("code", "data", "prose", CHAT)


def calibrate(
    target: str,
    draft: str | None,
    paths: Sequence[Path],
    out: Path,
    settings: FitSettings,
    text: WindowSettings,
    device: torch.device,
    quiet: bool = False,
    force: bool = False,
) -> Profile:
    """Fit, measure and save a profile. After Ctrl-C the same call resumes. `force`: save it however bad it is."""
    start = time.monotonic()
    check_window(text.prompt, text.continuation)
    check_writable(out)
    models = open_models(target, draft, settings, text.length)
    announce(0, quiet)
    windows = read_windows(paths, models.target.tokenizer(), text, quiet)
    saved = CalibrationState(out, _inputs(models, windows, settings, text), start)
    with _within_memory(settings, text):
        job = CalibrationJob(models.build(device, quiet), windows, settings, text, saved, quiet)
        with saved.defer_interrupt():
            maps, facts = fit(job)
            profile = _measured(models, job, as_stored(maps))
    profile.facts |= facts | {"device": device.type, "seconds": round(saved.seconds, 1), "files": windows.files}
    profile.facts |= {"train_tokens": windows.train.numel(), "held_tokens": windows.held.numel()}
    if (
        settings.distill and settings.maps is None
    ):  # windows of the curve that the maps were also selected on: its figures are too good there
        held = len(windows.held)
        profile.facts["selected_on"] = max(0, min(CURVE_WINDOWS, held) + min(SELECTION_WINDOWS, held) - held)
    profile.facts |= {"settings": asdict(settings), "recipe": asdict(text)}
    agreement = next(point.top1 for point in profile.curve if point.share == profile.share)
    if agreement < MIN_AGREEMENT and not force:
        raise BadRequest(
            f"the profile reaches an agreement of {agreement:.2f} with exact prefill, less than {MIN_AGREEMENT:g}, "
            "and is not saved",
            "more text like your prompts, more --minutes or a larger --base may help; the same command with --force "
            f"saves it as it is (what was fitted is in {saved.path.name})",
        )
    profile.save(out)
    saved.remove()
    return profile


def _inputs(models: CalibrationModels, windows: Windows, settings: FitSettings, text: WindowSettings) -> dict[str, Any]:
    """Everything that determines the result. How many windows go at a time is left out: it changes next to nothing, and
    must be changed to resume after memory ran out."""
    digest = hashlib.sha256(windows.train.numpy().tobytes() + windows.held.numpy().tobytes())
    prints = {"target": models.fingerprints[0], "source": models.fingerprints[1], "base": models.base}
    fixed = {**prints, "taps": list(models.taps), "text": digest.hexdigest()[:16]}
    return {name: value for name, value in {**asdict(settings), **asdict(text), **fixed}.items() if name != "batch"}


def _measured(models: CalibrationModels, job: CalibrationJob, maps: Maps) -> Profile:
    """A profile with its curve, default share and thresholds, all from held-out text."""
    held, kinds = job.windows.held[:CURVE_WINDOWS], job.windows.kinds[:CURVE_WINDOWS]
    pair, ahead, quality, quiet = job.pair, job.text.continuation, job.settings.quality, job.quiet
    config = models.target.config
    reading = reading_cost(config, models.source.config if models.source else None, models.base, max(models.taps))

    def stop_after(end_share: float) -> Callable[[], bool]:
        def stop() -> bool:
            job.saved.save_point(lambda: job.saved.values)  # the maps are all there is to save
            return job.over(end_share)

        return stop

    announce(3, quiet, job.settings.minutes)
    stop, batch = stop_after(CURVE_END_SHARE), job.settings.batch
    curve, by_kind, each = measure_curve(pair, maps, held, kinds, ahead, reading, batch, stop, quiet)
    share, reached = default_share(curve, quality)
    some = held[:THRESHOLD_WINDOWS]
    limits = choose_thresholds(pair, maps, some, ahead, share, quality, stop_after(1.0), quiet)
    source = models.source or models.target
    windows = each.record() | {"kinds": [" ".join(window) for window in kinds[: len(each.kl)]]}
    return Profile(
        kind=models.kind,
        target=models.fingerprints[0],
        source=models.fingerprints[1],
        names={"target": models.target.source, "source": source.source},
        maps=maps,
        source_cost=reading,
        share=share,
        curve=curve,
        thresholds=limits,
        facts={
            "quality_reached": reached,
            "kinds": by_kind,
            "texts": _texts(by_kind, share),
            "windows": windows,
        },
        gate=gate_of(windows, CURVE_SHARES),
        texts=TextReference.fit(job.windows.train.numpy(), job.windows.held.numpy()),
    )


def _texts(by_kind: QualityByKind, share: float) -> dict[str, dict[str, Any]]:
    """Of each kind of text the quality at the default share, and whether the profile holds on it."""
    found = {}
    for kind in TEXT_KINDS:
        for point in by_kind.get(kind, ()):
            if point["share"] == share:
                found[kind] = {**point, "holds": point["top1"] >= HOLDS_AGREEMENT}
    return found


@contextmanager
def _within_memory(settings: FitSettings, text: WindowSettings) -> Iterator[None]:
    """Turn running out of memory, wherever it happens, into an error with a way out."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if type(error) is RuntimeError and "allocate memory" not in str(error):  # torch's message on a CPU
            raise
        raise BadRequest(
            f"out of memory with {settings.batch} windows of {text.length:,} tokens at a time and maps of rank "
            f"{settings.rank or 'as wide as the target'}",
            "give a smaller --batch: the same command resumes; if 1 is too much, a smaller --window, --taps or --rank",
        ) from error
