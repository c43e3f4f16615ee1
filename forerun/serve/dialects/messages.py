"""Anthropic's messages: requests to chat requests, and chat responses back, whole or as their stream of events.

Thinking blocks are passed over. Every prefix is cached, with or without `cache_control`; a prefix with such a mark is
pinned (`prompt_pins`), and what of it was computed is reported as written to the cache. Knows no engine.
"""

from __future__ import annotations

import json
import uuid
from typing import Annotated, Any, Literal

from pydantic import Field

from forerun.errors import BadRequest
from forerun.serve.derived import LenientModel, accepted
from forerun.serve.dialects.base import NamedEvents, chat_request, joined_text
from forerun.serve.errors import ApiError
from forerun.serve.schema import ChatRequest, ForerunOptions
from forerun.serve.tool_schema import call_object

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_THINKING = ("thinking", "redacted_thinking")
# Tools that Anthropic's own servers run, by how their types begin: agents offer them to every server, and the model is
# not told of them here. Others of its types, which the client itself would run, are refused: they have no schema
_HOSTED_TOOLS = ("web_search", "web_fetch", "code_execution", "tool_search", "mcp")


class AnthropicMessage(LenientModel):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class AnthropicTool(LenientModel):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: Any = None

    @property
    def hosted(self) -> bool:
        return (self.type or "").startswith(_HOSTED_TOOLS)


