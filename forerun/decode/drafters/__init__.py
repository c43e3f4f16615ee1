"""The drafters that come with Forerun; importing them here registers their names."""

from importlib import import_module

from forerun.decode.drafters.base import Drafter, DraftRequest, find, register, registered
from forerun.renamed import moved_names

__all__ = ["DraftRequest", "Drafter", "find", "register", "registered"]

_MODEL_DRAFTERS = ("model", "parallel", "block", "heads", "eagle", "cross", "selfdraft", "remote")
for _module in (*_MODEL_DRAFTERS, "lookup", "suffix", "copying", "grammar", "listing"):
    import_module(f"{__name__}.{_module}")

__getattr__ = moved_names(__name__, {"Ask": (__name__, "DraftRequest")})
