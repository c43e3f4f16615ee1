"""One replica: an engine with the server's own application, called with whole requests instead of a socket.

Keys, limits, hosts and origins are the front's: what arrives here was let in. Knows no Ray: its constructor's arguments
and what it yields can be pickled.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.types import Message

from forerun.errors import ForerunError
from forerun.llm import LLM
from forerun.ray.call import ReplicaCall
from forerun.serve.app import create_app
from forerun.serve.config import ServeConfig
from forerun.serve.logs import configure_logs
from forerun.serve.observer import RequestObserver
from forerun.serve.tracing import OPERATIONS, open_traces

STUCK_S = 120.0  # without an event of the engine while requests are open: longer than any step


@dataclass(frozen=True)
class ReplicaSettings:
    llm: dict[str, Any]  # keyword arguments of `LLM`
    config: ServeConfig  # of the front
    max_open: int  # answers that the front lets in, over all replicas
    log_format: str = "text"
    traces: str | None = None
    generation: int = 0  # another one replaces all replicas, one after another
    env: dict[str, str] = field(default_factory=dict)


class EngineReplica:
    def __init__(self, settings: ReplicaSettings, name: str = "") -> None:
        os.environ.update(settings.env)
        configure_logs(settings.log_format, name)
        self.name = name
        self.llm = LLM(**settings.llm)
        own = replace(settings.config, keys=None, cors_origins=(), allowed_hosts=("*",), max_queue=settings.max_open)
        self.app = create_app(self.llm, own)
        traces = open_traces(settings.traces)
        if traces is not None:
            self.app.add_middleware(RequestObserver, report=traces.record, paths=OPERATIONS)
        self._active_at = time.monotonic()  # of the last response that went on
        self._open = 0

    async def respond(self, call: ReplicaCall) -> AsyncIterator[tuple[str, list[Message]]]:
        """The messages of a response, as many at a time as there are, with this replica's name. Leaving the loop
        cancels the request."""
        sent: asyncio.Queue[Message | None] = asyncio.Queue()
        body = [{"type": "http.request", "body": call.body, "more_body": False}]
        left = asyncio.Event()

        async def receive() -> Message:
            if body:
                return body.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def run() -> None:
            try:
                await self.app(dict(call.scope) | {"asgi": {"version": "3.0"}, "root_path": ""}, receive, sent.put)
            finally:
                sent.put_nowait(None)

        self._open += 1
        self._active_at = time.monotonic()
        task = asyncio.create_task(run())
        try:
            ended = False
            while not ended:
                messages = [await sent.get()]
                while not sent.empty():
                    messages.append(sent.get_nowait())
                ended = messages[-1] is None
                self._active_at = time.monotonic()
                found = [message for message in messages if message is not None]
                if found:
                    yield self.name, found
            await task
        finally:
            self._open -= 1
            left.set()
            if not task.done():
                await asyncio.wait({task}, timeout=5)
                task.cancel()

    def check_health(self) -> None:
        """Raises where the engine can no longer answer."""
        self.llm.driver.check_open()
        if self._open and time.monotonic() - self._active_at > STUCK_S:
            raise ForerunError(f"{self._open} requests are open and none has gone on for {STUCK_S:g} s", "")

    def close(self) -> None:
        """Write what the disk tier is to keep."""
        self.llm.close()
