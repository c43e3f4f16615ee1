"""Schemas before they are compiled: sizes are refused, objects closed, integers bounded, and nothing else changes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from forerun.decode.json_schema import (
    MAX_INTEGER,
    MAX_OPTIONAL_PROPERTIES,
    WHITE_SPACE,
    parse_schema,
    prepared_schema,
    subschemas,
)
from forerun.errors import BadRequest

LARGE = {"type": "integer", "minimum": 0, "maximum": 10**30}
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
        ({"patternProperties": {"type": {"type": "integer"}}}, {"patternProperties": {"type": BOUNDED}}),
        # one that may be larger leaves the others bounded
        ({"prefixItems": [{"type": "integer"}, LARGE]}, {"prefixItems": [BOUNDED, LARGE]}),
        ({"type": "integer", "maximum": 10**30}, BOUNDED | {"maximum": 10**30}),
        (
            {"type": "integer", "exclusiveMinimum": -(10**30)},
            {"type": "integer", "exclusiveMinimum": -(10**30), "maximum": MAX_INTEGER},
        ),
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
        {"type": "integer", "minimum": 10**20},
        {"allOf": [{"type": "integer"}, LARGE]},
        {"type": "integer", "anyOf": [LARGE, {"type": "integer", "maximum": 5}]},
        {"$defs": {"a": {"type": "integer"}}, "$ref": "#/$defs/a", "type": "integer", "minimum": 10**20},
        {"properties": {"a": LARGE}, "patternProperties": {"": {"type": "integer"}}},
    ],
)
def test_other_schemas_are_as_they_were(given: Any):
    assert prepared_schema(given) == given


def test_objects_have_the_properties_that_are_listed():
    def closed(schema: Any) -> list[bool]:
        return ["additionalProperties" in node for node in subschemas(prepared_schema(schema)) if "properties" in node]

    listed: Any = {"properties": {"a": {}}}
    assert closed(listed | {"required": ["a"]}) == [True]
    assert closed({"properties": {"a": listed, "b": {"items": listed}}}) == [True] * 3
    assert closed({"$defs": {"a": listed}, "anyOf": [{"$ref": "#/$defs/a"}, {"allOf": [{"$ref": "#/$defs/a"}]}]}) == [
        True
    ]
    assert prepared_schema(listed | {"additionalProperties": True})["additionalProperties"] is True
    for open_schema in (
        listed | {"required": ["b"]},
        listed | {"patternProperties": {"x": {}}},
        {"allOf": [listed, listed]},
        {"anyOf": [listed], "properties": {"b": {}}},
        {"$defs": {"a": listed}, "$ref": "#/$defs/a", "properties": {"b": {}}},
    ):
        assert not any(closed(open_schema)), open_schema


def test_white_space_is_bounded_unless_the_schema_has_its_own():
    assert parse_schema("{}") == {"x-guidance": {"whitespace_pattern": WHITE_SPACE}}
    for own in ({"whitespace_flexible": False}, {"whitespace_pattern": " ?"}):
        assert parse_schema(json.dumps({"x-guidance": own})) == {"x-guidance": own}
    assert parse_schema("true") is True


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
