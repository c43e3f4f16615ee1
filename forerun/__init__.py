"""Forerun: LLM inference that never computes what it can reuse or guess, and checks every guess."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forerun.core import Usage
    from forerun.errors import ForerunError
    from forerun.llm import LLM, Choice, Completion
    from forerun.params import Grammar, Prefill, SamplingParams, Speculation

__all__ = [
    "LLM",
    "Choice",
    "Completion",
    "ForerunError",
    "Grammar",
    "Prefill",
    "SamplingParams",
    "Speculation",
    "Usage",
]
__version__ = "0.1.0"

# Imported when first used: torch alone takes more than a second, and `forerun --help` needs none of it
_HOME = {
    "LLM": "forerun.llm",
    "Choice": "forerun.llm",
    "Completion": "forerun.llm",
    "Grammar": "forerun.params",
    "Prefill": "forerun.params",
    "SamplingParams": "forerun.params",
    "Speculation": "forerun.params",
    "Usage": "forerun.core",
    "ForerunError": "forerun.errors",
}


_PARTS = ("drafters", "recipes", "sharing")  # public names in parts, such as forerun.drafters.register


def __getattr__(name: str) -> Any:
    if name in _PARTS:
        return import_module(f"forerun.{name}")
    if name == "plan":  # its old place, for one release
        warnings.warn("forerun.plan is forerun.recipes.plan now", DeprecationWarning, stacklevel=2)
        return import_module("forerun.recipes.plan")
    if name not in _HOME:
        raise AttributeError(f"module 'forerun' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PARTS})
