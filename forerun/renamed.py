"""Old spellings of public names, accepted for one release with a warning: the one place that maps old to new."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
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
COMMAND_OPTIONS = {
    "--weights": "--dtype",
    "--draft": "--draft-model",
    "--profile": "--prefill-profile",
    "--pool-tokens": "--kv-cache-tokens",
    "--max-batch": "--max-num-seqs",
    "--max-context": "--max-model-len",
    "--speculate": "--speculation",
}


def warn_renamed(old: str, new: str, stacklevel: int = 3) -> None:
    warnings.warn(f"{old} is now {new}; the old name goes with the next release", DeprecationWarning, stacklevel)


def with_new_names(given: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Keyword arguments of the caller's caller under today's names."""
    made = dict(given)
    for old in names.keys() & given.keys():
        new = names[old]
        if new in given:
            raise BadRequest(f"{old} and {new} are the same, and both are given", f"leave {old} out")
        warn_renamed(f"{old}=", f"{new}=", stacklevel=4)
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
    """Decorates a dataclass: its fields can be given and read under their old names."""

    def decorate(kind: C) -> C:
        kind.__init__ = accepts_old_arguments(names)(kind.__init__)  # type: ignore[misc]
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
