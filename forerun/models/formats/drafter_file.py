"""Trained drafters on disk: signed files with matrices in int8 and a scale for each row. Knows no kind of drafter."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from forerun.errors import BadDrafter
from forerun.models.fetch.store import home
from forerun.models.formats.signed_file import SignedFormat

TRAIN_HINT = "train one: forerun train drafter --target ... --out FILE"
_FORMAT = SignedFormat("trained drafter", "forerun_drafter", 1, BadDrafter, TRAIN_HINT, again="train again")
write_drafter, read_drafter, not_whole = _FORMAT.save, _FORMAT.load, _FORMAT.not_whole
_PACKAGE = Path(__file__).parents[2]


def drafter_folders() -> tuple[Path, ...]:
    """Where drafters lie that are found without being named: in the package, in its checkout, in the user's cache."""
    return _PACKAGE / "data" / "drafters", _PACKAGE.parent / "artifacts" / "drafters", home() / "drafters"


def rounded(name: str, value: Tensor) -> dict[str, Tensor]:
    """A matrix as int8 with a scale for each row: what was trained is small, its rounding far smaller."""
    value = value.detach().float().cpu()
    scale = value.abs().amax(1, keepdim=True).clamp_min(1e-12) / 127.0
    return {name: (value / scale).round().to(torch.int8).contiguous(), f"{name}_scale": scale[:, 0].contiguous()}


def restored(tensors: dict[str, Tensor], name: str) -> Tensor:
    """The tensor of that name in float32, rounded or not."""
    value = tensors[name]
    return value.float() * tensors[f"{name}_scale"][:, None] if value.dtype == torch.int8 else value
