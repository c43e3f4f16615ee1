"""Schemas before they are compiled: sizes are refused, integers are bounded, and nothing else changes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from forerun.decode.json_schema import MAX_INTEGER, MAX_OPTIONAL_PROPERTIES, parse_schema, prepared_schema
from forerun.errors import BadRequest

BOUNDED = {"type": "integer", "minimum": -MAX_INTEGER, "maximum": MAX_INTEGER}


@pytest.mark.parametrize(
    ("given", "prepared"),
    [
        ({"type": "integer"}, BOUNDED),
        ({"type": ["integer", "null"]}, BOUNDED | {"type": ["integer", "null"]}),
        ({"type": "integer", "minimum": 3}, {"type": "integer", "minimum": 3, "maximum": MAX_INTEGER}),
        (
            {"type": "integer", "exclusiveMaximum": 3},
            {"type": "integer", "exclusiveMaximum": 3, "minimum": -MAX_INTEGER},
        ),
        ({"anyOf": [{"type": "integer"}, True]}, {"anyOf": [BOUNDED, True]}),
        ({"$defs": {"a": {"type": "integer"}}}, {"$defs": {"a": BOUNDED}}),
        ({"properties": {"type": {"type": "integer"}}}, {"properties": {"type": BOUNDED}}),
    ],
)
def test_integers_are_bounded(given: Any, prepared: Any):
    before = json.dumps(given)
    assert prepared_schema(given) == prepared and json.dumps(given) == before


@pytest.mark.parametrize(
    "given",
    [
        True,
        {"type": "number"},
        {"type": ["integer", "number"]},
        {"enum": [{"type": "integer"}]},
        {"const": {"type": "integer"}},
        {"type": "integer", "minimum": 0, "maximum": 10**30},
        {"type": "integer", "multipleOf": 5},
        {"items": {"type": "integer"}, "minimum": 10**20},  # beyond the bound: the schema wants large numbers
    ],
)
def test_other_schemas_are_as_they_were(given: Any):
    assert prepared_schema(given) == given


def test_sizes():
    def optional(count: int) -> dict[str, Any]:
        return {"properties": {f"p{i}": {} for i in range(count)}}

    prepared_schema(optional(MAX_OPTIONAL_PROPERTIES))
    prepared_schema(optional(2000) | {"required": [f"p{i}" for i in range(2000)]})
    for wrong, reason in (
        (optional(MAX_OPTIONAL_PROPERTIES + 1), "optional properties, the limit"),
        ({"anyOf": [optional(400) for _ in range(4)]}, "squares"),
        ({"anyOf": [{}] * 30_000}, "schemas"),
    ):
        with pytest.raises(BadRequest, match=reason):
            prepared_schema(wrong)
    for text, reason in (("[1]", "is an object"), ("{", "not JSON"), ("[" * 100_000, "nested too deeply|not JSON")):
        with pytest.raises(BadRequest, match=reason):
            parse_schema(text)
