"""KV events on real sockets: numbered batches, replay, endpoints that cannot be used. Collected where ZeroMQ is."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
import zmq

from forerun import LLM, SamplingParams
from forerun.errors import BadRequest
from forerun.serve import kv_events
from forerun.serve.kv_events import KvEventPublisher, open_kv_events
from tests.serve.common import wait_for
from tests.serve.kv_event_reader import KvEventReader


class Subscriber:
    def __init__(self, endpoint: str) -> None:
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.connect(endpoint)
        self.socket.subscribe(b"")
        self.reader, self.numbers = KvEventReader(), list[int]()

    def read(self, milliseconds: int) -> bool:
        if not self.socket.poll(milliseconds):
            return False
        topic, number, payload = self.socket.recv_multipart()
        moment, events, rank = msgpack.unpackb(payload)
        assert topic == b"" and rank == 0 and moment > 1e9
        self.numbers.append(int.from_bytes(number, "big"))
        for entry in events:
            self.reader.apply(entry)
        return True


def replayed(endpoint: str, first: int) -> list[tuple[int, Any]]:
    asking = zmq.Context.instance().socket(zmq.DEALER)
    asking.connect(endpoint)
    asking.send_multipart([b"", first.to_bytes(8, "big")])
    found = []
    while True:
        assert asking.poll(20_000)
        empty, number, payload = asking.recv_multipart()
        assert not empty
        if int.from_bytes(number, "big", signed=True) == -1:
            asking.close(0)
            return found
        found.append((int.from_bytes(number, "big"), msgpack.unpackb(payload)))


def test_a_replay_is_whole_however_late_it_is_read(llm: LLM):
    with open_kv_events(llm, "tcp://127.0.0.1:*", "tcp://127.0.0.1:*") as publisher:
        assert publisher is not None
        cleared = 6000
        for _ in range(cleared):  # of 2 kB each: more than the sockets of both sides hold
            publisher._publish([{"type": "AllBlocksCleared", "padding": "x" * 2000}])
        asking = zmq.Context.instance().socket(zmq.DEALER)
        asking.connect(publisher.endpoints[1])
        asking.send_multipart([b"", (0).to_bytes(8, "big")])
        wait_for(lambda: asking.poll(100) > 0)
        again = zmq.Context.instance().socket(zmq.DEALER)
        again.connect(publisher.endpoints[1])
        again.send_multipart([b"", (10**9).to_bytes(8, "big")])
        assert again.recv_multipart()[1] == kv_events.END_OF_REPLAY  # so the replay before it has been sent
        numbers = []
        while not numbers or numbers[-1] != -1:
            assert asking.poll(20_000)
            numbers.append(int.from_bytes(asking.recv_multipart()[1], "big", signed=True))
        assert numbers == [*range(cleared), -1]
        for socket in (asking, again):
            socket.close(0)


def test_a_subscriber_learns_what_is_cached_and_replays_what_it_missed(llm: LLM):
    llm.clear_cache()
    with open_kv_events(llm, "tcp://127.0.0.1:*", "tcp://127.0.0.1:*") as publisher:
        assert publisher is not None
        endpoint, replay = publisher.endpoints
        late = Subscriber(endpoint)
        texts = [f"Ship {number} passes the light and is counted in the book. " * 2 for number in range(6)]
        done = [llm.generate(text, SamplingParams(max_tokens=4))[0] for text in texts]
        wait_for(lambda: bool(publisher._sent) and publisher._changes.empty())
        while late.read(500):
            pass
        fresh = KvEventReader()  # a subscription takes effect when it does: the replay has all
        batches = replayed(replay, 0)
        assert [number for number, _ in batches] == list(range(len(batches)))
        for _, (_, events, _) in batches:
            for entry in events:
                fresh.apply(entry)
        for answer in done:
            assert fresh.held_tokens(answer.prompt_ids, 16) == len(llm.engine.tree.match(answer.prompt_ids)) * 16 > 0
        assert late.numbers == sorted(late.numbers)
        late.socket.close(0)
    assert llm.engine.tree.on_change is None


def test_skipped_changes_leave_a_gap_in_the_numbers(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kv_events, "MAX_QUEUED_CHANGES", 1)
    monkeypatch.setattr(KvEventPublisher, "_run", lambda self: None)  # a publisher that falls behind
    with open_kv_events(llm, "inproc://skipped", None) as publisher:
        assert publisher is not None
        for _ in range(3):
            publisher._on_change(b"", 0)
        assert publisher._skipped == 2 and publisher._changes.qsize() == 1
        publisher._publish([{"type": "AllBlocksCleared"}])
        publisher._publish([{"type": "AllBlocksCleared"}])
        assert [number for number, _ in publisher._sent] == [1, 2]
        publisher._changes.get()


def test_endpoints_that_cannot_be_used(llm: LLM):
    with open_kv_events(llm, "tcp://127.0.0.1:*", None) as publisher:
        assert publisher is not None
        for endpoint in (publisher.endpoints[0], "nonsense", "tcp://nowhere.invalid:1"):
            with pytest.raises(BadRequest, match="cannot publish KV events"), open_kv_events(llm, endpoint, None):
                pass
