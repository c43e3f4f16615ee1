"""Old spellings of public names, accepted for one release with a warning: the one place that maps old to new."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any, TypeVar

from forerun.errors import BadRequest

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)

LLM_ARGUMENTS = {
    "weights": "dtype",
    "draft": "draft_model",
    "profile": "prefill_profile",
    "pool_tokens": "kv_cache_tokens",
    "max_batch": "max_num_seqs",
    "chunk_tokens": "max_num_batched_tokens",
    "max_context": "max_model_len",
    "prefix_cache": "enable_prefix_caching",
}
SAMPLING_ARGUMENTS = {"speculate": "speculation", "prefilling": "prefill"}
_OPTIONS = LLM_ARGUMENTS | {"speculate": "speculation"}
COMMAND_OPTIONS = {f"--{old}".replace("_", "-"): f"--{new}".replace("_", "-") for old, new in _OPTIONS.items()}

MODULES = {
    "forerun.accounting": "forerun.engine.stats",
    "forerun.answers": "forerun.outputs",
    "forerun.api": "forerun.llm",
    "forerun.driver": "forerun.runtime.driver",
    "forerun.plan": "forerun.recipes.plan",
    "forerun.progress": "forerun.core.progress",
    "forerun.prompts": "forerun.inputs",
    "forerun.sharing.candidates": "forerun.recipes.candidates",
    "forerun.sharing.compare": "forerun.recipes.compare",
    "forerun.sharing.consensus": "forerun.recipes.consensus",
    "forerun.tokenizer": "forerun.text.tokenizer",
}


def warn_renamed(old: str, new: str) -> None:
    """Warns where the old name is written: in the innermost frame that is not of this package."""
    frame: FrameType = sys._getframe(1)
    while frame.f_back is not None and _module(frame).split(".")[0] in ("forerun", *_BETWEEN):
        frame = frame.f_back
    warnings.warn_explicit(
        f"{old} is now {new}; the old name goes with the next release",
        DeprecationWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        _module(frame),
        frame.f_globals.setdefault("__warningregistry__", {}),
    )


def _module(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "")


_BETWEEN = ("dataclasses", "importlib")  # of Python's own modules: frames between a caller and ours


class OldModules(MetaPathFinder, Loader):
    """Imports a module that moved under its old name; it is one module under both."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in MODULES else None

    def exec_module(self, module: ModuleType) -> None:
        warn_renamed(module.__name__, MODULES[module.__name__])
        sys.modules[module.__name__] = import_module(MODULES[module.__name__])


def moved_names(module: str, names: Mapping[str, tuple[str, str]]) -> Callable[[str], Any]:
    """The `__getattr__` of a module some of whose names have moved: {old name: (module, new name)}."""

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home, new = names[name]
        warn_renamed(f"{module}.{name}", f"{home}.{new}")
        return getattr(import_module(home), new)

    return get


def with_new_names(given: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Keyword arguments of the caller's caller under today's names."""
    made = dict(given)
    for old in names.keys() & given.keys():
        new = names[old]
        if new in given:
            raise BadRequest(f"{old} and {new} are the same, and both are given", f"leave {old} out")
        warn_renamed(f"{old}=", f"{new}=")
        made[new] = made.pop(old)
    return made


def accepts_old_arguments(names: Mapping[str, str]) -> Callable[[F], F]:
    """Decorates a function: keyword arguments under their old names are passed on under the new ones."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **given: Any) -> Any:
            return function(*args, **with_new_names(given, names))

        return call  # type: ignore[return-value]

    return decorate


def renamed_attribute(old: str, new: str) -> Any:
    """A property that reads `new` under its old name."""

    def read(self: Any) -> Any:
        warn_renamed(f"{type(self).__name__}.{old}", f"{type(self).__name__}.{new}")
        return getattr(self, new)

    return property(read, doc=f"Old name of `{new}`.")


def accepts_old_fields(names: Mapping[str, str]) -> Callable[[C], C]:
    """Decorates a dataclass: its fields can be given and read under their old names. `dataclasses.replace` gives all
    fields as they are, and the old name beside them."""

    def decorate(kind: C) -> C:
        own, make = {entry.name for entry in fields(kind)}, accepts_old_arguments(names)(kind.__init__)  # type: ignore

        @functools.wraps(make)
        def init(self: Any, *args: Any, **given: Any) -> None:
            replaced = {names[old] for old in names.keys() & given.keys()} if own <= given.keys() else set()
            make(self, *args, **{name: value for name, value in given.items() if name not in replaced})

        kind.__init__ = init  # type: ignore[misc]
        for old, new in names.items():
            setattr(kind, old, renamed_attribute(old, new))
        return kind

    return decorate


class OldLLMNames:
    """Attributes of `LLM` under their old names."""

    profile = renamed_attribute("profile", "prefill_profile")

    @property
    def memory(self) -> dict[str, int]:
        """Old name of `memory_stats()`."""
        warn_renamed("LLM.memory", "LLM.memory_stats()")
        return self.memory_stats()  # type: ignore[attr-defined]

    def speculation(self) -> dict[str, Any]:
        """Old name of `speculation_stats()`."""
        warn_renamed("LLM.speculation()", "LLM.speculation_stats()")
        return self.speculation_stats()  # type: ignore[attr-defined]
