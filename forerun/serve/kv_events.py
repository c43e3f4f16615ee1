"""KV events for routers, in the form of vLLM's: which exact prefixes this engine holds, over ZeroMQ.

A batch is three frames: the topic, a sequence number in 8 bytes (big endian), and msgpack of `[time, [event, ...],
rank]`. Events are maps with a `type`: `BlockStored`, `BlockRemoved`, `AllBlocksCleared`. A block is a page of the
prefix tree; its hash is of all tokens up to its end. Approximate K/V never occurs: it is in no prefix tree. A reader
that missed a number asks the replay socket for all from it on. Requests never wait for readers: where they fall behind,
numbers are skipped. Knows no HTTP.
"""

from __future__ import annotations

import hashlib
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from forerun.cache.prefix import TOKEN_BYTES, PrefixTree, unpack
from forerun.errors import BadRequest

if TYPE_CHECKING:
    from forerun.llm import LLM

MAX_QUEUED_CHANGES = 100_000
MAX_BATCH_EVENTS = 256
REPLAYED_BATCHES = 10_000
POLL_MS = 50  # for replay requests
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
MEDIUM = "GPU"  # what readers take for the engine's own memory


def page_hashes(data: bytes, page_size: int) -> list[int]:
    """Of each whole page of packed tokens: 64 bits of all tokens up to its end."""
    digest, stride, found = hashlib.blake2b(digest_size=8), page_size * TOKEN_BYTES, []
    for at in range(0, len(data) - stride + 1, stride):
        digest.update(data[at : at + stride])
        found.append(int.from_bytes(digest.digest(), "big"))
    return found


def event(data: bytes, pages: int, page_size: int) -> dict[str, Any]:
    """Of a change of the prefix tree, as `on_change` reports it."""
    if not pages:
        return {"type": "AllBlocksCleared"}
    hashes = page_hashes(data, page_size)
    if pages < 0:
        return {"type": "BlockRemoved", "block_hashes": hashes[pages:], "medium": MEDIUM}
    first = len(hashes) - pages
    return {
        "type": "BlockStored",
        "block_hashes": hashes[first:],
        "parent_block_hash": hashes[first - 1] if first else None,
        "token_ids": unpack(data[first * page_size * TOKEN_BYTES :]),
        "block_size": page_size,
        "lora_id": None,
        "medium": MEDIUM,
        "lora_name": None,
    }


class KvEventPublisher:
    """Publishes from a thread of its own, from when it is made until `close`."""

    def __init__(self, tree: PrefixTree, endpoint: str, replay: str | None = None, topic: str = "") -> None:
        try:
            import msgpack
            import zmq
        except ImportError as error:
            raise BadRequest(f"KV events need a package: {error}", "pip install 'forerun[events]'") from None
        self._pack, self._zmq, self._topic, self._tree = msgpack.packb, zmq, topic.encode(), tree
        self._changes: queue.Queue[tuple[bytes, int] | None] = queue.Queue(MAX_QUEUED_CHANGES)
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=REPLAYED_BATCHES)
        self._number = self._skipped = 0
        context = zmq.Context.instance()
        self._publishing, self._replaying = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        self._replaying.setsockopt(zmq.SNDHWM, REPLAYED_BATCHES + 1)  # a whole replay waits for its reader: of ZeroMQ's
        self._replaying.setsockopt(zmq.ROUTER_MANDATORY, 1)  # own 1,000 the rest is dropped without a word
        try:
            self._bind(self._publishing, endpoint)
            if replay is not None:
                self._bind(self._replaying, replay)
        except BaseException:
            self._close_sockets()
            raise
        self._thread = threading.Thread(target=self._run, name="forerun-kv-events", daemon=True)
        self._thread.start()
        tree.on_change = self._on_change

    def _bind(self, socket: Any, endpoint: str) -> None:
        try:
            socket.bind(endpoint)
        except self._zmq.ZMQError as error:
            hint = "give one such as tcp://*:5557 whose port is free"
            raise BadRequest(f"cannot publish KV events at {endpoint!r:.80}: {error}", hint) from None

    @property
    def endpoints(self) -> tuple[str, str]:
        """With the ports that were chosen."""
        last = self._zmq.LAST_ENDPOINT
        return self._publishing.getsockopt_string(last), self._replaying.getsockopt_string(last)

    def _on_change(self, data: bytes, pages: int) -> None:
        """Within a step: only noted here."""
        try:
            self._changes.put_nowait((data, pages))
        except queue.Full:
            self._skipped += 1

    def _run(self) -> None:
        while True:
            self._answer_replays()
            try:
                changes = [self._changes.get(timeout=POLL_MS / 1000)]
            except queue.Empty:
                continue
            while len(changes) < MAX_BATCH_EVENTS and not self._changes.empty():
                changes.append(self._changes.get_nowait())
            events = [event(*change, self._tree.pool.page_size) for change in changes if change is not None]
            if events:
                self._publish(events)
            if None in changes:
                return

    def _publish(self, events: list[dict[str, Any]]) -> None:
        self._number += int(self._skipped > 0)  # a reader sees that something is missing
        self._skipped = 0
        payload = self._pack([time.time(), events, 0])
        self._publishing.send_multipart([self._topic, self._number.to_bytes(8, "big"), payload])
        self._sent.append((self._number, payload))
        self._number += 1

    def _answer_replays(self) -> None:
        while self._replaying.poll(0):
            frames = self._replaying.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                continue
            client, first = frames[0], int.from_bytes(frames[2], "big")
            try:
                for number, payload in [sent for sent in self._sent if sent[0] >= first]:
                    self._replay(client, number.to_bytes(8, "big"), payload)
                self._replay(client, END_OF_REPLAY, b"")
            except self._zmq.ZMQError:  # it is gone, or has not read what it asked for before: it gets no end
                continue

    def _replay(self, client: bytes, number: bytes, payload: bytes) -> None:
        self._replaying.send_multipart([client, b"", number, payload], self._zmq.NOBLOCK)

    def close(self) -> None:
        self._tree.on_change = None
        self._changes.put(None)
        self._thread.join()
        self._close_sockets()

    def _close_sockets(self) -> None:
        for socket in (self._publishing, self._replaying):
            socket.close(linger=200)


@contextmanager
def open_kv_events(llm: LLM, endpoint: str | None, replay: str | None) -> Iterator[KvEventPublisher | None]:
    if endpoint is None and replay is not None:
        raise BadRequest("--kv-events-replay replays KV events, and there are none", "add --kv-events ENDPOINT")
    if endpoint is None:
        yield None
        return
    if not llm.engine.config.enable_prefix_caching:
        raise BadRequest("KV events are about cached prefixes, and those are off", "add --enable-prefix-caching")
    publisher = KvEventPublisher(llm.engine.tree, endpoint, replay)
    try:
        yield publisher
    finally:
        publisher.close()
