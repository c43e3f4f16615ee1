"""Chat responses in the form of OpenAI's responses: an object with output items, or its stream of numbered events."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any

from forerun.serve.dialects.base import NamedEvents
from forerun.serve.dialects.responses import ResponsesRequest
from forerun.serve.errors import ApiError
from forerun.serve.tool_schema import call_object

_REPEATED = ("instructions", "max_output_tokens", "temperature", "top_p", "previous_response_id")


class ResponsesFormat(NamedEvents):
    """One response. `on_complete` gets it, and its answer as a chat message, once it is whole."""

    def __init__(
        self, model: str, body: ResponsesRequest, on_complete: Callable[[dict[str, Any], dict[str, Any]], None]
    ) -> None:
        self._body, self._on_complete = body, on_complete
        self._number = 0  # of the next event
        self._items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None  # the item that is being written
        self._calls: dict[int, dict[str, Any]] = {}
        self._reason: str | None = None
        self._head: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "error": None,
            "incomplete_details": None,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "store": body.store is not False,
            "text": {"format": (body.text.format if body.text else None) or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "truncation": "disabled",
        } | {name: getattr(body, name) for name in _REPEATED}

    def response(self, chat: dict[str, Any]) -> dict[str, Any]:
        choice = chat["choices"][0]
        self._reason = choice["finish_reason"]
        message = choice["message"]
        if message["content"]:
            self._items.append(_message_item(message["content"], self._status, _entries(choice)))
        for call in message.get("tool_calls", ()):
            self._items.append(_call_item(call["id"], call["function"], self._status))
        whole = self._complete(chat["usage"])
        return whole | {"forerun": chat["forerun"]} if "forerun" in chat else whole

    def begin(self, prompt_tokens: int) -> list[dict[str, Any]]:
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=self._object("in_progress", None)) for kind in kinds]

    def events(self, chunk: dict[str, Any]) -> list[dict[str, Any]]:
        found = [self._event("forerun", **chunk["forerun"])] if "forerun" in chunk else []
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if delta.get("content"):
                found += self._add_text(delta["content"], _entries(choice))
            for call in delta.get("tool_calls", ()):
                found += self._add_call(call)
            if choice["finish_reason"] is not None:
                self._reason = choice["finish_reason"]
                found += self._close()
        if "usage" in chunk:
            whole = self._complete(chunk["usage"])
            found.append(self._event(f"response.{whole['status']}", response=whole))
        return found

    def error_event(self, failure: ApiError) -> dict[str, Any]:
        error = failure.body["error"]
        return self._event("error", code=error["code"], message=error["message"], param=error["param"])

    # -- items ---------------------------------------------------------------------------------------------------------

    def _add_text(self, text: str, logprobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        if self._open is None or self._open["type"] != "message":
            found += self._close()
            found.append(self._begin_item(_message_item("", "in_progress") | {"content": []}))
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            empty = part | {"logprobs": []}
            found.append(self._item_event("response.content_part.added", content_index=0, part=empty))
            self._items[-1]["content"] = [part]
        self._items[-1]["content"][0]["text"] += text
        self._items[-1]["content"][0]["logprobs"] += logprobs
        return [*found, self._item_event("response.output_text.delta", content_index=0, delta=text, logprobs=logprobs)]

    def _add_call(self, call: dict[str, Any]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        if call["index"] not in self._calls:
            found += self._close()
            item = _call_item(call["id"], call["function"] | {"arguments": ""}, "in_progress")
            found.append(self._begin_item(item))
            self._calls[call["index"]] = self._items[-1]
        if text := call["function"]["arguments"]:
            self._calls[call["index"]]["arguments"] += text
            found.append(self._item_event("response.function_call_arguments.delta", delta=text))
        return found

    def _begin_item(self, item: dict[str, Any]) -> dict[str, Any]:
        self._items.append(item)
        self._open = item
        return self._event("response.output_item.added", output_index=len(self._items) - 1, item=dict(item))

    def _close(self) -> list[dict[str, Any]]:
        """The events that end the item that is being written."""
        item, found = self._open, list[dict[str, Any]]()
        if item is None:
            return []
        item["status"] = self._status
        if item["type"] == "message":
            part = item["content"][0]
            done = self._item_event(
                "response.output_text.done", content_index=0, text=part["text"], logprobs=part["logprobs"]
            )
            found += [done, self._item_event("response.content_part.done", content_index=0, part=part)]
        else:
            more = {"arguments": item["arguments"], "name": item["name"]}
            found.append(self._item_event("response.function_call_arguments.done", **more))
        found.append(self._event("response.output_item.done", output_index=len(self._items) - 1, item=item))
        self._open = None
        return found

    def _item_event(self, kind: str, **more: Any) -> dict[str, Any]:
        return self._event(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **more)

    def _event(self, kind: str, **more: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1} | more

    # -- the whole -----------------------------------------------------------------------------------------------------

    @property
    def _status(self) -> str:
        return "incomplete" if self._reason == "length" else "completed"

    def _object(self, status: str, usage: dict[str, Any] | None) -> dict[str, Any]:
        cut_off = {"incomplete_details": {"reason": "max_output_tokens"}} if status == "incomplete" else {}
        return self._head | cut_off | {"status": status, "output": list(self._items), "usage": usage}

    def _complete(self, usage: dict[str, Any]) -> dict[str, Any]:
        details = usage["prompt_tokens_details"]
        counts = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {name: details[name] for name in ("cached_tokens", "cache_write_tokens")},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
        whole = self._object(self._status, counts)
        self._on_complete(whole, self._answer())
        return whole

    def _answer(self) -> dict[str, Any]:
        """As a chat message, for the request that continues it."""
        texts = [item["content"][0]["text"] for item in self._items if item["type"] == "message"]
        written = [item for item in self._items if item["type"] == "function_call"]
        calls = [call_object(item["call_id"], item["name"], item["arguments"]) for item in written]
        message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
        return message | {"tool_calls": calls} if calls else message


def _entries(choice: dict[str, Any]) -> list[dict[str, Any]]:
    return list((choice["logprobs"] or {}).get("content") or ())


def _message_item(text: str, status: str, logprobs: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}
    head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant"}
    return head | {"status": status, "content": [part]}


def _call_item(call_id: str, function: dict[str, Any], status: str) -> dict[str, Any]:
    head = {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "call_id": call_id, "status": status}
    return head | {"name": function["name"], "arguments": function["arguments"]}
