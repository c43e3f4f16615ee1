"""Forerun: LLM inference that never computes what it can reuse or guess, and checks every guess."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from forerun.renamed import MODULES, OldModules

if TYPE_CHECKING:
    from forerun.cache.tiers import TierConfig
    from forerun.core import PrefillReport, Usage
    from forerun.engine.sequence import Event
    from forerun.engine.stats import Stats
    from forerun.errors import (
        BadDrafter,
        BadProfile,
        BadRequest,
        CorruptModel,
        ForerunError,
        ModelNotFound,
        OutOfPages,
        UnsupportedModel,
    )
    from forerun.llm import LLM, Choice, Completion
    from forerun.params import Grammar, Prefill, SamplingParams, Speculation
    from forerun.sharing.session import Session

__all__ = [
    "BadDrafter",
    "BadProfile",
    "BadRequest",
    "Choice",
    "Completion",
    "CorruptModel",
    "Event",
    "ForerunError",
    "Grammar",
    "LLM",
    "ModelNotFound",
    "OutOfPages",
    "Prefill",
    "PrefillReport",
    "SamplingParams",
    "Session",
    "Speculation",
    "Stats",
    "TierConfig",
    "UnsupportedModel",
    "Usage",
    "__version__",
]
__version__ = "0.2.0"

# Imported when first used: torch alone takes more than a second, and `forerun --help` needs none of it
_NAMES = {
    "forerun.cache.tiers": ("TierConfig",),
    "forerun.core": ("PrefillReport", "Usage"),
    "forerun.engine.sequence": ("Event",),
    "forerun.engine.stats": ("Stats",),
    "forerun.errors": (
        *("BadDrafter", "BadProfile", "BadRequest", "CorruptModel", "ForerunError", "ModelNotFound", "OutOfPages"),
        "UnsupportedModel",
    ),
    "forerun.llm": ("LLM",),
    "forerun.outputs": ("Choice", "Completion"),
    "forerun.params": ("Grammar", "Prefill", "SamplingParams", "Speculation"),
    "forerun.sharing.session": ("Session",),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}

sys.meta_path.append(OldModules())

_PACKAGES = ("drafters", "recipes", "sharing")  # public ones, imported when first used


def __getattr__(name: str) -> Any:
    if name in _PACKAGES or f"forerun.{name}" in MODULES:  # old names of modules warn when they are imported
        return import_module(f"forerun.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'forerun' has no attribute {name!r}")
    with _collector_paused():
        value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return value


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Importing torch makes a million objects that stay: to search them for cycles took a seventh of the time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()  # both together: all objects are of the oldest generation, and none was searched
            gc.enable()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})
