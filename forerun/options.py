"""Options that describe themselves: a dataclass field with its help, its limits and the values it knows.

`SamplingParams`, `Speculation` and `Prefill` consist of such fields, and everything that offers them derives from
those: the command line (`forerun.commands.options`), the HTTP schema (`forerun.serve.schema`), docs/api.md. To derive:

    for entry in dataclasses.fields(Prefill):
        entry.name, entry.default, entry.metadata["help"]
        entry.metadata.get("low"), entry.metadata.get("high")  # limits of a number, both allowed ...
        entry.metadata.get("open_low")  # ... unless this is True: then `low` itself is not
        entry.metadata.get("choices")  # names that are known; more may be registered where `closed` is not True

Knows no option by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import MISSING, Field, field, fields
from math import inf, isinf
from typing import Any, Generic, TypeVar

from forerun.errors import BadRequest

Kept = TypeVar("Kept")
Given = TypeVar("Given")


class Converted(Generic[Kept, Given]):
    """Annotates a field that is given as one type and converted to another on creation. For the type checker only."""

    def __get__(self, instance: object, owner: Any) -> Kept:
        raise NotImplementedError

    def __set__(self, instance: object, value: Given) -> None:
        raise NotImplementedError


def option(default: Any = MISSING, *, help: str, factory: Callable[[], Any] | None = None, **details: Any) -> Any:
    """A dataclass field with `help` and `details`: low, high, open_low, whole, choices, closed."""
    metadata = {"help": help, **details}
    return field(default_factory=factory, metadata=metadata) if factory else field(default=default, metadata=metadata)


def field_of(kind: type, name: str) -> Field[Any]:
    return next(entry for entry in fields(kind) if entry.name == name)


def limits(entry: Field[Any]) -> str:
    """The limits of a number in words; nothing where there are none."""
    about = entry.metadata
    return _range(about["low"], about.get("high", inf), about.get("open_low", False)) if "low" in about else ""


def _range(low: float, high: float, open_low: bool) -> str:
    if high == inf:
        return f"above {low}" if open_low else f"at least {low}"
    return f"{'above' if open_low else 'from'} {low} to {high}"


def check_fields(checked: Any, prefix: str = "") -> None:
    """Refuse values outside the limits and choices of their fields; None is allowed where it is the default."""
    for entry in fields(checked):
        value, about, name = getattr(checked, entry.name), entry.metadata, prefix + entry.name
        if value is None and entry.default is None:
            continue
        if "low" in about:
            given = {limit: about[limit] for limit in ("low", "high", "whole", "open_low") if limit in about}
            check_number(name, value, **given)
        elif about.get("closed") and (not isinstance(value, str) or value not in about["choices"]):
            raise BadRequest(f"{name} is {value!r:.80}", f"use one of {', '.join(about['choices'])}")
        elif "choices" in about and (not isinstance(value, str) or not value):
            raise BadRequest(f"{name} must be a name, got {value!r:.80}", "use auto")
        elif isinstance(entry.default, bool) and not isinstance(value, bool):
            raise BadRequest(f"{name} must be true or false, got {value!r:.80}", "leave it out")


def check_number(
    name: str, value: Any, low: float, high: float = inf, *, whole: bool = False, open_low: bool = False, hint: str = ""
) -> None:
    """Refuse what is not a finite number within [low, high] (or (low, high]); the message names value and limits."""
    kind, allowed = "a whole number" if whole else "a number", _range(low, high, open_low)
    right_type = isinstance(value, int) if whole else isinstance(value, (int, float))
    if isinstance(value, bool) or not right_type:
        raise BadRequest(f"{name} is {value!r:.80}, it must be {kind}", f"give {kind}, {allowed}")
    if not (low < value if open_low else low <= value) or not value <= high or isinf(value):  # so is NaN
        raise BadRequest(f"{name} is {value}, allowed is {allowed}", hint or "choose a value in that range")


_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_bytes(option: str, given: str) -> int:
    """`8G`, `500M`, `1.5GB` or a plain number of bytes."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", given, re.IGNORECASE)
    if found is None:
        raise BadRequest(f"{option} is {given!r:.40}", "give a size such as 500M, 8G or a number of bytes")
    return int(float(found[1]) * _UNITS[found[2].upper()])
