"""What became of a request: a middleware that tells its heirs once, whatever happened.

The status that was sent, or what became of an answer after that: whoever sends one leaves it in the scope's state.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

if TYPE_CHECKING:
    from forerun.serve.answer import Answer


class Outcome(ABC):
    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    def wanted(self, scope: Scope) -> bool:
        return scope["type"] == "http"

    @abstractmethod
    def ended(self, scope: Scope, status: int, arrived: float, answer: Answer | None) -> None:
        """`arrived`: when, by `time.perf_counter`."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self.wanted(scope):
            await self.app(scope, receive, send)
            return
        state, arrived, sent = scope.setdefault("state", {}), time.perf_counter(), 500  # nothing sent: an error comes

        async def noted(message: Message) -> None:
            nonlocal sent
            if message["type"] == "http.response.start":
                sent = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, noted)
        finally:
            answer = state.get("answer")
            self.ended(scope, sent if answer is None else answer.status_code, arrived, answer)
