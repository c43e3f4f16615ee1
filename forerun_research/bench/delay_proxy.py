"""A TCP proxy that delays what passes, and may damage it: a network between two processes of one machine.

Bytes keep their order; each direction takes half of the round trip. Runs in a thread of its own. Knows no protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading


class DelayProxy:
    """Listens on `port` and passes on to `target_port`, both on this machine."""

    def __init__(self, target_port: int, round_trip_s: float = 0.0, damaged_share: float = 0.0) -> None:
        self.target_port, self.round_trip_s, self.damaged_share = target_port, round_trip_s, damaged_share
        self.bytes_passed = self.damaged = 0
        self._random = random.Random(0)
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),), daemon=True)

    def __enter__(self) -> DelayProxy:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()
        self._loop.close()

    async def _run(self) -> None:
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._ended.wait()
        server.close()
        others = [task for task in asyncio.all_tasks(self._loop) if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            other_reader, other_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
        except OSError:
            writer.close()
            return
        both = (self._pass(reader, other_writer, 0.0), self._pass(other_reader, writer, self.damaged_share))
        with contextlib.suppress(asyncio.CancelledError):  # at the end: a server's callback would print it
            await asyncio.gather(*both, return_exceptions=True)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, damaged_share: float) -> None:
        """What is read is written later; a damaged piece has one byte in four changed."""
        try:
            while data := await reader.read(1 << 16):
                self.bytes_passed += len(data)
                if self._random.random() < damaged_share:
                    self.damaged += 1
                    data = bytes(b ^ self._random.choice((0, 0, 0, self._random.randrange(256))) for b in data)
                self._loop.call_later(self.round_trip_s / 2.0, writer.write, data)
        except ConnectionError:
            pass
        finally:
            self._loop.call_later(self.round_trip_s / 2.0, writer.close)
