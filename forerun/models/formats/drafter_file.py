"""Trained drafters on disk: signed files, and where they are found. Knows no kind of drafter."""

from __future__ import annotations

from pathlib import Path

from forerun.errors import BadDrafter
from forerun.models.fetch.store import home
from forerun.models.formats.signed_file import SignedFormat

TRAIN_HINT = "train one: forerun train drafter --target ... --out FILE"
_FORMAT = SignedFormat("trained drafter", "forerun_drafter", 1, BadDrafter, TRAIN_HINT, again="train again")
write_drafter, read_drafter, not_whole = _FORMAT.save, _FORMAT.load, _FORMAT.not_whole
_PACKAGE = Path(__file__).parents[2]


def shipped_folders(kind: str) -> tuple[Path, ...]:
    """Where files lie that are found without being named: in the package, in its checkout, in the user's cache."""
    return _PACKAGE / "data" / kind, _PACKAGE.parent / "artifacts" / kind, home() / kind


def drafter_folders() -> tuple[Path, ...]:
    return shipped_folders("drafters")
