"""The application on a socket: uvicorn with timeouts for idle connections, and a graceful shutdown.

On SIGTERM or Ctrl-C new requests get 503 while open ones continue; when the last has ended, or the time for that is
over, the server exits. A second signal makes it exit at once.
"""

from __future__ import annotations

import asyncio
import ctypes
import time
from types import FrameType
from typing import Any

import h11
import psutil
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from forerun.serve.config import ServeConfig

UNREAD_BODY_TIMEOUT_S = 2.0  # for a client to read a response that came before the end of its body
SHUTDOWN_GRACE_S = 1  # for connections to close, once no request is open
# Freed memory that glibc keeps in the arenas of threads goes back to the system: after two minutes of odd and large
# requests 1.0 GB were resident, of which 0.4 GB were free
TRIM_INTERVAL_S = 30
MIN_TRIM_BYTES = 4 * 2**20  # of growth since the last time
TICKS_PER_S = 10  # of uvicorn
# glibc makes an arena for each thread, up to 8 for each core, and what is freed stays scattered in them
M_ARENA_MAX, MAX_ARENAS = -8, 2
# By itself glibc raises these up to 32 and 64 MiB: logits of a step and bodies of requests then lie among what stays,
# and their memory does not go back. What is larger than the first is mapped on its own, which takes less than a ms
M_MMAP_THRESHOLD, MMAP_BYTES = -3, 4 * 2**20
M_TRIM_THRESHOLD, TRIM_BYTES = -1, 16 * 2**20


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
            timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
        )
        super().__init__(settings)
        self._admission, self._drain_s = app.state.admission, config.drain_s
        self._deadline = float("inf")
        self._trimmed_bytes = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._admission.draining:
            self.should_exit = True
            return
        self._admission.draining = True
        self._deadline = time.monotonic() + self._drain_s

    async def on_tick(self, counter: int) -> bool:
        if self._admission.draining and (not self._admission.num_open or time.monotonic() > self._deadline):
            self.should_exit = True
        if counter and counter % (TRIM_INTERVAL_S * TICKS_PER_S) == 0:
            await asyncio.to_thread(self.trim_memory)
        return await super().on_tick(counter)

    def trim_memory(self) -> None:
        """Return freed memory to the system, where the C library can and there is some."""
        process, trim = psutil.Process(), getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None and process.memory_info().rss > self._trimmed_bytes + MIN_TRIM_BYTES:
            trim(0)
            self._trimmed_bytes = process.memory_info().rss


def limit_arenas() -> None:
    """Few arenas of the C library for all threads, without large blocks; to be called before there are any."""
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(M_ARENA_MAX, MAX_ARENAS)
        mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)
        mallopt(M_TRIM_THRESHOLD, TRIM_BYTES)


def _protocol(seconds: float) -> type[H11Protocol]:
    """HTTP/1.1 whose connections are closed when a request's headers do not arrive in time, and when a body continues
    after its response. What arrives of such a body is discarded."""

    class Protocol(H11Protocol):
        _header_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._update_timer()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._update_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.conn.their_state is h11.SEND_BODY:
                self.loop.call_later(UNREAD_BODY_TIMEOUT_S, self._close_unread)

        def _close_unread(self) -> None:
            if self.conn.their_state is h11.SEND_BODY and self.conn.our_state is h11.DONE:
                self.transport.close()

        def _update_timer(self) -> None:
            """Between requests uvicorn's own keep-alive timeout applies; from a request's first byte on, this one."""
            if self.conn.their_state is not h11.IDLE:
                self._stop_timer()
            elif self._header_timer is None:
                self._header_timer = self.loop.call_later(seconds, self._on_header_timeout)

        def _stop_timer(self) -> None:
            if self._header_timer is not None:
                self._header_timer.cancel()
                self._header_timer = None

        def _on_header_timeout(self) -> None:
            self._header_timer = None
            if self.conn.their_state is h11.IDLE and self.timeout_keep_alive_task is None:
                self.transport.close()

    return Protocol
