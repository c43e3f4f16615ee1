"""The ids that requests have in headers, logs and traces, and the log's lines of those that were refused.

A request's id is the client's `X-Request-Id` where it sends a plain one, else made here. It is in the headers of every
response, in the log and in traces.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger("forerun.serve")

MAX_PATH_CHARS = 120  # of a path that may be anything
REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


class RequestIdMiddleware:
    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = headers["request-id"] = request_id  # the second is Anthropic's name
            await send(message)

        await self.app(scope, receive, send_named)


def log_refusal(scope: Scope, status: int, arrived: float, response: object | None) -> None:
    """A line for a request that ended with an error before an answer was begun; answers log themselves."""
    if response is None and status >= 400:
        seconds, path = round(time.perf_counter() - arrived, 3), quote(scope["path"][:MAX_PATH_CHARS])  # on one line
        fields = {"request_id": scope["state"]["request_id"], "path": path, "status": status, "seconds": seconds}
        log.info("%s %s %d seconds=%s", *fields.values(), extra={"fields": fields})
