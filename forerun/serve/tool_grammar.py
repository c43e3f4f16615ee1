"""Grammars that constrain an output to tool calls whose arguments fit their schemas, in the model's own form.

Written in llguidance's Lark. Each schema is a document of its own, so that its references resolve within it. Knows no
template and no tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from forerun.decode.grammar import ANY_OBJECT
from forerun.decode.json_schema import parse_schema, prepared_schema
from forerun.errors import BadRequest
from forerun.params import Grammar
from forerun.serve.tool_parser import CALL_BEGIN, CALL_END, PYTHON_TAG
from forerun.serve.tool_schema import Tool

# As `json.dumps` writes it and templates show it: with free white space small models repeat it without end
_SPACED = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
MAX_FORCED_CALLS = 16  # in one output that must call: without a limit small models repeat calls until the context ends


def calls_only(tools: Sequence[Tool], llama: bool, parallel: bool) -> Grammar:
    """Calls only."""
    more = f"({_text(_between(llama))} call){{0,{MAX_FORCED_CALLS - 1}}}" if parallel else ""
    return Grammar("lark", f"start: call {more}\n{_call(tools, llama, marked=not llama)}")


def calls_or_text(tools: Sequence[Tool], llama: bool, parallel: bool, tag: bool) -> Grammar:
    """Text in which every call fits its schema. `tag`: the vocabulary has Llama's mark before calls."""
    if llama:  # a call is the whole output, and an output that begins as an object is a call
        mark = f"{PYTHON_TAG}? " if tag else ""
        more = f"({_text(_between(True))} call){{0,{MAX_FORCED_CALLS - 1}}}" if parallel else ""
        rules = f"start: TEXT | {mark}call {more}\nTEXT: /[^{{](.|\\n)*/\n"
        return Grammar("lark", rules + _call(tools, True, marked=False))
    # A lazy rule ends as soon as it can: text cannot go past a mark
    start = "start: tagged* TEXT" if parallel else "start: TEXT | tagged"
    rules = f"{start}\ntagged: mark call\nmark[lazy]: TEXT {_text(CALL_BEGIN)}\nTEXT: /(.|\\n)*/\n"
    return Grammar("lark", rules + _call(tools, False, marked=False, after=f"\n{CALL_END}", before="\n"))


def calls_or_json(tools: Sequence[Tool], content: Grammar, llama: bool, parallel: bool) -> Grammar:
    """Calls, or content of a JSON grammar."""
    schema = content.source if content.kind == "json_schema" else ANY_OBJECT
    if llama:  # both begin as objects: unambiguous only as schemas with the same spacing, and with one call
        given = parse_schema(schema)
        spaced = json.dumps(given | _SPACED if isinstance(given, dict) else given)
        rules = [f"start: content | {_any(tools)}", f"content: %json {spaced}", *_objects(tools)]
        return Grammar("lark", "\n".join(rules))
    more = f"({_text(_between(llama))} call){{0,{MAX_FORCED_CALLS - 1}}}" if parallel else ""
    head = f"start: content | call {more}\ncontent: %json {json.dumps(parse_schema(schema))}\n"
    return Grammar("lark", head + _call(tools, llama, marked=True))


def _objects(tools: Sequence[Tool]) -> list[str]:
    rules = []
    for i, tool in enumerate(tools):
        schema = tool.function.schema_
        if "$ref" in json.dumps(schema):
            hint = "write the schema without $ref, or leave response_format or the tool out"
            raise BadRequest(f"response_format beside {tool.function.name}, whose parameters have a $ref", hint)
        properties = {"name": {"const": tool.function.name}, "parameters": prepared_schema(schema)}
        required = {
            "type": "object",
            "properties": properties,
            "required": [*properties],
            "additionalProperties": False,
        }
        rules.append(f"fn_{i}: %json {json.dumps(required | _SPACED)}")
    return rules


def _any(tools: Sequence[Tool]) -> str:
    return " | ".join(f"fn_{i}" for i in range(len(tools)))


def _call(tools: Sequence[Tool], llama: bool, marked: bool, before: str = "", after: str = "") -> str:
    """The rule of one call: its functions, and their arguments."""
    if marked:
        before, after = f"{CALL_BEGIN}\n", f"\n{CALL_END}"
    key = "parameters" if llama else "arguments"
    rules = [f"call: {_text(before)} ({_any(tools)}) {_text(after)}"]
    for i, tool in enumerate(tools):
        head = f'{{"name": "{tool.function.name}", "{key}": '
        rules.append(f"fn_{i}: {_text(head)} args_{i} {_text('}')}")
        rules.append(f"args_{i}: %json {json.dumps(prepared_schema(tool.function.schema_) | _SPACED)}")
    return "\n".join(rules) + "\n"


def _between(llama: bool) -> str:
    return "; " if llama else "\n"


def _text(text: str) -> str:
    return json.dumps(text) if text else ""