class AnthropicToolChoice(LenientModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class CountRequest(LenientModel):
    """What has tokens in a request."""

    model: str | None = None
    messages: Annotated[list[AnthropicMessage], Field(min_length=1)]
    system: str | list[dict[str, Any]] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    # Accepted without effect
    thinking: Any = None
    cache_control: Any = None
    context_management: Any = None
    mcp_servers: Annotated[list[Any], Field(max_length=0)] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None

    def chat(self, **more: Any) -> ChatRequest:
        values: dict[str, Any] = {"model": self.model, "messages": self._messages()}
        if self.tools:
            values["tools"] = [_tool(n, tool) for n, tool in enumerate(self.tools) if not tool.hosted]
        if self.tool_choice is not None:
            values |= _tool_choice(self.tool_choice)
        return chat_request(values | more)

    @property
    def passed_over(self) -> list[str]:
        return [f"tools.{n}.{tool.type}" for n, tool in enumerate(self.tools or ()) if tool.hosted]

    def _messages(self) -> list[dict[str, Any]]:
        parts = [_part(block, f"system.{i}") for i, block in enumerate(self.system or ()) if isinstance(block, dict)]
        system = self.system if isinstance(self.system, str) else parts
        found: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        for number, message in enumerate(self.messages):
            found += _converted(message, f"messages.{number}.content")
        if self.cache_control is not None:  # of the whole request
            found[-1]["cache_control"] = self.cache_control
        return found


_UnusedFields: Any = accepted("_UnusedMessagesFields", "metadata", "service_tier", "inference_geo", "speed")


class MessagesRequest(CountRequest, _UnusedFields):
    max_tokens: int
    stream: bool | None = False
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    forerun: ForerunOptions | None = None
    container: None = None

    def to_chat(self) -> ChatRequest:
        more: dict[str, Any] = {name: getattr(self, name) for name in ("max_tokens", "temperature", "top_p", "top_k")}
        more |= {"stream": bool(self.stream), "stop": self.stop_sequences or None, "forerun": self.forerun}
        more["response_format"] = _response_format(self.output_format or (self.output_config or {}).get("format"))
        if self.stream:
            more["stream_options"] = {"include_usage": True}
        return self.chat(**more)


def _response_format(given: Any) -> dict[str, Any] | None:
    if given is None:
        return None
    if not isinstance(given, dict) or given.get("type") != "json_schema":
        hint = "give {'type': 'json_schema', 'schema': ...}"
        raise BadRequest("the output's format is not of type json_schema", hint)
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": given.get("schema")}}


def _tool(number: int, tool: AnthropicTool) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        hint = "describe it as a tool of your own, with an input_schema"
        raise BadRequest(f"tools.{number} is {tool.type!r:.60}, a tool of Anthropic's models", hint)
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    made = {name: value for name, value in (function | {"strict": tool.strict}).items() if value is not None}
    return {"type": "function", "function": made} | _marked(tool.model_dump())


def _tool_choice(choice: AnthropicToolChoice) -> dict[str, Any]:
    if choice.type == "tool":
        if choice.name is None:
            raise BadRequest("tool_choice of type tool has no name", "name a tool")
        found: Any = {"type": "function", "function": {"name": choice.name}}
    else:
        found = {"any": "required"}.get(choice.type, choice.type)
    parallel = None if choice.disable_parallel_tool_use is None else not choice.disable_parallel_tool_use
    return {"tool_choice": found, "parallel_tool_calls": parallel}


def _converted(message: AnthropicMessage, place: str) -> list[dict[str, Any]]:
    """A message as chat messages: results of tools are messages of their own, before the text beside them."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    parts, calls, results, mark = list[dict[str, Any]](), [], [], dict[str, Any]()
    for number, block in enumerate(message.content):
        kind, where = block.get("type"), f"{place}.{number}"
        if kind == "tool_use" and message.role == "assistant":
            arguments = json.dumps(block.get("input", {}), ensure_ascii=False)
            calls.append(call_object(block.get("id"), block.get("name"), arguments))
            mark = _marked(block)
        elif kind == "tool_result" and message.role == "user":
            text = joined_text(block.get("content"), f"{where}.content", ("text",))
            result = f"Error: {text}" if block.get("is_error") else text
            entry = {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result}
            results.append(entry | _marked(block))
        elif kind not in _THINKING:
            parts.append(_part(block, where))
    found: list[dict[str, Any]] = list(results)
    if parts or calls or not results:
        found.append({"role": message.role, "content": parts} | ({"tool_calls": calls} if calls else {}) | mark)
    return found


def _part(block: dict[str, Any], place: str) -> dict[str, Any]:
    return {"type": "text", "text": joined_text([_document(block)], place, ("text",))} | _marked(block)


def _marked(block: dict[str, Any]) -> dict[str, Any]:
    return {"cache_control": block["cache_control"]} if block.get("cache_control") else {}


def _document(block: dict[str, Any]) -> dict[str, Any]:
    """A document of plain text as a block of text; other blocks as they are."""
    source = block.get("source")
    if block.get("type") == "document" and isinstance(source, dict) and source.get("type") == "text":
        return {"type": "text", "text": source.get("data")}
    return block


class MessagesFormat(NamedEvents):
    """One response."""

    ping = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, model: str) -> None:
        self.id, self.model = f"msg_{uuid.uuid4().hex[:24]}", model
        self._index, self._open = -1, ""  # the current block, and its kind
        self._calls: set[int] = set()
        self._reason: tuple[str, str | None] = ("end_turn", None)

    def response(self, chat: dict[str, Any]) -> dict[str, Any]:
        choice = chat["choices"][0]
        message, blocks = choice["message"], list[dict[str, Any]]()
        if message["content"]:
            blocks.append({"type": "text", "text": message["content"]})
        for call in message.get("tool_calls", ()):
            name, given = call["function"]["name"], _input(call["function"]["arguments"])
            blocks.append({"type": "tool_use", "id": call["id"], "name": name, "input": given})
        reason, sequence = _stop_reason(choice)
        whole = self._message(blocks) | {"stop_reason": reason, "stop_sequence": sequence}
        own = {"forerun": chat["forerun"]} if "forerun" in chat else {}
        return whole | {"usage": self._usage(chat["usage"])} | own

    def begin(self, prompt_tokens: int) -> list[dict[str, Any]]:
        usage = {"input_tokens": prompt_tokens, "output_tokens": 0}
        usage |= {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
        return [{"type": "message_start", "message": self._message([]) | {"usage": usage}}]

    def events(self, chunk: dict[str, Any]) -> list[dict[str, Any]]:
        # Anthropic's clients pass over events that they do not know
        found: list[dict[str, Any]] = [{"type": "forerun"} | chunk["forerun"]] if "forerun" in chunk else []
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if delta.get("content"):
                found += self._start("text", {"type": "text", "text": ""}) if self._open != "text" else []
                found.append(self._delta({"type": "text_delta", "text": delta["content"]}))
            for call in delta.get("tool_calls", ()):
                found += self._call(call)
            if choice["finish_reason"] is not None:
                self._reason = _stop_reason(choice)
                found += self._stop()
        if "usage" in chunk:
            reason = {"stop_reason": self._reason[0], "stop_sequence": self._reason[1]}
            found.append({"type": "message_delta", "delta": reason, "usage": self._usage(chunk["usage"])})
            found.append({"type": "message_stop"})
        return found

    def error_event(self, failure: ApiError) -> dict[str, Any]:
        return failure.anthropic_body

    def _call(self, call: dict[str, Any]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        if call["index"] not in self._calls:
            self._calls.add(call["index"])
            block = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}
            found += self._start("tool_use", block)
        if call["function"]["arguments"]:
            delta = {"type": "input_json_delta", "partial_json": call["function"]["arguments"]}
            found.append(self._delta(delta))
        return found

    def _start(self, kind: str, block: dict[str, Any]) -> list[dict[str, Any]]:
        before = self._stop()
        self._index, self._open = self._index + 1, kind
        return [*before, {"type": "content_block_start", "index": self._index, "content_block": block}]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _stop(self) -> list[dict[str, Any]]:
        was, self._open = self._open, ""
        return [{"type": "content_block_stop", "index": self._index}] if was else []

    def _message(self, blocks: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": blocks}
        return head | {"stop_reason": None, "stop_sequence": None}

    def _usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The three kinds of input tokens add up to the prompt."""
        details = usage["prompt_tokens_details"]
        read, written = details["cached_tokens"], details["cache_write_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - read - written,
            "cache_creation_input_tokens": written,
            "cache_read_input_tokens": read,
            "output_tokens": usage["completion_tokens"],
        }


def _stop_reason(choice: dict[str, Any]) -> tuple[str, str | None]:
    sequence = choice.get("stop_reason")
    if isinstance(sequence, str) and choice["finish_reason"] == "stop":
        return "stop_sequence", sequence
    return _STOP_REASONS.get(choice["finish_reason"], "end_turn"), None


def _input(arguments: str) -> Any:
    """Arguments as an object; text that is no JSON object, of an unconstrained model, under `raw`."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"raw": arguments}
