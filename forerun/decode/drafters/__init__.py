"""The drafters that come with Forerun; importing them here registers their names."""

from forerun.decode.drafters import (
    block,
    copying,
    cross,
    eagle,
    grammar,
    heads,
    lookup,
    model,
    parallel,
    remote,
    selfdraft,
    suffix,
)
from forerun.decode.drafters.base import Drafter, DraftRequest, find, register, registered
from forerun.renamed import moved_names

__all__ = [
    "DraftRequest",
    "Drafter",
    "block",
    "copying",
    "cross",
    "eagle",
    "find",
    "grammar",
    "heads",
    "lookup",
    "model",
    "parallel",
    "register",
    "registered",
    "remote",
    "selfdraft",
    "suffix",
]

__getattr__ = moved_names(__name__, {"Ask": (__name__, "DraftRequest")})
