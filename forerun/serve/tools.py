"""Tools of one request: how they are put into the prompt, which grammar the output follows, how calls are parsed.

A model's chat template shows which form of calls it was trained on. For templates without tools, or with a form that
`tool_parser` does not parse, there is a system instruction in Qwen's form, with calls and results of earlier turns as
text: that works with any chat model, the better the larger it is. Knows no HTTP and no engine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forerun.params import Grammar
from forerun.serve.tool_grammar import calls_only, calls_or_json, calls_or_text
from forerun.serve.tool_parser import CALL_BEGIN, CALL_END, PYTHON_TAG, ToolCallParser
from forerun.serve.tool_schema import Tool, call_object
from forerun.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from forerun.serve.schema import Message

_INSTRUCTION = """You may call functions. These are available, one JSON object to a line:
{tools}

To call a function, answer with a JSON object between tags, and with nothing else:
{begin}
{{"name": <function name>, "arguments": <arguments as a JSON object>}}
{end}
Results come between <tool_response> tags."""


@dataclass(frozen=True)
class ToolDialect:
    """How tools are described to one model, and the form of its calls."""

    tokenizer: Tokenizer
    native: bool = True  # its template takes tools, calls and results; False: they are put into text
    llama: bool = False  # else Qwen's form
    tag: bool = False  # its vocabulary has Llama's mark before calls

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ToolDialect:
        text = tokenizer.tool_template
        if "tools" in text:
            if CALL_BEGIN in text and "<function=" not in text:
                return cls(tokenizer)
            if re.search(r'\\?"parameters\\?"', text) or PYTHON_TAG in text:
                tag = tokenizer.backend.token_to_id(PYTHON_TAG) in tokenizer.special_ids
                return cls(tokenizer, llama=True, tag=tag)
        return cls(tokenizer, native=False)


@dataclass(frozen=True)
class ToolUse:
    """`tools`: what the model may call; `must`: whether it has to."""

    dialect: ToolDialect
    tools: tuple[Tool, ...]
    must: bool = False
    parallel: bool = True

    def parser(self) -> ToolCallParser:
        return ToolCallParser({tool.function.name for tool in self.tools}, only=self.must)

    def grammar(self, content: Grammar | None) -> Grammar | None:
        """`content`: grammar of the text beside calls. None: nothing in the request constrains the output."""
        llama, parallel = self.dialect.llama, self.parallel
        if self.must:
            return calls_only(self.tools, llama, parallel)
        if content is not None:
            return calls_or_json(self.tools, content, llama, parallel)
        if parallel and not any(tool.function.strict for tool in self.tools):
            return None
        return calls_or_text(self.tools, llama, parallel, self.dialect.tag)


@dataclass(frozen=True)
class ChatPrompt:
    """Messages and tools as a chat template takes them."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    continued: str = ""  # how the answer begins, which the model continues

    @property
    def texts(self) -> list[str]:
        """All that the template writes, but for its own words."""
        calls = [json.dumps(entry["tool_calls"]) for entry in self.messages if "tool_calls" in entry]
        tools = [json.dumps(tool, ensure_ascii=False) for tool in self.tools or ()]
        return [*(entry["content"] for entry in self.messages), *calls, *tools, self.continued]

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        prompt = tokenizer.apply_chat_template(self.messages, self.tools)
        return prompt + tokenizer.encode(self.continued) if self.continued else prompt


def chat_prompt(dialect: ToolDialect, messages: Sequence[Message], tools: Sequence[Tool]) -> ChatPrompt:
    described = [tool.model_dump(exclude_none=True) for tool in tools]
    if dialect.native:
        return ChatPrompt(_native(messages), described or None)
    entries = _as_text(messages)
    if described:
        lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in described)
        instruction = _INSTRUCTION.format(tools=lines, begin=CALL_BEGIN, end=CALL_END)
        if entries and entries[0]["role"] == "system":
            entries[0]["content"] += f"\n\n{instruction}"
        else:
            entries.insert(0, {"role": "system", "content": instruction})
    return ChatPrompt(entries)


def _native(messages: Sequence[Message]) -> list[dict[str, Any]]:
    names: dict[str, str] = {}
    entries: list[dict[str, Any]] = []
    for message in messages:
        entry: dict[str, Any] = {"role": message.template_role, "content": message.text}
        if message.tool_calls:
            names |= {call.id: call.function.name for call in message.tool_calls}
            made = [call_object(call.id, call.function.name, call.function.values) for call in message.tool_calls]
            entry["tool_calls"] = made
        if message.tool_call_id is not None:
            entry |= {"tool_call_id": message.tool_call_id, "name": names.get(message.tool_call_id, "")}
        entries.append(entry)
    return entries


def _as_text(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The same without tools: calls as the model would write them, results as user messages."""
    entries: list[dict[str, Any]] = []
    results: list[str] = []  # of the turn: one message for all, as templates require alternating roles
    for message in messages:
        role, text = message.template_role, message.text
        if message.tool_calls:
            text = "\n".join([*([text] if text else []), *map(_written, message.tool_calls)])
        if role == "tool":
            text = f"<tool_response>\n{text}\n</tool_response>"
            results.append(text)
            continue
        _flush(results, entries)
        entries.append({"role": role, "content": text})
    _flush(results, entries)
    return entries


def _flush(results: list[str], entries: list[dict[str, Any]]) -> None:
    if results:
        entries.append({"role": "user", "content": "\n".join(results)})
        results.clear()


def _written(call: Any) -> str:
    body = json.dumps({"name": call.function.name, "arguments": call.function.values}, ensure_ascii=False)
    return f"{CALL_BEGIN}\n{body}\n{CALL_END}"
