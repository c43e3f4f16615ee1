"""One request from admission to its last byte: as one object, or as server-sent events.

The engine steps in a thread of its own; here its events are awaited, encoded and sent. A request whose client
disconnects, or that takes too long, is cancelled, which frees its pages in the next step.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing, nullcontext, suppress
from typing import Any, TypeVar

from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from forerun.core import SamplingParams, Usage
from forerun.engine.intake import check_token_ids
from forerun.engine.sequence import Client, Event, Request
from forerun.llm import LLM
from forerun.serve.config import ApiKey
from forerun.serve.context import ServerContext, prompt_texts
from forerun.serve.dialects.base import WireFormat
from forerun.serve.encoders import ChoiceState, CompletionEncoder, PromptScores, ResponseEncoder
from forerun.serve.errors import ApiError
from forerun.serve.fill import FillPrompt
from forerun.serve.prompt_logprobs import prompt_logprobs
from forerun.serve.prompt_pins import PinnedPrefix
from forerun.serve.schema import ChatRequest, CompletionRequest
from forerun.serve.sessions import SessionTurn
from forerun.serve.tools import ToolUse

log = logging.getLogger("forerun.serve")

T = TypeVar("T")

STREAM_ERROR_TIMEOUT_S = 2.0  # for a client to read the error that ends its stream
# Without a byte, after which a stream sends one that clients pass over: proxies and agents close after 30 to 60 s
KEEP_ALIVE_S = 10.0
CLIENT_CLOSED_STATUS = 499  # never sent, as the client is gone; for logs, metrics and traces
_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class ClientDisconnected(Exception):
    """The client has closed the connection."""


class CompletionResponse(Response):
    """The response to one request; all the work happens while it is sent."""

    def __init__(
        self,
        ctx: ServerContext,
        body: ChatRequest | CompletionRequest,
        prompts: list[Any],
        encoder: ResponseEncoder,
        key: ApiKey | None,
        tools: ToolUse | None = None,
        warnings: dict[str, str] | None = None,
        wire: WireFormat | None = None,
    ) -> None:
        self.ctx, self.request_body, self.prompts, self.encoder, self.key = ctx, body, prompts, encoder, key
        self.status_code, self.background = 200, None
        self.tools, self.warnings = tools, warnings or {}  # headers about what the request has in vain
        self.wire = wire or WireFormat()
        self.turn = prompts[0] if isinstance(prompts[0], SessionTurn) else None
        self.params: SamplingParams | None = None  # of the first prompt, once it was checked
        self.choices: list[ChoiceState] = []  # filled once the request is admitted
        self.usage = Usage()
        self.session: dict[str, Any] | None = None  # what the response reports about it
        self._arrived = time.perf_counter()
        self.submitted: float | None = None  # when the engine's requests were made
        self._streaming = False  # the first byte of a stream is out: errors are sent as events from here on
        self._first_token = self._first_provisional = False  # whether that was observed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ctx, self._send, self.request_id = self.ctx, send, scope["state"]["request_id"]
        if ctx.config.log_prompts:
            log.info("%s prompts %r", self.request_id, self.prompts)
        try:
            count = self.request_body.choices * len(self.prompts)
            with ctx.admission.admit(count, self.key):
                self.choices = [ChoiceState() for _ in range(count)]
                async with asyncio.timeout(ctx.config.max_request_s):
                    await unless_disconnected(receive, self._run())
            if not self._streaming:
                statistics = bool(self.request_body.forerun.statistics)
                chat = self.encoder.response(self.choices, self.usage, statistics, self.session)
                whole = self.wire.response(chat)
                await JSONResponse(whole, headers=self.warnings)(scope, receive, send)
        except ClientDisconnected:
            self.status_code = CLIENT_CLOSED_STATUS
        except Exception as error:
            await self._fail(error)
        finally:
            scope["state"]["response"] = self  # for metrics and traces
            self._log(scope["path"])

    async def _fail(self, error: Exception) -> None:
        failure = ApiError.of(error)
        self.status_code = failure.status
        if failure.status == 500:  # the message of an unexpected error may contain a prompt
            show = self.ctx.config.log_prompts
            log.error("%s failed: %s", self.request_id, type(error).__name__, exc_info=error if show else None)
        if not self._streaming:
            raise failure from error
        with suppress(TimeoutError):
            async with asyncio.timeout(STREAM_ERROR_TIMEOUT_S):
                await self._send_events([self.wire.error_event(failure)])
                await self._end_stream(b"")

    async def _run(self) -> None:
        """Run all prompts, and send events as they come where a stream was requested."""
        body = self.request_body
        for prompt in self.prompts:
            await self.ctx.check_lengths(prompt_texts(prompt))
        if isinstance(self.encoder, CompletionEncoder) and getattr(body, "echo", False):
            given = [prompt.content if isinstance(prompt, SessionTurn) else prompt for prompt in self.prompts]
            texts = await self.ctx.pool.encode(lambda check: [_text(self.ctx.llm, each, check) for each in given])
            self.encoder.echoed, self.encoder.per_prompt = tuple(texts), body.choices
        async with self.turn or nullcontext():
            await self._run_prompts()
            self.session = None if self.turn is None else self.turn.record(self.usage)
            self.ctx.metrics.unsaved_turns.inc(int((self.session or {}).get("saved") is False))
        if body.stream:
            statistics = bool(body.forerun.statistics)
            await self._send_chunk(self.encoder.last_chunk(self.usage, body.include_usage, statistics, self.session))
            await self._end_stream(self.wire.last_frame)

    async def _run_prompts(self) -> None:
        prepare = self.ctx.prepare
        requests = [await prepare(prompt, self.request_body, self.tools) for prompt in self.prompts]
        for request in requests:
            request.streamed = bool(self.request_body.stream)
            request.client = Client() if self.key is None else self.key.client
        self.params = requests[0].params
        self.submitted = max(request.arrived for request in requests)
        if isinstance(self.encoder, CompletionEncoder) and getattr(self.request_body, "scores_prompts", False):
            self.encoder.prompt_scores = [await self._score(request) for request in requests]
        for request in () if self.request_body.writes_nothing else requests:
            await self.ctx.look_ahead(request)
        pins = [] if self.turn is not None else [await self._pins(*numbered) for numbered in enumerate(requests)]
        self.encoder.pinned_tokens = sum(max((pin.tokens for pin in found), default=0) for found in pins)
        if self.request_body.stream:
            await self._begin_stream(sum(len(request.prompt_ids) for request in requests))
        keep_alive = asyncio.create_task(self._keep_alive())
        try:
            async with asyncio.TaskGroup() as group:
                for number, request in enumerate(requests):
                    group.create_task(self._run_prompt(number, request))
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None
        finally:
            keep_alive.cancel()
            await asyncio.gather(keep_alive, return_exceptions=True)  # a ping is sent whole or not at all
        for request, found in zip(requests, pins, strict=False):
            if found:
                await asyncio.to_thread(self.ctx.pins.hold, self.key, request.prompt_ids, found)

    async def _pins(self, number: int, request: Request) -> list[PinnedPrefix]:
        ids, wanted = request.prompt_ids, self.ctx.pins.wanted
        return await self.ctx.pool.encode(lambda _: wanted(self.request_body, ids, number))

    async def _score(self, request: Request) -> PromptScores:
        scores = await self.ctx.pool.score(lambda check: prompt_logprobs(self.ctx.llm, request, check))
        return PromptScores(request.prompt_ids[0], scores)

    async def _run_prompt(self, number: int, request: Request) -> None:
        if self.request_body.writes_nothing:
            stream = _nothing_written(request)
        else:
            stream = self.turn.stream(request) if self.turn is not None else self.ctx.llm.astream(request)
        async with aclosing(stream) as events:  # type: ignore[type-var]
            async for event in events:
                index = number * request.params.n + event.index
                if event.finish_reason == "cancelled":
                    raise ApiError(503, "the server shut down before the answer was complete", "ask again")
                for chunk in self._add(index, event):
                    await self._send_chunk(chunk)

    def _add(self, index: int, event: Event) -> list[dict[str, Any]]:
        """Add an event to its choice; the chunks that a stream sends for it."""
        choice, chunks = self.choices[index], []
        if self.params is not None and self.params.prefill.mode == "provisional":
            chunks += self.encoder.provisional_chunks(index, event, choice)
        if event.provisional:
            if not self._first_provisional:
                self._first_provisional = True
                self.ctx.metrics.provisional_ttft.observe(time.perf_counter() - self._arrived)
            choice.add_provisional(event)
            return chunks
        if event.token_ids and not self._first_token:
            self._first_token = True
            self.ctx.metrics.ttft.observe(time.perf_counter() - self._arrived)
        choice.add(event)
        if event.usage is not None:
            self._add_usage(event.usage, first=event.index == 0)
        chunk = self.encoder.chunk(index, event, choice) if self._streaming else None
        if chunk is not None and self.request_body.forerun.statistics == "steps":
            chunk["forerun"] = {"event": "tokens", "index": index, "tokens": choice.tokens}
        return chunks if chunk is None else [*chunks, chunk]

    def _add_usage(self, part: Usage, first: bool) -> None:
        """Each prompt counts once, however many choices it has; times are those of the slowest."""
        self.ctx.metrics.observe_answer(part)
        total = self.usage
        total.add(part)
        total.total_s = max(total.total_s, part.total_s)
        if first:
            total.prompt_tokens += part.prompt_tokens
            total.cached_tokens += part.cached_tokens
            for source, tokens in part.served.items():
                total.served[source] = total.served.get(source, 0) + tokens
            total.ttft_s, total.queued_s = max(total.ttft_s, part.ttft_s), max(total.queued_s, part.queued_s)
            total.prefill, total.provisional_s = part.prefill, part.provisional_s

    # -- bytes ---------------------------------------------------------------------------------------------------------

    async def _begin_stream(self, prompt_tokens: int) -> None:
        headers = [*_HEADERS, *((name.encode(), value.encode()) for name, value in self.warnings.items())]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        self._streaming, self._prompt_tokens = True, prompt_tokens
        await self._send_events(self.wire.begin(prompt_tokens))
        for index in range(len(self.choices)):
            await self._send_chunk(self.encoder.first_chunk(index))

    async def _send_chunk(self, chunk: dict[str, Any] | None) -> None:
        if chunk is not None and self._streaming:
            if self.request_body.counts_in_chunks and chunk["choices"]:
                done = sum(choice.tokens for choice in self.choices)
                counts = (self._prompt_tokens, done, self._prompt_tokens + done)
                chunk["usage"] = dict(zip(("prompt_tokens", "completion_tokens", "total_tokens"), counts, strict=True))
            await self._send_events(self.wire.events(chunk))

    async def _send_events(self, events: list[dict[str, Any]]) -> None:
        if events:
            await self._send_bytes(b"".join(map(self.wire.frame, events)))

    async def _send_bytes(self, data: bytes) -> None:
        self._last_sent = time.monotonic()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def _keep_alive(self) -> None:
        """While a long prompt is computed nothing else would be sent for minutes."""
        while self._streaming:
            idle_s = time.monotonic() - self._last_sent
            if idle_s >= KEEP_ALIVE_S:
                await self._send_bytes(self.wire.ping)
            await asyncio.sleep(KEEP_ALIVE_S if idle_s >= KEEP_ALIVE_S else KEEP_ALIVE_S - idle_s)

    async def _end_stream(self, last: bytes) -> None:
        await self._send({"type": "http.response.body", "body": last})

    def _log(self, path: str) -> None:
        seconds, usage = time.perf_counter() - self._arrived, self.usage
        self.ctx.metrics.duration.observe(seconds)
        fields = {
            "id": self.encoder.id,
            "key": self.key.name if self.key else "-",
            "prompt": usage.prompt_tokens,
            "cached": usage.cached_tokens,
            "completion": usage.completion_tokens,
            "seconds": round(seconds, 3),
        }
        head, text = (self.request_id, path, self.status_code), " ".join(f"{name}={fields[name]}" for name in fields)
        names = dict(zip(("request_id", "path", "status"), head, strict=True))
        log.info("%s %s %d %s", *head, text, extra={"fields": names | fields})


def _text(llm: LLM, prompt: Any, check_cancelled: Callable[[], None]) -> str:
    check_cancelled()
    if isinstance(prompt, FillPrompt):
        return prompt.prefix
    if isinstance(prompt, str):
        return prompt
    check_token_ids(prompt, llm.config.vocab_size)  # the request is checked later
    return llm.tokenizer.decode(prompt, skip_special=False)


async def _nothing_written(request: Request) -> AsyncIterator[Event]:
    """The ends of answers without tokens."""
    for index in range(request.params.n):
        yield Event(0, index, finish_reason="length", usage=Usage(prompt_tokens=len(request.prompt_ids)))


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What a coroutine returns; cancels it as soon as the client closes the connection; no task is left running."""
    working, watching = asyncio.create_task(work), asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnected
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
