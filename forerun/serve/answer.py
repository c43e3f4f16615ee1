"""One request from its place in the queue to its last byte: as one object, or as server-sent events.

The engine steps in a thread of its own; here its events are waited for, put into words and sent. A client that goes
away, or a request that takes too long, is cancelled, which frees its pages in the next step.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Coroutine
from contextlib import aclosing, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from forerun.core import SamplingParams, Usage
from forerun.decode.drafter_pool import AUTO_FREE_DRAFTERS
from forerun.engine.sequence import Event, Request
from forerun.llm import LLM
from forerun.serve.config import ServeConfig
from forerun.serve.errors import ApiError
from forerun.serve.format import Collected, Format
from forerun.serve.gate import Gate
from forerun.serve.keys import Key
from forerun.serve.metrics import Metrics
from forerun.serve.schema import ChatRequest, CompletionRequest
from forerun.serve.sessions import Sessions, Turn
from forerun.serve.tools import Chat, ToolUse

log = logging.getLogger("forerun.serve")

LAST_WORD_S = 2.0
GONE = 499  # nobody is there to read it; for logs and metrics
_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class ClientGone(Exception):
    """Whoever asked has closed the connection."""


@dataclass(frozen=True)
class Service:
    """What all requests of a server share."""

    llm: LLM
    config: ServeConfig
    gate: Gate
    metrics: Metrics
    sessions: Sessions

    @property
    def context(self) -> int:
        """Most tokens of a prompt and its answer."""
        engine = self.llm.engine.config
        return min(self.config.max_model_len or engine.max_model_len, engine.max_model_len, engine.capacity)

    def prepare(self, prompt: Any, asked: ChatRequest | CompletionRequest, tools: ToolUse | None) -> Request:
        """Encode a prompt, check the request and pack it, each once; raises where something is wrong. May take long: it
        runs in a worker thread, and the event loop only queues what it returns."""
        turn = isinstance(prompt, Turn)
        ids = prompt.encode(self.llm.tokenizer) if turn or isinstance(prompt, Chat) else self.llm.encode(prompt)
        if len(ids) >= self.context:
            message = f"the prompt has {len(ids)} tokens, the context holds {self.context} with the answer"
            raise ApiError(400, message, "shorten the prompt", code="context_length_exceeded")
        params = asked.params(self.context - len(ids), tools, self.llm.tokenizer.encode)
        self._check_drafters(params)
        return self.llm.request(ids, params, prompt.session_name if turn else None)

    def _check_drafters(self, params: SamplingParams) -> None:
        """Free ones are made in no time; others may be timed or searched for, while everybody would wait."""
        drafter_pool = self.llm.engine.speculator.drafter_pool
        names = drafter_pool.names(params)
        if params.prediction and "copy" not in names:
            hint = "leave forerun.speculate as it is, or leave prediction out"
            raise ApiError(400, "prediction is what the drafter copy guesses from, and it is off", hint)
        for name in names:
            if name not in AUTO_FREE_DRAFTERS and not drafter_pool.ready(SamplingParams(speculate=name)):
                hint = "use auto or off, or have the server started with --drafter"
                raise ApiError(400, f"this server has not prepared the drafter {name}", hint)

    def warm_up(self) -> None:
        """Make what requests may name, before anybody waits."""
        for name in ("auto", *self.config.drafters):
            self.llm.prepare(SamplingParams(speculate=name))


class Answer(Response):
    """The response to one request; all the work happens while it is sent."""

    def __init__(
        self,
        service: Service,
        asked: ChatRequest | CompletionRequest,
        prompts: list[Any],
        form: Format,
        key: Key | None,
        tools: ToolUse | None = None,
    ) -> None:
        self.service, self.asked, self.prompts, self.form, self.key = service, asked, prompts, form, key
        self.status_code, self.background = 200, None
        self.tools = tools
        self.turn = prompts[0] if isinstance(prompts[0], Turn) else None
        self.params: SamplingParams | None = None  # of the first prompt, once it was checked
        self.collected: list[Collected] = []  # one for each answer, once there is room for them
        self.usage = Usage()
        self.session: dict[str, Any] | None = None  # what the client is told of it
        self._arrived = time.perf_counter()
        self.submitted: float | None = None  # when the engine got it
        self._streaming = False  # the first byte of a stream is out: errors come as events from here on
        self._spoke = self._showed = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, self._send = self.service, send
        if service.config.log_prompts:
            log.info("%s prompts %r", self.form.id, self.prompts)
        try:
            answers = self.asked.choices * len(self.prompts)
            with service.gate.enter(answers, self.key):
                self.collected = [Collected() for _ in range(answers)]
                async with asyncio.timeout(service.config.max_request_s):
                    await unless_gone(receive, self._answer())
            if not self._streaming:
                body = self.form.whole(self.collected, self.usage, bool(self.asked.forerun.statistics), self.session)
                await JSONResponse(body, headers={"x-request-id": self.form.id})(scope, receive, send)
        except ClientGone:
            self.status_code = GONE
        except Exception as error:
            failure = ApiError.of(error)
            self.status_code = failure.status
            if failure.status == 500:  # the words of an unexpected error may be somebody's prompt
                log.error("%s failed: %s", self.form.id, type(error).__name__, exc_info=service.config.log_prompts)
            if not self._streaming:
                raise failure from error
            with suppress(TimeoutError):  # whoever does not read is not waited for
                async with asyncio.timeout(LAST_WORD_S):
                    await self._tell(failure.body)
                    await self._end()
        finally:
            scope["state"]["answer"] = self  # for those who count and trace
            self._book(scope["path"])

    async def _answer(self) -> None:
        """Run all prompts, and send what comes where a stream was asked for."""
        async with self.turn or nullcontext():
            await self._run_all()
            self.session = None if self.turn is None else self.turn.record(self.usage)
        if self.asked.stream:
            statistics = bool(self.asked.forerun.statistics)
            await self._tell(self.form.closing(self.usage, self.asked.include_usage, statistics, self.session))
            await self._end("[DONE]")

    async def _run_all(self) -> None:
        prepare = self.service.prepare
        requests = [await asyncio.to_thread(prepare, prompt, self.asked, self.tools) for prompt in self.prompts]
        self.params = requests[0].params
        self.submitted = max(request.arrived for request in requests)
        if self.asked.stream:
            await self._begin()
        try:
            async with asyncio.TaskGroup() as group:
                for number, request in enumerate(requests):
                    group.create_task(self._run(number, request))
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None

    async def _run(self, number: int, request: Request) -> None:
        told = self.turn.stream(request) if self.turn is not None else self.service.llm.astream(request)
        async with aclosing(told) as events:  # type: ignore[type-var]
            async for event in events:
                index = number * request.params.n + event.index
                if event.finish_reason == "cancelled":
                    raise ApiError(503, "the server shut down before the answer was complete", "ask again")
                for chunk in self._take(index, event):
                    await self._tell(chunk)

    def _take(self, index: int, event: Event) -> list[dict[str, Any]]:
        """Add an event to its answer; what a stream says about it."""
        answer, told = self.collected[index], []
        if self.params is not None and self.params.prefilling.mode == "provisional":
            told += self.form.provisional(index, event, answer)
        if event.provisional:
            if not self._showed:
                self._showed = True
                self.service.metrics.first_shown.observe(time.perf_counter() - self._arrived)
            answer.provisional += event.text
            answer.provisional_ids += event.token_ids
            return told
        if event.token_ids and not self._spoke:
            self._spoke = True
            self.service.metrics.ttft.observe(time.perf_counter() - self._arrived)
        answer.settle(event)
        answer.text += event.text
        answer.tokens += len(event.token_ids)
        answer.logprobs += event.logprobs
        answer.finish_reason = event.finish_reason
        if event.usage is not None:
            self._count(event.usage, first=event.index == 0)
        chunk = self.form.chunk(index, event, answer) if self._streaming else None
        if chunk is not None and self.asked.forerun.statistics == "steps":
            chunk["forerun"] = {"event": "tokens", "index": index, "tokens": answer.tokens}
        return told if chunk is None else [*told, chunk]

    def _count(self, part: Usage, first: bool) -> None:
        """Each prompt counts once, however many answers it has; times are those of the slowest."""
        self.service.metrics.answered(part)
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

    async def _begin(self) -> None:
        headers = [*_HEADERS, (b"x-request-id", self.form.id.encode())]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        self._streaming = True
        for index in range(len(self.collected)):
            await self._tell(self.form.opening(index))

    async def _tell(self, chunk: dict[str, Any] | None) -> None:
        if chunk is not None and self._streaming:
            text = json.dumps(chunk, ensure_ascii=False, separators=(",", ":"))
            await self._send({"type": "http.response.body", "body": f"data: {text}\n\n".encode(), "more_body": True})

    async def _end(self, word: str = "") -> None:
        await self._send({"type": "http.response.body", "body": f"data: {word}\n\n".encode() if word else b""})

    def _book(self, path: str) -> None:
        seconds, usage = time.perf_counter() - self._arrived, self.usage
        self.service.metrics.duration.observe(seconds)
        log.info(
            "%s %s %d key=%s prompt=%d cached=%d completion=%d seconds=%.3f",
            self.form.id, path, self.status_code, self.key.name if self.key else "-",
            usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens, seconds,
        )  # fmt: skip


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do the work, or drop it as soon as the client closes the connection; either way nothing of it goes on."""
    working, watching = asyncio.create_task(work), asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
