"""OpenAI's responses: requests to chat requests, and what `previous_response_id` continues. Knows no engine.

Reasoning items are passed over. How answers look is in `response_events`, what is stored in `response_store`.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import model_validator

from forerun.errors import BadRequest
from forerun.serve.derived import LenientModel, accepted
from forerun.serve.dialects.base import chat_request, joined_text
from forerun.serve.schema import ChatRequest, ForerunOptions
from forerun.serve.tool_schema import call_object

_TEXT_KINDS = ("input_text", "output_text", "text")
_ROLES = ("user", "assistant", "system", "developer")


class TextOptions(LenientModel):
    format: dict[str, Any] | None = None
    verbosity: Any = None


_UnusedFields: Any = accepted(
    *("_UnusedResponsesFields", "reasoning", "truncation", "user", "service_tier", "safety_identifier"),
    *("max_tool_calls", "stream_options"),
)


class ResponsesRequest(_UnusedFields):
    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = False
    store: bool | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None  # log-probabilities; what else may be named there does not occur
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    forerun: ForerunOptions | None = None
    # Refused with a value: without effect they would mislead
    background: Literal[False] | None = None
    conversation: None = None
    prompt: None = None
    metadata: dict[str, Any] | None = None  # is part of the response

    @model_validator(mode="after")
    def _can_be_returned(self) -> ResponsesRequest:
        """What is part of the response as it came has to be JSON in UTF-8 there, too."""
        returned = (self.metadata, self.tools, self.tool_choice, self.instructions, self.text and self.text.format)
        try:
            json.dumps(returned, allow_nan=False, ensure_ascii=False).encode()
        except ValueError as error:
            raise ValueError(f"a part of the request that is returned is no JSON in UTF-8: {error!s:.80}") from None
        return self

    def to_chat(self, messages: list[dict[str, Any]]) -> ChatRequest:
        """`messages`: the conversation with this request's input, without its instructions."""
        head = [{"role": "system", "content": self.instructions}] if self.instructions else []
        values: dict[str, Any] = {
            "model": self.model,
            "messages": [*head, *messages],
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stream": bool(self.stream),
            "stream_options": {"include_usage": True} if self.stream else None,
            "tools": [_tool(n, t) for n, t in enumerate(self.tools or ()) if not _passed_over(t)] or None,
            "tool_choice": _tool_choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": _response_format(self.text.format if self.text else None),
            "logprobs": True if self.top_logprobs or "message.output_text.logprobs" in (self.include or ()) else None,
            "top_logprobs": self.top_logprobs or None,
            "prompt_cache_key": self.prompt_cache_key,
            "prompt_cache_retention": self.prompt_cache_retention,
            "forerun": self.forerun,
        }
        return chat_request(values)

    @property
    def passed_over(self) -> list[str]:
        return [f"tools.{n}.{tool['type']}" for n, tool in enumerate(self.tools or ()) if _passed_over(tool)]

    def messages(self) -> list[dict[str, Any]]:
        """The input as chat messages."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        found: list[dict[str, Any]] = []
        for number, item in enumerate(self.input):
            _add_item(found, item, f"input.{number}")
        return found


def _add_item(found: list[dict[str, Any]], item: dict[str, Any], place: str) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        if item.get("role") not in _ROLES:
            raise BadRequest(f"{place} has the role {item.get('role')!r:.60}", f"known are {', '.join(_ROLES)}")
        text = joined_text(item.get("content"), f"{place}.content", _TEXT_KINDS, skipped=("refusal",))
        found.append({"role": item["role"], "content": text})
    elif kind == "function_call":
        call = call_object(item.get("call_id"), item.get("name"), item.get("arguments"))
        if not found or found[-1]["role"] != "assistant":  # calls belong to the message before them
            found.append({"role": "assistant", "content": ""})
        found[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        text = joined_text(item.get("output"), f"{place}.output", _TEXT_KINDS)
        found.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
    elif kind != "reasoning":
        hint = "send messages, function calls and their outputs"
        raise BadRequest(f"{place} is of type {kind!r:.60}", hint)


def _passed_over(tool: dict[str, Any]) -> bool:
    """Whatever is no function: OpenAI's own agent offers web search, namespaces and patches to every server."""
    return isinstance(tool.get("type"), str) and tool["type"] != "function"


def _tool(number: int, tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise BadRequest(f"tools.{number} is of type {tool.get('type')!r:.60}", "describe it as a function")
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def _tool_choice(choice: str | dict[str, Any] | None) -> Any:
    if isinstance(choice, dict):
        if choice.get("type") != "function":
            raise BadRequest(f"tool_choice is of type {choice.get('type')!r:.60}", "name a function, or use auto")
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _response_format(given: dict[str, Any] | None) -> dict[str, Any] | None:
    if given is None or given.get("type") in ("text", "json_object"):
        return given
    if given.get("type") != "json_schema":
        raise BadRequest(f"text.format is of type {given.get('type')!r:.60}", "use text, json_object or json_schema")
    names = ("name", "schema", "strict", "description")
    schema = {name: given[name] for name in names if given.get(name) is not None}
    return {"type": "json_schema", "json_schema": schema}
