"""JSON schemas before they are compiled: what is refused by its size, and what gets a bound that the schema lacks.

Compiling takes time quadratic in the optional properties of an object, and a parser has room for so many alternatives:
both are refused here, with the number and the limit. An integer without bounds may have digits without end, and models
that repeat themselves write them: it is bounded to what every JSON reader takes exactly. So is white space between two
parts, to what compact and indented JSON have. An object has no properties but those that are listed, unless its schema
names others or composes objects: small models go on adding. Knows no parser.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from forerun.errors import BadRequest

MAX_INTEGER = 2**53 - 1  # the largest that readers with double precision take exactly; 16 digits
MAX_OPTIONAL_PROPERTIES = 450  # of one object: llguidance has 2000 items in a row, and each takes four of them
MAX_OPTIONAL_PAIRS = 500_000  # sum of squares over all objects; 500 properties compile in 0.1 to 0.3 s on one core
MAX_SUBSCHEMAS = 20_000
WHITE_SPACE = r" |\r?\n{1,2}[ \t]{0,32}"  # between two parts: none, a space, or up to two new lines and an indent

_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SINGLE = ("items", "additionalProperties", "additionalItems", "contains", "not", "if", "then", "else")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_COMPOSING = ("if", "dependentSchemas", "not")  # objects of several schemas: what one lists is not all
_BESIDE = ("anyOf", "oneOf", "allOf", "$ref")  # the same where properties are beside them
_OPEN = ("additionalProperties", "unevaluatedProperties", "patternProperties", "minProperties", "propertyNames")
_FIXED = ("enum", "const", "multipleOf", "$ref", "allOf")  # the value is not free, or decided elsewhere


def parse_schema(source: str) -> Any:
    """The schema in a text, checked, and with what it lacks in bounds."""
    try:
        schema = json.loads(source)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise BadRequest(f"the JSON schema is not JSON: {reason}", "pass the schema as JSON text") from error
    if not isinstance(schema, (dict, bool)):
        raise BadRequest(f"a JSON schema is an object, got {source.strip():.60}", 'pass e.g. {"type": "object"}')
    prepared = prepared_schema(schema)
    own = prepared.get("x-guidance", {}) if isinstance(prepared, dict) else None
    if isinstance(own, dict) and "whitespace_flexible" not in own:
        prepared["x-guidance"] = {"whitespace_pattern": WHITE_SPACE} | own
    return prepared


def prepared_schema(schema: Any) -> Any:
    """A copy of a schema, checked, with objects closed, and integers bounded where they may not be beyond that."""
    _check_size(schema)
    copied = json.loads(json.dumps(schema))
    far = [node for node in subschemas(copied) if _is_far(node)]
    # A far bound may be about the integers of another schema, where one value has several: then none is bounded
    if not far or not (any("integer" not in _kinds(node) for node in far) or any(map(_shares, subschemas(copied)))):
        for node in subschemas(copied):
            _bound(node)
    if not any(_composes(node) for node in subschemas(copied)):
        for node in subschemas(copied):
            _close(node)
    return copied


def subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """All schemas in a schema, itself included; what is only data (`enum`, `const`, `default`) is not among them."""
    pending = [schema]
    while pending:
        node = pending.pop()
        if not isinstance(node, dict):
            continue
        yield node
        for name in _LISTS:
            found = node.get(name)
            pending += found if isinstance(found, list) else []
        for name in _MAPS:
            found = node.get(name)
            pending += found.values() if isinstance(found, dict) else []
        for name in _SINGLE:
            found = node.get(name)
            pending += found if isinstance(found, list) else [found]


def _check_size(schema: Any) -> None:
    pairs = 0
    for number, node in enumerate(subschemas(schema), 1):
        if number > MAX_SUBSCHEMAS:
            raise BadRequest(f"the JSON schema has more than {MAX_SUBSCHEMAS} schemas in it", "use a smaller one")
        properties, required = node.get("properties"), node.get("required")
        if not isinstance(properties, dict):
            continue
        needed = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
        optional = sum(name not in needed for name in properties)
        if optional > MAX_OPTIONAL_PROPERTIES:
            raise BadRequest(
                f"an object of the JSON schema has {optional} optional properties, the limit is "
                f"{MAX_OPTIONAL_PROPERTIES}",
                "list more of them in `required`, or split the object",
            )
        pairs += optional * optional
    if pairs > MAX_OPTIONAL_PAIRS:
        raise BadRequest(
            f"the objects of the JSON schema have too many optional properties: the sum of their squares is {pairs}, "
            f"the limit is {MAX_OPTIONAL_PAIRS}",
            "list more of them in `required`",
        )


def _is_far(node: dict[str, Any]) -> bool:
    """Whether it says that an integer may be beyond what is the bound otherwise."""
    return any(isinstance(value, (int, float)) and abs(value) > MAX_INTEGER for value in map(node.get, _BOUNDS))


def _kinds(node: dict[str, Any]) -> list[Any]:
    kinds = node.get("type")
    return kinds if isinstance(kinds, list) else [kinds]


def _composes(node: dict[str, Any]) -> bool:
    parts = node.get("allOf")
    several = isinstance(parts, list) and len(parts) > 1
    beside = "properties" in node and any(name in node for name in _BESIDE)
    return several or beside or any(name in node for name in _COMPOSING)


def _close(node: dict[str, Any]) -> None:
    listed, required = node.get("properties"), node.get("required")
    if not isinstance(listed, dict) or any(name in node for name in _OPEN):
        return
    if not isinstance(required, list) or all(isinstance(name, str) and name in listed for name in required):
        node["additionalProperties"] = False


def _shares(node: dict[str, Any]) -> bool:
    """Whether a value may have another schema, too."""
    beside = any(name in node for name in _BESIDE) and any(name in node for name in ("type", *_BOUNDS))
    return beside or any(name in node for name in ("allOf", "patternProperties", *_COMPOSING))


def _bound(node: dict[str, Any]) -> None:
    kinds = _kinds(node)
    if "integer" not in kinds or "number" in kinds or any(name in node for name in _FIXED):
        return
    lows, highs = ([node[name] for name in names if name in node] for names in (_BOUNDS[::2], _BOUNDS[1::2]))
    if not lows and not any(_number(high) < -MAX_INTEGER for high in highs):
        node["minimum"] = -MAX_INTEGER
    if not highs and not any(_number(low) > MAX_INTEGER for low in lows):
        node["maximum"] = MAX_INTEGER


def _number(value: Any) -> float:
    return value if isinstance(value, (int, float)) else 0
