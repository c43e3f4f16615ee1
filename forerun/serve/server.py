"""The application on a socket: uvicorn, with connections that must speak in time, and an end that lets answers end.

On SIGTERM or Ctrl-C new requests get 503 while the open ones go on; when the last has ended, or the time for that is
over, the server leaves. A second signal makes it leave at once.
"""

from __future__ import annotations

import asyncio
import socket
import time
from types import FrameType
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from forerun.errors import BadRequest
from forerun.serve.config import ServeConfig

LINGER_S = 2.0  # for whoever was answered before all was sent: to read that answer, and stop
LEAVING_S = 1  # for connections to close, once nobody is waited for any more


class Server(uvicorn.Server):
    """Runs on sockets that the caller has opened: `server.run(sockets=[listen(host, port)])`."""

    def __init__(self, app: FastAPI, config: ServeConfig) -> None:
        settings = uvicorn.Config(
            app,
            http=_protocol(config.max_header_s),
            lifespan="off",
            server_header=False,
            access_log=False,  # requests are logged where their tokens are known
            log_level="warning",
            timeout_graceful_shutdown=LEAVING_S,
        )
        super().__init__(settings)
        self._gate, self._drain_s = app.state.gate, config.drain_s
        self._deadline = float("inf")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._gate.draining:
            self.should_exit = True
            return
        self._gate.draining = True
        self._deadline = time.monotonic() + self._drain_s

    async def on_tick(self, counter: int) -> bool:
        if self._gate.draining and (not self._gate.open or time.monotonic() > self._deadline):
            self.should_exit = True
        return await super().on_tick(counter)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there; port 0 takes any free one."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, protocol)
    except OSError as error:
        raise BadRequest(f"cannot listen on {host}: {error}", "give an address of this machine") from None
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(1024)
    except OSError as error:
        made.close()
        raise BadRequest(f"cannot listen on {host} port {port}: {error}", "choose another --port or --host") from None
    return made


def _protocol(seconds: float) -> type[H11Protocol]:
    """HTTP/1.1 whose connections are closed when a request's headers do not arrive within some seconds, and when bodies
    go on after their answer. Whatever comes of those is thrown away."""

    class Protocol(H11Protocol):
        _patience: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_watching()
            super().connection_lost(exc)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.conn.their_state is h11.SEND_BODY:
                self.loop.call_later(LINGER_S, self._hang_up)

        def _hang_up(self) -> None:
            if self.conn.their_state is h11.SEND_BODY and self.conn.our_state is h11.DONE:
                self.transport.close()

        def _watch(self) -> None:
            """Between requests uvicorn's own keep-alive counts; from a request's first byte on, this."""
            if self.conn.their_state is not h11.IDLE:
                self._stop_watching()
            elif self._patience is None:
                self._patience = self.loop.call_later(seconds, self._give_up)

        def _stop_watching(self) -> None:
            if self._patience is not None:
                self._patience.cancel()
                self._patience = None

        def _give_up(self) -> None:
            self._patience = None
            if self.conn.their_state is h11.IDLE and self.timeout_keep_alive_task is None:
                self.transport.close()

    return Protocol
