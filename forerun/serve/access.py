"""Checks before a request is read: the host name it was sent to, its API key, and its body's limits in bytes and time.

Works on ASGI messages, so that no body is read without a valid key, and a body that is too large is not buffered.
"""

from __future__ import annotations

import asyncio
import re

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forerun.serve.admission import AdmissionControl
from forerun.serve.config import ServeConfig
from forerun.serve.errors import ApiError
from forerun.serve.page_api import is_page

PATHS_WITHOUT_KEY = ("/health", "/ready")  # for load balancers and supervisors
# Braces of a body, in its texts too: a message or a part of one takes the event loop 12 us, and 8 MB have room for
# 300,000. Code and JSON have about one in 30 characters: so many are 1.5 MB of text, some 400,000 tokens
MAX_OBJECTS = 50_000
# Commas of a body, in its texts too: a value takes the event loop 0.3 us, a token id among others, and 8 MB have room
# for 4,000,000. Text has about one in 60 characters; so many token ids are more than any context holds
MAX_VALUES = 500_000


class AccessMiddleware:
    def __init__(self, app: ASGIApp, config: ServeConfig, admission: AdmissionControl) -> None:
        self.app, self.config, self.admission = app, config, admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            self._check(scope)
        except ApiError as error:
            await error.response(scope["path"])(scope, receive, send)
            return
        await self.app(scope, _LimitedBody(receive, self.config).receive, send)

    def _check(self, scope: Scope) -> None:
        headers, path = Headers(scope=scope), scope["path"]
        self._check_host(headers.get("host", ""))
        scope.setdefault("state", {}).setdefault("key", None)  # a replica gets the key that its front has found
        if self.config.keys is not None and path not in PATHS_WITHOUT_KEY and not is_page(path):
            given = headers.get("authorization", "")
            text = given[7:].strip() if given[:7].lower() == "bearer " else headers.get("x-api-key", "").strip()
            key = self.config.keys.find(text) if text else None
            if key is None:
                hint = "send `Authorization: Bearer <key>` or `X-Api-Key: <key>` with a key of this server"
                scheme = {"WWW-Authenticate": "Bearer"}
                raise ApiError(401, "the API key is missing or wrong", hint, code="invalid_api_key", headers=scheme)
            scope["state"]["key"] = key
        if path.startswith("/v1/") and scope["method"] == "POST":
            self.admission.check_accepting()
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > self.config.max_body_bytes:
            raise ApiError(413, _too_large(self.config), "send less, or have the limit raised")

    def _check_host(self, given: str) -> None:
        """Against DNS rebinding: a page of another site can have its own name resolve to this address; the browser then
        sends that name."""
        allowed = self.config.allowed_hosts
        name = re.sub(r":\d*$", "", given.strip().lower()).strip("[]").removesuffix(".")
        if "*" not in allowed and name not in allowed and not name.endswith(".localhost"):
            hint = "use its own address, or have it started with --allowed-host"
            raise ApiError(421, f"this server is not called {given!r:.80}", hint, code="host_not_allowed")


class _LimitedBody:
    """A request's messages as they arrive, within the limits."""

    def __init__(self, receive: Receive, config: ServeConfig) -> None:
        self._receive, self._config = receive, config
        self._size, self._objects, self._values, self._complete = 0, 0, 0, False
        self._deadline = asyncio.get_running_loop().time() + config.max_body_s

    async def receive(self) -> Message:
        if self._complete:  # the next message is the client's disconnect, whenever that is
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise HTTPException(408, f"the body did not arrive within {self._config.max_body_s:g} s") from None
        if message["type"] == "http.request":
            self._size += len(message.get("body", b""))
            self._complete = not message.get("more_body", False)
            if self._size > self._config.max_body_bytes:
                raise HTTPException(413, _too_large(self._config))
            self._objects += message.get("body", b"").count(b"{")
            self._values += message.get("body", b"").count(b",")
            if self._objects > MAX_OBJECTS:
                raise HTTPException(413, f"the body has more than {MAX_OBJECTS:,} objects, the limit of this server")
            if self._values > MAX_VALUES:
                raise HTTPException(413, f"the body has more than {MAX_VALUES:,} values, the limit of this server")
        return message


def _too_large(config: ServeConfig) -> str:
    return f"the body is larger than {config.max_body_bytes:,} bytes, the limit of this server"
