"""`forerun draft serve`: drafts of one model over websockets, for targets on other machines.

A connection belongs to one target; its sequences end with it. Keys, limits and hosts are checked before a connection is
accepted, and pages of browsers are refused: targets send no `Origin`. Knows frames and connections; `draft_worker` runs
the model.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import itertools
import logging
import signal
import socket
import threading
from collections import Counter
from dataclasses import dataclass

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from forerun.decode.remote.protocol import (
    VERSION,
    Cancel,
    Close,
    DraftOrder,
    Forgot,
    Frame,
    Hello,
    ProtocolError,
    Refused,
    Tree,
    Welcome,
    decode,
    encode,
    vocabulary_digest,
)
from forerun.llm import LLM
from forerun.options import check_number
from forerun.serve.config import ApiKey, ApiKeys
from forerun.serve.draft_worker import DraftWorker

log = logging.getLogger("forerun.serve")

MAX_QUEUED_FRAMES = 256  # that a target has not read; more, and its connection ends


@dataclass(frozen=True)
class DraftServeConfig:
    """What a draft server allows."""

    max_sequences: int = 256  # open at once, of all targets
    max_connections: int = 64
    max_body_bytes: int = 8 * 2**20  # of one frame
    max_header_s: float = 10.0  # for a connection's headers, and for its first frame
    keys: ApiKeys | None = None  # None: targets need no key

    def __post_init__(self) -> None:
        for name in ("max_sequences", "max_connections"):
            check_number(name, getattr(self, name), 1, whole=True)
        check_number("max_body_bytes", self.max_body_bytes, 1024, whole=True)
        check_number("max_header_s", self.max_header_s, 0, open_low=True, hint="give seconds")


class DraftServer:
    """Runs on a socket that the caller has opened, until `stop` or, in the main thread, a signal."""

    def __init__(self, llm: LLM, config: DraftServeConfig) -> None:
        self.llm, self.config = llm, config
        self.worker = DraftWorker(llm, config.max_sequences)
        self._digest = vocabulary_digest(llm.engine.tokenizer)
        self._connections = itertools.count(1)
        self._open: Counter[str] = Counter()  # sequences by key
        self._num_connected = 0
        self._ended: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.bytes_sent = self.bytes_received = 0

    def run(self, sock: socket.socket) -> None:
        self.worker.start()
        try:
            asyncio.run(self._serve(sock))
        finally:
            self.worker.stop()

    def stop(self) -> None:
        """From any thread."""
        if self._loop is not None and self._ended is not None:
            with contextlib.suppress(RuntimeError):  # the loop has just been closed: it has ended
                self._loop.call_soon_threadsafe(self._ended.set)

    async def _serve(self, sock: socket.socket) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        if threading.current_thread() is threading.main_thread():
            for name in (signal.SIGINT, signal.SIGTERM):
                self._loop.add_signal_handler(name, self._ended.set)
        async with serve(
            self._connection,
            sock=sock,
            process_request=self._check,
            origins=[None],
            compression=None,
            max_size=self.config.max_body_bytes,
            open_timeout=self.config.max_header_s,
            close_timeout=1.0,
            server_header=None,
        ) as server:
            assert isinstance(server, Server)
            await self._ended.wait()

    # -- a connection --------------------------------------------------------------------------------------------------

    def _check(self, connection: ServerConnection, request: Request) -> Response | None:
        if request.path == "/health":
            return connection.respond(http.HTTPStatus.OK, "ok\n")
        key = self._key(request)
        if self.config.keys is not None and key is None:
            return connection.respond(
                http.HTTPStatus.UNAUTHORIZED,
                "the API key is missing or wrong: targets send it from FORERUN_DRAFT_KEY\n",
            )
        if self._num_connected >= self.config.max_connections:
            limit = f"{self.config.max_connections} targets are connected, the limit\n"
            return connection.respond(http.HTTPStatus.SERVICE_UNAVAILABLE, limit)
        return None

    def _key(self, request: Request) -> ApiKey | None:
        given = request.headers.get("authorization", "")
        text = given[7:].strip() if given[:7].lower() == "bearer " else ""
        return self.config.keys.find(text) if self.config.keys is not None and text else None

    async def _connection(self, connection: ServerConnection) -> None:
        self._num_connected += 1
        target = _Target(next(self._connections), self, connection)
        try:
            await target.run()
        except ProtocolError as error:
            log.warning("a target is disconnected: %s", error)
            await connection.close(1002, "not a frame of the draft protocol")
        except (ConnectionClosed, TimeoutError):
            pass
        finally:
            self._num_connected -= 1
            target.end()


class _Target:
    """One connection, and the sequences of its target."""

    def __init__(self, number: int, server: DraftServer, connection: ServerConnection) -> None:
        self._number, self._server, self._connection = number, server, connection
        assert connection.request is not None
        self._key = server._key(connection.request)
        self._outgoing = asyncio.Queue[bytes](MAX_QUEUED_FRAMES)
        self._loop = asyncio.get_running_loop()
        self._vocab_size = 0
        self._sequences: set[int] = set()

    async def run(self) -> None:
        async with asyncio.timeout(self._server.config.max_header_s):
            hello = decode(await self._connection.recv(decode=False))
        if not isinstance(hello, Hello):
            raise ProtocolError(f"the first frame is a {type(hello).__name__}")
        problem = self._problem(hello)
        if problem:
            await self._connection.send(encode(Refused(0, 0, problem)))
            return
        self._vocab_size, worker = hello.vocab_size, self._server.worker
        about = (worker.max_context, worker.max_sequences, worker.round_s, self._server.llm.model)
        await self._connection.send(encode(Welcome(*about, VERSION, *worker.rounds, worker.outcomes)))
        writer = asyncio.ensure_future(self._write())
        try:
            async for data in self._connection:
                self._server.bytes_received += len(data)
                self._handle(decode(data, self._vocab_size))  # type: ignore[arg-type]  # text is a ProtocolError
        finally:
            writer.cancel()

    def _problem(self, hello: Hello) -> str:
        if hello.version != VERSION:
            return f"this server uses version {VERSION} of the draft protocol, the target version {hello.version}"
        if hello.digest != self._server._digest:
            return f"the tokens of {self._server.llm.model} are others than the target's"
        if not 0 < hello.vocab_size <= 1 << 24:
            return f"a vocabulary of {hello.vocab_size} tokens"
        return ""

    def _handle(self, frame: Frame) -> None:
        worker = self._server.worker
        match frame:
            case DraftOrder():
                if refusal := self._limit(frame.seq):
                    self._queue(encode(Refused(frame.seq, frame.version, refusal)))
                else:
                    worker.submit(self._number, frame, self._vocab_size, self._reply)
            case Cancel():
                worker.cancel(self._number, frame.seq, frame.version)
            case Close():
                worker.close(self._number, frame.seq)
                self._count(frame.seq, -1)
            case _:
                raise ProtocolError(f"a target sent a {type(frame).__name__}")

    def _limit(self, seq: int) -> str:
        """Why a key may not have one more sequence."""
        key, opened = self._key, self._server._open
        if seq not in self._sequences:
            if key is not None and key.limit is not None and opened[key.name] >= key.limit:
                return f"this key has {opened[key.name]} sequences open, its limit is {key.limit}"
            self._count(seq, 1)
        return ""

    def _count(self, seq: int, more: int) -> None:
        if (seq in self._sequences) == (more > 0):
            return
        (self._sequences.add if more > 0 else self._sequences.discard)(seq)
        self._server._open[self._key.name if self._key is not None else ""] += more

    def end(self) -> None:
        self._server.worker.close(self._number)
        for seq in list(self._sequences):
            self._count(seq, -1)

    def _reply(self, frame: Tree | Forgot | Refused) -> None:
        """From the worker's thread, or from this one."""
        data = encode(frame, self._vocab_size)
        self._loop.call_soon_threadsafe(self._queue, data)

    def _queue(self, data: bytes) -> None:
        try:
            self._outgoing.put_nowait(data)
        except asyncio.QueueFull:
            self._connection.transport.abort()

    async def _write(self) -> None:
        while True:
            data = await self._outgoing.get()
            self._server.bytes_sent += len(data)
            await self._connection.send(data)
