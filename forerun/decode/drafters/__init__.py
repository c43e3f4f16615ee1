"""The drafters that come with Forerun; importing them here registers their names."""

from forerun.decode.drafters import copying, cross, grammar, lookup, model, selfdraft, suffix
from forerun.decode.drafters.base import Ask, Drafter, register, registered

__all__ = [
    "Ask",
    "Drafter",
    "copying",
    "cross",
    "grammar",
    "lookup",
    "model",
    "register",
    "registered",
    "selfdraft",
    "suffix",
]
