"""What a trace is replayed against: the library in this process, or any OpenAI endpoint.

A target streams one chat and yields (seconds, tokens) as they arrive, then what usage says. Knows no trace.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

from forerun.errors import BadRequest, ForerunError

Messages = list[dict[str, Any]]

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 900.0  # beyond the 600 s that our server gives a request: one that never answers ends, too


@dataclass
class ReplayedAnswer:
    """One answer as it came. Times are those of `time.perf_counter`."""

    number: int  # of its request in the trace
    sent: float = 0.0
    token_times: list[float] = field(default_factory=list)  # of every event that brought tokens
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    error: str = ""

    @property
    def first_s(self) -> float:
        return self.token_times[0] - self.sent

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)]


class LoadTarget(Protocol):
    async def ask(self, answer: ReplayedAnswer, messages: Messages, max_tokens: int, key: str | None) -> None:
        """Stream one answer, written into `answer` as it comes; an error is written there, too."""
        ...


class LibraryTarget:
    """An `LLM`; keys of a trace are its clients. `encode`: from messages to token ids."""

    def __init__(
        self, llm: Any, encode: Callable[[Messages], list[int]] | None = None, speculation: str = "auto"
    ) -> None:
        self._llm, self._encode, self._speculation = llm, encode or llm.encode, speculation

    async def ask(self, answer: ReplayedAnswer, messages: Messages, max_tokens: int, key: str | None) -> None:
        from forerun import SamplingParams
        from forerun.engine.sequence import Client

        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, speculation=self._speculation)
        answer.sent = time.perf_counter()
        try:
            request = await asyncio.to_thread(lambda: self._llm.request(self._encode(messages), params))
            request.streamed, request.client = True, Client(key or "")
            async for event in self._llm.astream(request):
                if event.token_ids:
                    answer.token_times.append(time.perf_counter())
                answer.text += event.text
                if event.usage is not None:
                    usage = event.usage
                    answer.prompt_tokens, answer.cached_tokens = usage.prompt_tokens, usage.cached_tokens
                    answer.completion_tokens = usage.completion_tokens
        except ForerunError as error:
            answer.error = str(error)


class EndpointTarget:
    """`base_url` of an OpenAI endpoint, with /v1; keys of a trace are looked up in `api_keys`."""

    def __init__(
        self, base_url: str, model: str, api_keys: dict[str, str], api_key: str = "none", speculation: str = "auto"
    ) -> None:
        try:
            parts = urlsplit(base_url)
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if not host or parts.scheme not in ("http", "https"):
            raise BadRequest(f"--url is {base_url!r:.100}", "give one such as http://127.0.0.1:8000/v1")
        self._host, self._tls = host, parts.scheme == "https"
        self._port = port or (443 if self._tls else 80)
        self._path = parts.path.rstrip("/") + "/chat/completions"
        self._model, self._api_keys, self._api_key = model, api_keys, api_key
        self._own = {} if speculation == "auto" else {"forerun": {"speculation": speculation}}  # of our servers only

    async def check(self) -> None:
        """That something listens there: a replay against nothing would take as long as its trace."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                (await asyncio.open_connection(self._host, self._port))[1].close()
        except (OSError, UnicodeError) as error:
            why = str(error) or f"no answer within {CONNECT_TIMEOUT_S:g} s"
            hint = "start the server first, and check its address"
            raise BadRequest(f"nothing answers at {self._host} port {self._port}: {why}", hint) from None

    async def ask(self, answer: ReplayedAnswer, messages: Messages, max_tokens: int, key: str | None) -> None:
        answer.sent = time.perf_counter()
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await self._stream(answer, self._http(messages, max_tokens, key))
        except TimeoutError:
            answer.error = f"not ended after {ANSWER_TIMEOUT_S:g} s"
        except (OSError, ValueError, EOFError, asyncio.LimitOverrunError) as error:
            answer.error = str(error) or type(error).__name__
        except (LookupError, TypeError, AttributeError) as error:
            answer.error = f"what came is no answer of an OpenAI endpoint: {type(error).__name__}: {error}"

    async def _stream(self, answer: ReplayedAnswer, request: bytes) -> None:
        context = ssl.create_default_context() if self._tls else None
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=context)
        try:
            writer.write(request)
            async for event in _events(reader):
                self._add(answer, event)
        finally:
            writer.close()

    def _http(self, messages: Messages, max_tokens: int, key: str | None) -> bytes:
        asked = {
            "model": self._model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        body = json.dumps(asked | self._own).encode()
        secret = self._api_keys.get(key or "", self._api_key)
        head = [
            f"POST {self._path} HTTP/1.1",
            f"Host: {self._host}",
            f"Authorization: Bearer {secret}",
            "Content-Type: application/json",
            "Connection: close",
            f"Content-Length: {len(body)}",
        ]
        return "\r\n".join(head).encode() + b"\r\n\r\n" + body

    @staticmethod
    def _add(answer: ReplayedAnswer, event: dict[str, Any]) -> None:
        if "error" in event:
            raise ValueError(str(event["error"])[:200])
        for choice in event.get("choices", ()):
            text = choice.get("delta", {}).get("content") or ""
            if text:
                answer.token_times.append(time.perf_counter())
                answer.text += text
        if usage := event.get("usage"):
            answer.prompt_tokens, answer.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
            answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """Server-sent events of a response, as JSON, each as soon as it is there."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    status, chunked = head.split(" ", 2)[1], "transfer-encoding: chunked" in head.lower()
    if status != "200":
        raise ValueError(f"HTTP {status}: {(await reader.read(2000)).decode(errors='replace')[:200]}")
    left = b""
    while piece := await _piece(reader, chunked):
        *lines, left = (left + piece).split(b"\n")
        for line in lines:
            data = line.strip().removeprefix(b"data:").strip()
            if line.startswith(b"data:") and data != b"[DONE]":
                yield json.loads(data)


async def _piece(reader: asyncio.StreamReader, chunked: bool) -> bytes:
    if not chunked:
        return await reader.read(65536)
    size = int((await reader.readuntil(b"\r\n")).split(b";")[0], 16)
    piece = await reader.readexactly(size)
    await reader.readexactly(2)
    return piece
