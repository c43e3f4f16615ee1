"""One connection to a draft server, in a thread of its own: connects, connects again, and never blocks the engine.

Frames are handed to a callback as they arrive; `send` queues one and returns. A server that does not answer, sends what
is no frame or is gone costs nothing but its drafts: the link closes the connection and tries again later, after a pause
that grows with every failure. Knows frames and addresses; not sequences or drafts.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from forerun.decode.remote.protocol import (
    MAX_TREE_BYTES,
    VERSION,
    Frame,
    Hello,
    ProtocolError,
    Refused,
    Welcome,
    decode,
    encode,
)
from forerun.errors import BadRequest

log = logging.getLogger("forerun")

KEY_VARIABLE = "FORERUN_DRAFT_KEY"  # the API key for draft servers
MIN_PAUSE_S, MAX_PAUSE_S = 0.1, 10.0  # before the next attempt; doubles with every failure
CONNECT_S = 5.0  # for a connection and its first frames
MAX_QUEUED_FRAMES = 256  # a server that reads slower than this is disconnected


def check_installed() -> BadRequest | None:
    """Why there can be no link."""
    try:
        import websockets  # noqa: F401
    except ImportError:
        return BadRequest("drafts from another machine need the package websockets", "pip install 'forerun[serve]'")
    return None


def address_url(address: str) -> str:
    """HOST:PORT, or a URL for servers behind a proxy: wss://host/path."""
    url = address if "://" in address else f"ws://{address}"
    scheme, _, rest = url.partition("://")
    try:
        port = urlsplit(url).port
    except ValueError:  # no number, or brackets that do not close
        port, rest = None, ""
    missing = port is None and "://" not in address
    if scheme not in ("ws", "wss") or missing or not rest or rest.startswith("/") or any(c.isspace() for c in rest):
        raise BadRequest(f"{address!r:.80} is no address of a draft server", "give HOST:PORT, or wss://HOST/PATH")
    return url


def is_local(address: str) -> bool:
    """Whether an address is one of this machine."""
    host = urlsplit(address_url(address)).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


def _problem(error: Exception) -> str:
    """In the server's own words where it refused the connection: that a key is missing, or a limit reached."""
    from websockets.exceptions import InvalidStatus

    if isinstance(error, InvalidStatus) and (said := error.response.body):
        return f"HTTP {error.response.status_code}: {said.decode('utf-8', 'replace').strip()}"
    return f"{type(error).__name__}: {error}"


class Link:
    """`on_frame` gets every frame but the first, `on_change` is called when the connection comes or goes; both in the
    link's thread."""

    def __init__(
        self, address: str, hello: Hello, on_frame: Callable[[Frame], None], on_change: Callable[[], None]
    ) -> None:
        self.address, self.url = address, address_url(address)
        self.welcome: Welcome | None = None  # None: not connected
        self.refusal: str = ""  # why the server does not draft for this target
        self.trip_s = math.inf  # from the first frame to its reply, the quickest so far
        self.connections = 0  # so far: what the server knew is gone with its connection
        self.bytes_sent = self.bytes_received = 0
        self._hello, self._on_frame, self._on_change = hello, on_frame, on_change
        self._loop = asyncio.new_event_loop()
        self._outgoing: asyncio.Queue[bytes] | None = None
        self._closed = False
        self._attempted = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"drafts from {address}", daemon=True)
        self._thread.start()

    def wait_attempted(self, seconds: float) -> None:
        """Until the first attempt to connect has succeeded or failed."""
        self._attempted.wait(seconds)

    def send(self, frame: Frame) -> bool:
        """Queue a frame; False where there is no connection."""
        if self.welcome is None or self._closed:
            return False
        data = encode(frame, self._hello.vocab_size)
        self.bytes_sent += len(data)
        self._loop.call_soon_threadsafe(self._queue, data)
        return True

    def close(self) -> None:
        """End the thread; it may take a moment."""
        if not self._closed:
            self._closed = True
            self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(self._loop)])

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _queue(self, data: bytes) -> None:
        if self._outgoing is not None:
            try:
                self._outgoing.put_nowait(data)
            except asyncio.QueueFull:
                self._outgoing = None  # the writer sees it and ends the connection

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._connect_again())
        except asyncio.CancelledError:
            pass
        finally:
            self._loop.close()

    async def _connect_again(self) -> None:
        pause_s, told = MIN_PAUSE_S, False
        while not self._closed:
            start, before, garbage = time.monotonic(), self.connections, False
            try:
                await self._connected()
                problem = "it closed the connection"
            except Exception as error:  # whatever a server does, drafts come from elsewhere or not at all
                problem, garbage = _problem(error), isinstance(error, ProtocolError)
            self.welcome, self._outgoing = None, None
            self._attempted.set()
            self._on_change()
            if self.connections > before:
                log.warning("no drafts from %s for now: %.200s", self.address, problem)
                if not garbage or time.monotonic() - start > MAX_PAUSE_S:
                    pause_s = MIN_PAUSE_S
            elif not told and not self.connections and not self.refusal:  # a refusal is an error of the request
                log.warning("no drafts from %s yet, it is tried again: %.200s", self.address, problem)
            told = True
            await asyncio.sleep(pause_s)
            pause_s = min(MAX_PAUSE_S, 2.0 * pause_s)

    async def _connected(self) -> None:
        """One connection, from its first frame to its end."""
        from websockets.asyncio.client import connect

        key = os.environ.get(KEY_VARIABLE)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with connect(
            self.url,
            additional_headers=headers,
            compression=None,
            max_size=MAX_TREE_BYTES,
            open_timeout=CONNECT_S,
            close_timeout=1.0,
            proxy=None,
        ) as socket:
            sent = time.monotonic()
            await socket.send(encode(self._hello))
            async with asyncio.timeout(CONNECT_S):
                first = decode(await socket.recv(decode=False), self._hello.vocab_size)
            self.trip_s = min(self.trip_s, time.monotonic() - sent)
            if isinstance(first, Refused):
                self.refusal = first.reason
                raise ConnectionError(first.reason)
            if not isinstance(first, Welcome) or first.version != VERSION:
                raise ProtocolError("the first frame is no welcome of this version")
            self._outgoing = queue = asyncio.Queue[bytes](MAX_QUEUED_FRAMES)
            self.refusal, self.welcome = "", first
            self.connections += 1
            self._attempted.set()
            self._on_change()
            log.info("drafts come from %s (%s)", self.address, first.model)
            writer = asyncio.ensure_future(self._write(socket, queue))
            try:
                while True:
                    data = await socket.recv(decode=False)
                    self.bytes_received += len(data)
                    self._on_frame(decode(data, self._hello.vocab_size))
            finally:
                writer.cancel()

    async def _write(self, socket, queue: asyncio.Queue[bytes]) -> None:  # type: ignore[no-untyped-def]
        try:
            while self._outgoing is queue:
                await socket.send(await queue.get())
        finally:
            if not self._closed:
                await socket.close()
