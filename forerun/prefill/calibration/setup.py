"""Settings and models of a calibration, checked before anything long starts. Knows neither text nor fitting."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from forerun.errors import BadRequest
from forerun.models.config import ModelConfig
from forerun.models.fetch.store import resolve
from forerun.models.formats.adapter import open_draft
from forerun.models.formats.checkpoint import Checkpoint, open_checkpoint
from forerun.models.formats.fingerprint import fingerprint
from forerun.models.formats.hidden_drafter import HiddenDrafterWeights
from forerun.options import check_number
from forerun.prefill.calibration.dense import DenseModel
from forerun.prefill.calibration.model_pair import FIRST_TOKENS, TAIL_TOKENS, ModelPair
from forerun.prefill.profile import Profile

MAX_MAP_INPUTS = 16_384  # their Gram matrix is that wide, in float64 while it is solved
MAX_DEFAULT_RANK = 1536  # of the maps
DRAFT_LAYER_SHARE = 0.6  # of a draft's layers that are read: those above cost as much and add next to nothing
SELF_LAYER_SHARE = 0.3  # of the target's layers that every token runs where they are the source


@dataclass(frozen=True)
class FitSettings:
    """How maps are fitted. None: chosen for the models."""

    base: int | None = None  # layers of the target that every token runs
    rank: int | None = None  # of the maps; None: the target's hidden size, up to MAX_DEFAULT_RANK
    taps: int | None = None  # layers of the source that the maps read, spread evenly
    strength: float = 1e-3  # of the ridge
    batch: int = 4  # windows at a time
    steps: int | None = None  # of distillation
    minutes: float | None = None  # of the whole calibration; None: as long as it takes, with ten of distillation
    distill: bool = True
    quality: float = 0.97  # agreement with exact prefill that the default share and the thresholds aim at
    maps: str | None = None  # a profile whose maps are kept: nothing is fitted, all is measured anew
    start: str | None = None  # a profile whose maps distillation goes on from: there is no first fit

    def __post_init__(self) -> None:
        limits = {"rank": (1, 8192), "batch": (1, 1024), "strength": (0.0, 1.0), "quality": (0.5, 1.0)}
        limits |= {"base": (1, 1024), "taps": (1, 1024), "steps": (1, 10_000_000), "minutes": (0.0, 1e6)}
        for name, (low, high) in limits.items():
            if getattr(self, name) is not None:
                check_number(f"calibration: {name}", getattr(self, name), low, high)
        if self.start is not None and (self.maps is not None or not self.distill):
            problem = "maps that are to be trained on (start) cannot be kept as they are (maps, distill=False)"
            raise BadRequest(f"calibration: {problem}", "give one of them")

    @property
    def given(self) -> tuple[str, str] | None:
        """The profile whose maps are there already, and the option that names it."""
        if self.maps is not None:
            return "--maps", self.maps
        return None if self.start is None else ("--start", self.start)


@dataclass(frozen=True)
class CalibrationModels:
    """The opened models of a calibration. `source` is None where the target's own lower layers draft."""

    target: Checkpoint
    source: Checkpoint | None
    taps: tuple[int, ...]
    base: int
    fingerprints: tuple[str, str]  # of the target and of the source

    @property
    def kind(self) -> str:
        return "self" if self.source is None else "draft"

    def build(self, device: torch.device, quiet: bool) -> ModelPair:
        """Both models as plain networks: bf16 on a GPU, float32 elsewhere."""
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        target = DenseModel.from_checkpoint(self.target, device, dtype, quiet)
        source = DenseModel.from_checkpoint(self.source, device, dtype, quiet) if self.source else target
        return ModelPair(target, source, self.taps, self.base)


def open_models(target: str, draft: str | None, settings: FitSettings, window: int) -> CalibrationModels:
    """Open the models and check that they fit together and to windows of so many tokens."""
    opened = open_checkpoint(resolve(target))
    source = _draft(draft, opened) if draft is not None else None
    if source is not None:
        _check_draft(opened, source)
    for checkpoint in (opened, source):
        if checkpoint is not None and checkpoint.config.max_context < window:
            raise BadRequest(
                f"windows of {window:,} tokens exceed the context of {checkpoint.source}, "
                f"{checkpoint.config.max_context:,} tokens",
                "give a smaller --window",
            )
    if settings.given is not None:
        return _with_maps(opened, source, *settings.given)
    base = _base(opened.config, settings.base, alone=source is None)
    embedding = 0 if source is None else opened.config.hidden_size
    read = opened if source is None else source
    taps = _taps(read.config, settings.taps, base if source is None else None, embedding)
    return CalibrationModels(opened, source, taps, base, (fingerprint(opened), fingerprint(read)))


