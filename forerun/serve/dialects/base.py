"""How a chat response goes over the wire. The base class is OpenAI's chat form; dialects translate from it.

A wire format gets what a chat client would get, a whole response or its chunks in order, and returns what its own
clients expect. Knows no engine: everything in it was a chat completion first.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import ValidationError

from forerun.errors import BadRequest
from forerun.serve.errors import ApiError
from forerun.serve.schema import ChatRequest


class WireFormat:
    """OpenAI's chat completions: nothing changes."""

    last_frame = b"data: [DONE]\n\n"
    ping = b": keep-alive\n\n"  # a comment, which clients of server-sent events pass over

    def begin(self, prompt_tokens: int) -> list[dict[str, Any]]:
        """Events before the first chunk of a stream."""
        return []

    def events(self, chunk: dict[str, Any]) -> list[dict[str, Any]]:
        return [chunk]

    def response(self, chat: dict[str, Any]) -> dict[str, Any]:
        return chat

    def error_event(self, failure: ApiError) -> dict[str, Any]:
        """The event that ends a stream which failed."""
        return failure.body

    def frame(self, event: dict[str, Any]) -> bytes:
        return f"data: {json.dumps(event, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


class NamedEvents(WireFormat):
    """Events whose `type` is also the name of the server-sent event; there is no mark at the end."""

    last_frame = b""

    def frame(self, event: dict[str, Any]) -> bytes:
        return f"event: {event['type']}\n".encode() + super().frame(event)


def chat_request(values: dict[str, Any]) -> ChatRequest:
    """A chat request out of converted values; what does not fit is the client's mistake."""
    given = {name: value for name, value in values.items() if value is not None}
    try:
        return ChatRequest.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise BadRequest(f"{place}: {first['msg']}", "as a chat request it would not fit") from None


def joined_text(content: Any, place: str, kinds: tuple[str, ...], skipped: tuple[str, ...] = ()) -> str:
    """The text of content that is text or a list of blocks of text; blocks of `skipped` kinds are passed over."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise BadRequest(f"{place} is neither text nor a list of blocks", "give text")
    texts = []
    for number, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind in skipped:
            continue
        if kind not in kinds or not isinstance(block.get("text"), str):
            shown = kind if isinstance(kind, str) else type(block).__name__
            hint = f"the model gets text only: {', '.join(kinds)}"
            raise BadRequest(f"{place}.{number} is of type {shown!r:.60}", hint)
        texts.append(block["text"])
    return "".join(texts)
