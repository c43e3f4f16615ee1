"""A middleware that reports the end of every request once, with its final status.

The status is the one that was sent, or, of a stream that failed or was left later, the one its `CompletionResponse`
holds: that object is in the scope's state.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

if TYPE_CHECKING:
    from forerun.serve.response import CompletionResponse


class RequestObserver(ABC):
    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    def observes(self, scope: Scope) -> bool:
        return scope["type"] == "http"

    @abstractmethod
    def on_end(self, scope: Scope, status: int, arrived: float, response: CompletionResponse | None) -> None:
        """`arrived`: by `time.perf_counter`."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self.observes(scope):
            await self.app(scope, receive, send)
            return
        state, arrived, sent = scope.setdefault("state", {}), time.perf_counter(), 500  # where nothing is sent

        async def send_noting_status(message: Message) -> None:
            nonlocal sent
            if message["type"] == "http.response.start":
                sent = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, send_noting_status)
        finally:
            response = state.get("response")
            self.on_end(scope, sent if response is None else response.status_code, arrived, response)