def _with_maps(target: Checkpoint, source: Checkpoint | None, option: str, path: str) -> CalibrationModels:
    """Models of a profile whose maps are kept or trained on: its layers are what its maps read."""
    profile = Profile.load(Path(path))
    prints = fingerprint(target), fingerprint(target if source is None else source)
    if (profile.kind == "self") != (source is None):
        given = "no --draft-model is given" if source is None else f"--draft-model is {source.source}"
        raise BadRequest(
            f"the profile of {option} drafts by {profile.kind!r}, and {given}", "give the models it was made for"
        )
    profile.check(prints[0], prints[1])
    return CalibrationModels(target, source, profile.maps.taps, profile.maps.base, prints)


def least_window(continuation: int) -> int:
    """Distillation cuts windows down to half, and compares two continuations: something must be left to draft."""
    return 2 * (FIRST_TOKENS + TAIL_TOKENS) + 3 * continuation + 64


def check_window(prompt: int, continuation: int) -> None:
    if prompt < (least := least_window(continuation)):
        raise BadRequest(
            f"prompts of {prompt} tokens are too short: {FIRST_TOKENS + TAIL_TOKENS} of each are always recomputed",
            f"give --window {least} or more",
        )


def check_writable(out: Path) -> None:
    """Raise now, not after an hour of fitting."""
    try:
        if out.is_dir():
            raise IsADirectoryError("it is a folder")
        out.parent.mkdir(parents=True, exist_ok=True)
        probe = out.with_name(f"{out.name}.{os.getpid()}.part")
        probe.touch()
        probe.unlink()
    except OSError as error:
        reason = error.strerror or str(error)
        raise BadRequest(f"cannot write a profile to {out}: {reason}", "give another --out") from None


def _draft(name: str, target: Checkpoint) -> Checkpoint:
    """The draft as an `LLM` opens it: with the drafter that was trained for both, where there is one, so that one draft
    model drafts prompts and answers."""
    found = open_draft(name, target)
    if found is None or isinstance(found, HiddenDrafterWeights):
        raise BadRequest(
            f"{name} is a drafter on the target's hidden states, not a draft model", "give a smaller model"
        )
    return found


def _check_draft(target: Checkpoint, source: Checkpoint) -> None:
    if not target.tokenizer().same_tokens(source.tokenizer()):
        raise BadRequest(
            f"{source.source} has another vocabulary than {target.source}: its hidden states belong to other tokens",
            "calibrate without --draft-model (a self profile); such a draft can still choose tokens: --chooser cross",
        )
    ours, theirs = target.config.macs, source.config.macs
    if theirs >= ours:
        raise BadRequest(
            f"the draft {source.source} is no smaller than the target {target.source} "
            f"({theirs:,} multiply-adds a token against {ours:,}): reading with it saves nothing",
            "give a smaller draft, or none: the target's own lower layers can draft",
        )


def _base(config: ModelConfig, asked: int | None, alone: bool) -> int:
    """Beside a draft only layer 0, which costs next to nothing; a model that drafts for itself needs some layers."""
    base = asked if asked is not None else max(1, round(SELF_LAYER_SHARE * config.num_layers)) if alone else 1
    if base >= config.num_layers:
        problem = f"base is {base}, but the target has {config.num_layers} layers and some must be left to draft"
        raise BadRequest(problem, f"give --base from 1 to {config.num_layers - 1}")
    return base


def _taps(config: ModelConfig, asked: int | None, last: int | None, embedding: int) -> tuple[int, ...]:
    """Layers spread evenly from the first to `last`, both included, no more than the Gram matrix allows beside the
    target's `embedding`. `last` None: of a draft, DRAFT_LAYER_SHARE of its layers."""
    last = min(config.num_layers, max(2, round(DRAFT_LAYER_SHARE * config.num_layers))) if last is None else last
    most = max(1, (MAX_MAP_INPUTS - embedding) // config.hidden_size)
    count = min(asked or most, last + 1)
    if count > most:
        raise BadRequest(
            f"{count} taps of {config.hidden_size} numbers make {count * config.hidden_size + embedding:,} inputs"
            f"{' with the embedding of the target' if embedding else ''}, the limit is {MAX_MAP_INPUTS:,}",
            f"give --taps {most} or fewer",
        )
    if count == 1:
        return (last,)
    return tuple(round(i * last / (count - 1)) for i in range(count))
