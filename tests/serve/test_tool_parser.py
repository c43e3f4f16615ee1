"""Calls read out of text, however it is cut; grammars that let pass what fits and nothing else."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from forerun.decode.grammar import GrammarCompiler
from forerun.models.formats.checkpoint import open_checkpoint
from forerun.params import Grammar
from forerun.serve.tool_grammar import calls_only, calls_or_json, calls_or_text
from forerun.serve.tool_parser import PYTHON_TAG, ToolCallParser
from forerun.serve.tool_schema import Tool
from forerun.text.tokenizer import Tokenizer
from tests.tiny import VOCAB, write_tokenizer

Call = tuple[str, str]


def read(text: str, sizes: list[int]) -> tuple[str, list[Call]]:
    """The text in pieces of these sizes, over and over; what is told in pieces is what was read."""
    reader, pieces, at = ToolCallParser({"f", "g"}), [], 0
    while at < len(text):
        size = sizes[at % len(sizes)]
        pieces += reader.push(text[at : at + size])
        at += size
    pieces += reader.finish()
    told: list[str] = []
    for piece in pieces:
        if piece.begun is not None:
            assert piece.call == len(told) and reader.calls[piece.call] is piece.begun
            told.append("")
        if piece.call >= 0:
            told[piece.call] += piece.arguments
    assert told == [call.arguments for call in reader.calls]
    return "".join(piece.content for piece in pieces), [(call.name, call.arguments) for call in reader.calls]


F = '{"name": "f", "arguments": {"x": "}\\"{", "y": [{}]}}'
ARGUMENTS = '{"x": "}\\"{", "y": [{}]}'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("", "", []),
        (" just text \n", " just text \n", []),
        ("a < b, <tool_cal", "a < b, <tool_cal", []),
        (f"Wait.\n<tool_call>\n{F}\n</tool_call>\n", "Wait.", [("f", ARGUMENTS)]),
        (f"<tool_call>{F}</tool_call>\n<tool_call>{F}</tool_call> bye", "bye", [("f", ARGUMENTS)] * 2),
        (f"<tool_call>{F}<tool_call>{F}", "", [("f", ARGUMENTS)] * 2),
        ('<tool_call>\n{"arguments": {"a": 1}, "name": "other"}\n</tool_call>', "", [("other", '{"a": 1}')]),
        ("<tool_call>oops</tool_call>", "<tool_call>oops</tool_call>", []),
        ("<tool_call>[]</tool_call>", "<tool_call>[]</tool_call>", []),
        ('<tool_call>\n{"name": "f"', '<tool_call>\n{"name": "f"', []),
        ('<tool_call>\n{"name": "f", "arguments": {"a": "x', "", [("f", '{"a": "x')]),
        (' {"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
        ('{"name":"f","parameters":{}}; {"name": "g", "parameters": {}}', "", [("f", "{}"), ("g", "{}")]),
        ('<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", "{}")]),
        ('{"name": "unknown", "parameters": {}}', '{"name": "unknown", "parameters": {}}', []),
        ('{"name": "f", "age": 5}', '{"name": "f", "age": 5}', []),
        ('{"names": []}', '{"names": []}', []),
        ('```json\n{\n  "name": "f",\n  "arguments": {\n "a": 1}\n}\n```', "", [("f", '{\n "a": 1}')]),
        ('```\n{"name": "f", "arguments": {}}\n```\n', "", [("f", "{}")]),
        ('```json\n{"a": 1}\n```', '```json\n{"a": 1}\n```', []),
        ("```python\nprint()\n```", "```python\nprint()\n```", []),
        ('```json\n{"name": "f"', '```json\n{"name": "f"', []),
        ("```json", "```json", []),
        ("``", "``", []),
        ('Say {"name": "f", "parameters": {}}', 'Say {"name": "f", "parameters": {}}', []),
    ],
)
def test_calls_are_read_however_the_text_is_cut(text: str, content: str, calls: list[Call]):
    draws = random.Random(0)
    cuts = [[1], [2], [7], [1000], *([draws.randint(1, 9) for _ in range(11)] for _ in range(20))]
    for sizes in cuts:
        assert read(text, sizes) == (content, calls)


def test_text_of_any_kind_is_never_lost():
    draws = random.Random(1)
    parts = [
        "```",
        "json\n",
        "<tool_call>",
        "</tool_call>",
        '{"name": "f", ',
        '"arguments": {',
        "}",
        '"',
        "\\",
        " ",
        "\n",
        ";",
        "word",
    ]
    for _ in range(3000):
        text = "".join(draws.choices(parts, k=draws.randint(0, 9)))
        content, calls = read(text, [draws.randint(1, 6) for _ in range(7)])
        assert (content, calls) == read(text, [1000])
        assert calls or content == text or "<tool_call>" in text


def test_where_only_calls_are_an_answer_what_is_cut_off_is_none():
    reader = ToolCallParser({"f"}, only=True)
    pieces = reader.push(f"<tool_call>\n{F}\n</tool_call>\n<tool_ca") + reader.finish()
    assert [call.name for call in reader.calls] == ["f"] and not any(piece.content for piece in pieces)


@pytest.mark.parametrize("call", [f"<tool_call>\n{F}\n</tool_call>", PYTHON_TAG + F, F])
def test_of_a_call_that_is_cut_off_nothing_is_content(call: str):
    for length in range(len(call)):
        reader = ToolCallParser({"f"})
        pieces = reader.push(call[:length]) + reader.finish(cut_off=True)
        assert not "".join(piece.content for piece in pieces).strip(), call[:length]


@pytest.fixture(scope="module")
def compiler(smollm2: Path) -> GrammarCompiler:
    checkpoint = open_checkpoint(smollm2)
    return GrammarCompiler(checkpoint.tokenizer(), checkpoint.config.vocab_size)


def tools(**schema: Any) -> list[Tool]:
    city = {"enum": ["Oslo", "Rome"]}
    parameters = {"type": "object", "properties": {"city": city}, "required": ["city"], "additionalProperties": False}
    functions = [{"name": name, "parameters": parameters | schema} for name in ("weather", "time")]
    return [Tool.model_validate({"type": "function", "function": function}) for function in functions]


REFERRED = {"properties": {"city": {"$ref": "#/$defs/c"}}, "$defs": {"c": {"enum": ["Oslo", "Rome"]}}}
GOOD = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
LLAMA = '{"name": "time", "parameters": {"city": "Oslo"}}'


@pytest.mark.parametrize(
    ("grammar", "fits", "not_this"),
    [
        (calls_only(tools(**REFERRED), False, True), [GOOD, f"{GOOD}\n{GOOD}"], ["hi", f"{GOOD} bye"]),
        (calls_only(tools(), False, False), [GOOD], [f"{GOOD}\n{GOOD}"]),
        (calls_only(tools(), True, True), [LLAMA, f"{LLAMA}; {LLAMA}"], [GOOD, "hi"]),
        (calls_or_text(tools(), False, True, False), ["hi", f"hi {GOOD} bye", "a <tool b", f"{GOOD}\n{GOOD}"], []),
        (calls_or_text(tools(), False, False, False), ["hi", f"hi {GOOD}"], [f"{GOOD}\n{GOOD}"]),
        (calls_or_text(tools(), True, True, False), ["hi {", LLAMA], ['{"a": 1}']),
        (calls_or_json(tools(), Grammar("json_object"), False, True), ['{"a":1}', GOOD], ["hi"]),
        (calls_or_json(tools(), Grammar("json_schema", '{"enum": [1]}'), True, True), ["1", LLAMA], ["2", '{"a":1}']),
    ],
)
def test_grammars(compiler: GrammarCompiler, grammar: Grammar, fits: list[str], not_this: list[str]):
    def passes(text: str) -> bool:
        answer, ids = compiler.constraint(grammar), compiler._tokenizer.encode(text)
        if answer.accepts((), ids) < len(ids):
            return False
        answer.advance(ids)
        return bool((answer.bits(()) & answer.vocabulary.ends).any())

    wrong = [text.replace("Oslo", "Bonn") for text in fits] + [text.replace("city", "town") for text in fits]
    assert all(map(passes, fits))
    assert not any(passes(text) for text in [*not_this, *wrong] if text not in fits)


def test_the_mark_of_llama_models_may_stand_before_a_call(tmp_path: Path):
    write_tokenizer(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text().replace("<|im_start|>", PYTHON_TAG))
    tokenizer = Tokenizer.from_folder(tmp_path, eos_ids=[2])
    answer = GrammarCompiler(tokenizer, VOCAB).constraint(calls_or_text(tools(), True, False, tag=True))
    mark = tokenizer.backend.token_to_id(PYTHON_TAG)
    assert mark in tokenizer.special_ids
    good, wrong = (tokenizer.encode(text) for text in (LLAMA, "hello"))
    assert answer.accepts((), [mark, *good]) == len(good) + 1 and answer.accepts((), good) == len(good)
    assert answer.accepts((), [mark, *wrong]) == 1


@pytest.mark.parametrize(
    "cut", ["<tool_call>", '<tool_call>\n{"na', '<tool_call>\n{"name": "get_we', "<tool_ca", '{"name": "get']
)
def test_a_call_cut_off_in_its_name_is_no_content(cut: str):
    for before in ("", "It rains.\n"):
        if before and cut.startswith("{"):
            continue  # a bare object is a call only at the beginning
        parser = ToolCallParser({"get_weather"})
        deltas = parser.push(before + cut) + parser.finish(cut_off=True)
        assert "".join(delta.content for delta in deltas) == before.rstrip() and not parser.calls
        whole = ToolCallParser({"get_weather"})  # the same text where the model itself ended there
        deltas = whole.push(before + cut) + whole.finish()
        assert cut.strip() in "".join(delta.content for delta in deltas)


def test_text_that_is_no_call_stays_where_it_is_cut_off():
    for text in ("a < b", "<tool_call> is a tag", "`json`", '{"names": "x'):
        parser = ToolCallParser({"get_weather"})
        deltas = parser.push(text) + parser.finish(cut_off=True)
        assert "".join(delta.content for delta in deltas) == text
