"""The front of several replicas: one application that checks, counts and forwards requests. Knows no Ray and no model.

Keys, hosts, sizes and limits are checked here once for all replicas, as one process checks them; then a request goes to
the replica that its text, session or stored response belongs to, and what that replica sends goes to the client. A
request whose replica is lost before its response began is sent to another one; a stream that had begun ends with an
error, and so does a turn of a session, which may have ended already.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any, Protocol

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import Message, Receive, Scope, Send

import forerun
from forerun.ray.call import ReplicaCall, get_call, replica_call
from forerun.ray.metrics import FrontMetrics, merged_metrics
from forerun.serve.admission import AdmissionControl
from forerun.serve.app import add_error_handlers, add_middleware
from forerun.serve.config import ServeConfig
from forerun.serve.dialects.base import NamedEvents, WireFormat
from forerun.serve.errors import ApiError
from forerun.serve.response import ClientDisconnected, unless_disconnected

log = logging.getLogger("forerun.serve")

MAX_TRIES = 3  # replicas that a request is sent to, where one after the other is lost
TIMEOUT_MARGIN_S = 5.0  # beyond the request's own limit, which its replica enforces
GATHER_TIMEOUT_S = 5.0  # for what all replicas are asked


class ReplicaLost(Exception):
    """The replica of a request ended before its response did."""


class Replicas(Protocol):
    """How the front reaches replicas."""

    def names(self) -> list[str]:
        """Those that requests may be sent to now, in a fixed order."""

    def stream(self, call: ReplicaCall) -> AsyncIterator[tuple[str, list[Message]]]:
        """The response of the replica that the call belongs to, with its name; raises `ReplicaLost`."""


def create_front(replicas: Replicas, config: ServeConfig, admission: AdmissionControl) -> FastAPI:
    """`admission`: over all replicas."""
    metrics = FrontMetrics(replicas.names, admission)
    forwarder = Forwarder(replicas, config, admission)
    app = FastAPI(title="Forerun", version=forerun.__version__, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.admission = admission
    add_error_handlers(app)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> JSONResponse:
        status = "draining" if admission.draining else "ready" if replicas.names() else "no replica"
        return JSONResponse({"status": status}, 200 if status == "ready" else 503)

    app.head("/health")(health)
    app.head("/ready")(ready)

    @app.get("/metrics")
    async def all_metrics() -> Response:
        """Of the front and of all replicas, each with its name as label."""
        texts = {"front": metrics.text()} | await forwarder.gather(get_call("/metrics"))
        return Response(merged_metrics(texts), media_type=CONTENT_TYPE_LATEST)

    app.mount("/", forwarder)
    add_middleware(app, config, admission, metrics.count_request)
    return app


class Forwarder:
    """The application below the checks."""

    def __init__(self, replicas: Replicas, config: ServeConfig, admission: AdmissionControl) -> None:
        self.replicas, self.config, self.admission = replicas, config, admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = replica_call(dict(scope) | {"headers": _headers(scope)}, await _body(receive))
        if scope["path"] == "/forerun/sessions" and scope["method"] == "GET":
            await self._list_sessions(call, scope, receive, send)
            return
        response = _ForwardedResponse(self.replicas, call, send)
        scope["state"]["forwarded"] = True
        try:
            async with asyncio.timeout(self.config.max_request_s + TIMEOUT_MARGIN_S):
                if call.answers:
                    with self.admission.admit(call.answers, scope["state"]["key"]):
                        await unless_disconnected(receive, response.run())
                else:
                    await unless_disconnected(receive, response.run())
        except ClientDisconnected:
            if not response.begun:  # nothing was sent: with its status it is no failure of ours in the log
                raise
        except Exception as error:
            scope["state"]["forwarded"] = False
            await response.fail(error)

    async def _list_sessions(self, call: ReplicaCall, scope: Scope, receive: Receive, send: Send) -> None:
        found: dict[str, Any] = {}
        for body in (await self.gather(call)).values():
            found |= {entry["name"]: entry for entry in json.loads(body)["data"]}
        listed = {"object": "list", "data": [found[name] for name in sorted(found)]}
        await JSONResponse(listed)(scope, receive, send)

    async def gather(self, call: ReplicaCall) -> dict[str, bytes]:
        """What each replica answers, by its name; one that does not in time is left out."""

        async def ask(name: str) -> tuple[str, bytes]:
            status, body = 0, b""
            try:
                async with asyncio.timeout(GATHER_TIMEOUT_S):
                    async for _, messages in self.replicas.stream(call.to(name)):
                        for message in messages:
                            status = message.get("status", status)
                            body += message.get("body", b"")
            except (TimeoutError, ReplicaLost):
                return name, b""
            return name, body if status == 200 else b""

        found = await asyncio.gather(*(ask(name) for name in self.replicas.names()))
        return {name: body for name, body in found if body}


class _ForwardedResponse:
    """What one request's replica sends, on its way to the client."""

    def __init__(self, replicas: Replicas, call: ReplicaCall, send: Send) -> None:
        self._replicas, self._call, self._send = replicas, call, send
        self.begun = False  # whether the client has got a part of it
        self._stream = False

    async def run(self) -> None:
        if self._call.stored:
            for name in self._replicas.names()[:-1]:
                if await self._forward(self._call.to(name), unless=404):
                    return
            await self._forward(self._call.to((self._replicas.names() or [""])[-1]))
            return
        tries = 1 if self._call.session else MAX_TRIES
        for left in reversed(range(tries)):
            try:
                await self._forward(self._call.again())
                return
            except ReplicaLost:
                if self.begun or not left:
                    raise
                log.warning("a replica is lost: its request goes to another")

    async def _forward(self, call: ReplicaCall, unless: int = 0) -> bool:
        """False: the replica answered with the status `unless`, and nothing was sent."""
        async for _, messages in self._replicas.stream(call):
            for message in messages:
                if message["type"] == "http.response.start":
                    if message["status"] == unless:
                        return False
                    self.begun = True
                    self._stream = any(value.startswith(b"text/event-stream") for _, value in message["headers"])
                await self._send(message)
        return True

    async def fail(self, error: Exception) -> None:
        failure = _failure(error)
        if not self.begun:
            raise failure from error
        if not self._stream:
            raise error
        path = self._call.scope["path"]
        wire = WireFormat() if path.endswith("completions") else NamedEvents()
        event = failure.body if path.endswith("completions") else failure.anthropic_body
        if path == "/v1/responses":
            about = failure.body["error"]
            event = {"type": "error", "code": about["code"], "message": about["message"], "param": None}
        await self._send({"type": "http.response.body", "body": wire.frame(event), "more_body": False})


def _failure(error: Exception) -> ApiError:
    if isinstance(error, ReplicaLost):
        hint = "send it again: another replica answers"
        headers = {"Retry-After": "1"}
        return ApiError(503, "the replica of this request was lost", hint, code="replica_lost", headers=headers)
    return ApiError.of(error)


def _headers(scope: Scope) -> list[tuple[bytes, bytes]]:
    """With the request's id, so that logs of the front and of replicas agree; without the key, which was checked."""
    dropped = (b"authorization", b"x-api-key", b"x-request-id", b"content-length")
    kept = [(name, value) for name, value in scope["headers"] if name.lower() not in dropped]
    return [*kept, (b"x-request-id", scope["state"]["request_id"].encode())]


async def _body(receive: Receive) -> bytes:
    parts, more = [], True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)
