"""Pydantic fields out of the dataclasses in `forerun.params`: names, types, defaults, limits and help are theirs.

Limits are only documented here, in the OpenAPI document; the dataclass checks them when it is made, once.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, create_model
from pydantic_core import CoreSchema

from forerun.options import Converted, field_of


def _fail_fast(schema: Any) -> None:
    if isinstance(schema, dict) and schema.get("type") in ("list", "dict"):
        schema["fail_fast"] = True
    for part in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, (list, tuple)) else ():
        _fail_fast(part)


class FirstError(BaseModel):
    """Lists are validated up to their first wrong item: a body of 8 MB has room for millions, each an error of its own,
    and all of them are made on the event loop."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _fail_fast(schema)
        return schema


class StrictModel(FirstError):
    """No coercion (no text for numbers), and unknown fields are errors: a field without effect would mislead."""

    model_config = ConfigDict(strict=True, extra="forbid")


class LenientModel(FirstError):
    """No coercion, and unknown fields are kept aside: `unknown_fields` lists them, for a warning or an error."""

    model_config = ConfigDict(strict=True, extra="allow")


def unknown_fields(body: Any, path: str = "") -> list[str]:
    """Paths of the fields that no model in this body knows."""
    if isinstance(body, list):
        models = ((i, item) for i, item in enumerate(body) if isinstance(item, BaseModel))
        return [found for i, item in models for found in unknown_fields(item, f"{path}{i}.")]
    found = [f"{path}{name}" for name in body.model_extra or ()]
    for name, field in type(body).model_fields.items():
        value = getattr(body, name)
        if isinstance(value, (BaseModel, list)):
            found += unknown_fields(value, f"{path}{field.alias or name}.")
    return found


def derived(name: str, options: type, *names: str, optional: bool = False, base: type[BaseModel] = StrictModel) -> Any:
    """A model with the fields of a dataclass, or only with those named. `optional`: null is the default of each field,
    and means that it is left out."""
    hints = {field: _given(hint) for field, hint in get_type_hints(options).items()}
    given = {entry.name: entry for entry in dataclasses.fields(options)}
    fields = {field: _field(given[field], hints[field], optional) for field in names or given}
    return create_model(name, __base__=base, **fields)  # type: ignore[call-overload]


def accepted(name: str, *fields: str) -> Any:
    """A model with fields that clients send and that have no effect here, whatever their values."""
    return create_model(name, __base__=LenientModel, **dict.fromkeys(fields, (Any, None)))  # type: ignore[call-overload]


def _given(hint: Any) -> Any:
    """What a field takes, where it is converted on creation."""
    return get_args(hint)[1] if get_origin(hint) is Converted else hint


def described(options: type, name: str, **more: Any) -> Any:
    """For a field whose type in JSON is another one: the help and limits of a dataclass's field; null by default."""
    return Field(default=None, json_schema_extra=documented(options, name), **more)


def documented(options: type, name: str) -> dict[str, Any]:
    """The help, limits and known values of a dataclass's field, as JSON schema has them."""
    return _documented(field_of(options, name))


def _field(entry: dataclasses.Field[Any], hint: Any, optional: bool) -> tuple[Any, Any]:
    kind = Literal[entry.metadata["choices"]] if entry.metadata.get("closed") else hint
    default = None if optional else entry.default
    return (kind | None if optional else kind), Field(default=default, json_schema_extra=_documented(entry))


def _documented(entry: dataclasses.Field[Any]) -> dict[str, Any]:
    about = entry.metadata
    names = {
        "description": about.get("help"),
        "minimum": about.get("low"),
        "maximum": about.get("high"),
        "examples": about.get("choices"),
    }
    if about.get("open_low"):
        names["exclusiveMinimum"] = names.pop("minimum")
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in names.items() if value is not None
    }
