"""A middleware that reports the end of every request once, with its final status.

The status is the one that was sent, or, of a stream that failed or was left later, the one its `CompletionResponse`
holds: that object is in the scope's state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

if TYPE_CHECKING:
    from forerun.serve.response import CompletionResponse


class RequestObserver:
    """`report` gets the scope, the status, when the request arrived by `time.perf_counter`, and what answered it, if
    something did. `paths`: of requests that are reported; None: all."""

    def __init__(
        self,
        app: ASGIApp,
        report: Callable[[Scope, int, float, CompletionResponse | None], None],
        paths: Container[str] | None = None,
    ) -> None:
        self.app, self.report, self.paths = app, report, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (self.paths is not None and scope["path"] not in self.paths):
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
            self.report(scope, sent if response is None else response.status_code, arrived, response)
