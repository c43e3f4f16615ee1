"""A whole calibration: text to windows, windows to maps, maps to a profile that says how good they are.

The order of the stages, and what is said when memory ends. Each stage's own work lies in the modules beside this one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from forerun.errors import BadRequest
from forerun.prefill.calibration.cost import reading_cost
from forerun.prefill.calibration.curve import best_share, measure
from forerun.prefill.calibration.fit import JUDGED, fit
from forerun.prefill.calibration.model_pair import ModelPair
from forerun.prefill.calibration.resume import CalibrationState
from forerun.prefill.calibration.setup import CalibrationModels, FitSettings, check_window, check_writable, open_models
from forerun.prefill.calibration.text import Windows, WindowSettings, read_windows
from forerun.prefill.calibration.thresholds import thresholds
from forerun.prefill.maps import Maps
from forerun.prefill.profile import Profile

JUDGES = 64  # held-out windows that the curve and the thresholds are measured on


def calibrate(
    target: str,
    draft: str | None,
    texts: Sequence[Path],
    out: Path,
    settings: FitSettings,
    recipe: WindowSettings,
    device: torch.device,
    quiet: bool = False,
) -> Profile:
    """Fit, judge and save a profile. After Ctrl-C the same call goes on where it was."""
    check_window(recipe.prompt, recipe.continuation)
    check_writable(out)
    subject = open_models(target, draft, settings, recipe.length)
    windows = read_windows(texts, subject.target.tokenizer(), recipe, quiet)
    keeper = CalibrationState(out, _job(subject, windows, settings, recipe))
    with _within_memory(settings, recipe):
        pair = subject.build(device, quiet)
        with keeper.listening():
            maps, facts = fit(pair, windows, settings, recipe, keeper, quiet)
            profile = _judged(subject, pair, maps, windows, settings, recipe, keeper, quiet)
    profile.facts |= facts | {"device": device.type, "seconds": round(keeper.seconds, 1), "files": windows.files}
    profile.facts |= {"train_tokens": windows.train.numel(), "held_tokens": windows.held.numel()}
    if settings.distill:  # windows of the curve that the maps were selected on, too: its figures flatter them there
        held = len(windows.held)
        profile.facts["selected_on"] = max(0, min(JUDGES, held) + min(JUDGED, held) - held)
    profile.facts |= {"settings": asdict(settings), "recipe": asdict(recipe)}
    profile.save(out)
    keeper.remove()
    return profile


def _job(subject: CalibrationModels, windows: Windows, settings: FitSettings, recipe: WindowSettings) -> dict[str, Any]:
    """Everything that decides the result: a state is good for nothing else. How many windows go at a time is left
    out: it decides next to nothing, and whoever ran out of memory must change it."""
    digest = hashlib.sha256(windows.train.numpy().tobytes() + windows.held.numpy().tobytes())
    models = {"target": subject.fingerprints[0], "source": subject.fingerprints[1], "base": subject.base}
    fixed = {**models, "taps": list(subject.taps), "text": digest.hexdigest()[:16]}
    return {name: value for name, value in {**asdict(settings), **asdict(recipe), **fixed}.items() if name != "batch"}


def _judged(
    subject: CalibrationModels,
    pair: ModelPair,
    maps: Maps,
    windows: Windows,
    settings: FitSettings,
    recipe: WindowSettings,
    keeper: CalibrationState,
    quiet: bool,
) -> Profile:
    """A profile with its curve, default share and thresholds, all from held-out text."""
    held, kinds = windows.held[:JUDGES], windows.kinds[:JUDGES]
    ahead, batch = recipe.continuation, settings.batch
    config = subject.target.config
    reading = reading_cost(config, subject.source.config if subject.source else None, subject.base, max(subject.taps))

    def tick() -> None:
        keeper.tick(lambda: keeper.values)  # the maps are all there is to keep

    curve, by_kind = measure(pair, maps, held, kinds, ahead, reading, batch, tick, quiet)
    share, reached = best_share(curve, settings.quality)
    limits = thresholds(pair, maps, held, ahead, share, settings.quality, tick, quiet)
    source = subject.source or subject.target
    return Profile(
        kind=subject.kind,
        target=subject.fingerprints[0],
        source=subject.fingerprints[1],
        names={"target": subject.target.source, "source": source.source},
        maps=maps,
        source_cost=reading,
        share=share,
        curve=curve,
        thresholds=limits,
        facts={"quality_reached": reached, "kinds": by_kind},
    )


@contextmanager
def _within_memory(settings: FitSettings, recipe: WindowSettings) -> Iterator[None]:
    """Out of memory is an error with a way out, wherever it happens."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise _too_large(settings, recipe) from error
    except RuntimeError as error:
        if "allocate memory" not in str(error):  # how torch says it on a CPU
            raise
        raise _too_large(settings, recipe) from error


def _too_large(settings: FitSettings, recipe: WindowSettings) -> BadRequest:
    return BadRequest(
        f"memory ended with {settings.batch} windows of {recipe.length:,} tokens at a time and maps of rank "
        f"{settings.rank or 'as wide as the target'}",
        "give a smaller --batch: it goes on where it was; if 1 is too much, a smaller --window, --taps or --rank",
    )
