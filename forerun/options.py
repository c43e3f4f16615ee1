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

import math
import re
from collections.abc import Callable
from dataclasses import MISSING, Field, field, fields
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
    if "low" not in entry.metadata:
        return ""
    return (
        f"{'above' if entry.metadata.get('open_low') else 'from'} {entry.metadata['low']} to {entry.metadata['high']}"
    )


def check_fields(checked: Any, prefix: str = "") -> None:
    """Refuse values outside the limits and choices of their fields; None is allowed where it is the default."""
    for entry in fields(checked):
        value, about, name = getattr(checked, entry.name), entry.metadata, prefix + entry.name
        if value is None and entry.default is None:
            continue
        if "low" in about:
            whole, open_low = about.get("whole", False), about.get("open_low", False)
            check_number(name, value, about["low"], about["high"], whole, open_low)
        elif about.get("closed") and (not isinstance(value, str) or value not in about["choices"]):
            raise BadRequest(f"{name} is {value!r:.80}", f"use one of {', '.join(about['choices'])}")
        elif "choices" in about and (not isinstance(value, str) or not value):
            raise BadRequest(f"{name} must be a name, got {value!r:.80}", "use auto")
        elif isinstance(entry.default, bool) and not isinstance(value, bool):
            raise BadRequest(f"{name} must be true or false, got {value!r:.80}", "leave it out")


def check_number(name: str, value: float, low: float, high: float, whole: bool = False, open_low: bool = False) -> None:
    """Refuse what is not a number within [low, high] (or (low, high]); the message names the value and the limits."""
    kind = "a whole number" if whole else "a number"
    right_type = isinstance(value, int) if whole else isinstance(value, (int, float))
    if isinstance(value, bool) or not right_type:
        raise BadRequest(f"{name} must be {kind}, got {value!r:.80}", f"give {kind} from {low} to {high}")
    too_low = value <= low if open_low else value < low
    if too_low or value > high or math.isnan(value):  # infinities are outside any limit, too
        above = "above" if open_low else "from"
        raise BadRequest(f"{name} is {value}, allowed is {above} {low} to {high}", "choose a value in that range")


_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_bytes(option: str, given: str) -> int:
    """`8G`, `500M`, `1.5GB` or a plain number of bytes."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", given, re.IGNORECASE)
    if found is None:
        raise BadRequest(f"{option} is {given!r:.40}", "give a size such as 500M, 8G or a number of bytes")
    return int(float(found[1]) * _UNITS[found[2].upper()])
