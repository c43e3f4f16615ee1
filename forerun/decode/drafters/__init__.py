"""The drafters that come with Forerun; importing them here registers their names."""

from forerun.decode.drafters import copying, cross, grammar, lookup, model, parallel, selfdraft, suffix
from forerun.decode.drafters.base import Drafter, DraftRequest, register, registered

__all__ = [
    "DraftRequest",
    "Drafter",
    "copying",
    "cross",
    "grammar",
    "lookup",
    "model",
    "parallel",
    "register",
    "registered",
    "selfdraft",
    "suffix",
]
