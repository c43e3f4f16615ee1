"""The store tier over a dictionary in place of Mooncake: what comes back is what was written, or nothing."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from forerun.cache import store, tiers
from forerun.cache.store import RPC_FAILED, StoreTier, open_mooncake, parse_address
from forerun.cache.tiers import TierConfig
from forerun.errors import BadRequest
from tests.cache.test_tiers import PAGE, World

ADDRESS = "mooncake://127.0.0.1:1"


class Shared:
    """Objects by name, of all clients; like Mooncake it never raises."""

    def __init__(self, limit: int = 10**9) -> None:
        self.objects: dict[str, bytes] = {}
        self.limit, self.gone, self.calls, self.closed = limit, False, 0, 0

    def put_batch(self, keys: list[str], values: list[Any]) -> int:
        self.calls += 1
        for key, value in zip(keys, values, strict=True):
            if self.gone or len(self.objects) >= self.limit:
                return RPC_FAILED if self.gone else -200
            self.objects.setdefault(key, bytes(value))
        return 0

    def get_batch(self, keys: list[str]) -> list[bytes]:
        self.calls += 1
        return [b"" if self.gone else self.objects.get(key, b"") for key in keys]

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        self.calls += 1
        return [RPC_FAILED if self.gone else int(key in self.objects) for key in keys]

    def remove(self, key: str) -> int:
        return 0 if self.objects.pop(key, None) else -1

    def close(self) -> int:
        self.closed += 1
        return 0


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Shared]:
    found = Shared()
    monkeypatch.setattr(tiers, "open_mooncake", lambda address, nbytes: StoreTier(address, nbytes, found))
    yield found


def world(**more: Any) -> World:
    return World(8, TierConfig(store=ADDRESS, **more))


def text(number: int, pages: int = 3) -> list[int]:
    return [number * 7 + i for i in range(pages * PAGE + 1)]


def spill(made: World) -> None:
    made.spill_all()
    for tier in made.tiers.outer:
        tier.flush()


def test_pages_of_one_process_are_read_by_another(shared: Shared):
    one, two = world(), world()
    one.ask(text(1))
    assert two.ask(text(1)) == {"pool": 0, "host": 0, "store": 0}  # not written yet
    spill(one)
    spill(two)
    assert two.ask(text(1)) == {"pool": 0, "host": 0, "store": 3 * PAGE}
    assert one.ask([*text(1)[: 2 * PAGE], 9, 9, 9, 9, 9])["store"] == 2 * PAGE  # the page that differs is computed
    assert World(8, TierConfig(store=ADDRESS), identity="other").ask(text(1))["store"] == 0
    assert one.tiers.figures()["store"]["tokens"] == 3 * PAGE


def test_host_disk_and_store_together(shared: Shared, tmp_path: Any):
    one = world(disk=tmp_path, host_bytes=2 * 128)
    for number in range(6):
        one.ask(text(number))
    spill(one)
    assert sum(one.ask(text(0)).values()) == 3 * PAGE and shared.objects
    one.tiers.close(one.tree)
    again = world(disk=tmp_path)
    assert again.ask(text(0)) == {"pool": 0, "host": 0, "disk": 3 * PAGE, "store": 0}  # the nearest first
    far = world()
    assert [far.ask(text(number))["store"] for number in range(6)] == [3 * PAGE] * 6  # what was in memory, too
    assert shared.closed == 1


def test_a_page_that_is_not_what_was_written_is_computed_and_removed(shared: Shared, caplog: Any):
    one, two = world(), world()
    one.ask(text(1))
    spill(one)
    names = list(shared.objects)
    shared.objects[names[1]] = shared.objects[names[1]][:-1] + b"?"
    shared.objects[names[2]] = b"short"
    with caplog.at_level(logging.WARNING):
        assert two.ask(text(1))["store"] == PAGE  # `ask` compares every page that is read
    assert names[1] not in shared.objects and "checksum" in caplog.text and two.tiers.outer[0].damaged == 1


def test_a_full_store_drops_pages_and_counts_them(shared: Shared):
    shared.limit, one = 2, world()
    one.ask(text(1))
    spill(one)
    assert one.tiers.outer[0].dropped == 1 and not one.tiers.outer[0].off
    assert world().ask(text(1))["store"] == 2 * PAGE


def test_a_master_that_is_gone_is_asked_once_and_again_when_it_is_back(
    shared: Shared, monkeypatch: pytest.MonkeyPatch, caplog: Any
):
    now = [100.0]
    monkeypatch.setattr(store.time, "monotonic", lambda: now[0])
    one = world()
    one.ask(text(1))
    spill(one)
    shared.gone = True
    with caplog.at_level(logging.WARNING):
        assert one.ask(text(1))["store"] == 0
        calls = shared.calls
        one.ask(text(2))
        spill(one)
    assert shared.calls == calls and caplog.text.count("does not answer") == 1
    assert one.tiers.outer[0].dropped > 0
    shared.gone = False
    with socket.create_server(("127.0.0.1", 0)) as master:
        one.tiers.outer[0]._address = master.getsockname()  # type: ignore[attr-defined]
        now[0] += 1.0
        assert one.ask(text(1))["store"] == 0  # in memory
        spill(one)
        now[0] += store.RETRY_S
        assert world().ask(text(1))["store"] == one.ask(text(1))["store"] == 3 * PAGE
    shared.gone = True  # and while no connection is accepted, no call is made
    spill(one)
    one.ask(text(1))
    now[0] += store.RETRY_S + 1
    one.tiers.outer[0]._address = ("127.0.0.1", 0)  # type: ignore[attr-defined]
    calls = shared.calls
    spill(one)
    assert one.ask(text(1))["store"] == 0 and shared.calls == calls


@pytest.mark.parametrize("wrong", ["", "127.0.0.1:50051", "mooncake://", "mooncake://host", "mooncake://h:0", 7])
def test_addresses_that_are_none(wrong: Any):
    with pytest.raises(BadRequest, match="no store"):
        TierConfig(store=wrong)
    assert parse_address("mooncake://[::1]:50051") == ("::1", 50051)


def test_no_mooncake_and_no_master(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(BadRequest, match="cannot be imported") as found:
        open_mooncake(("127.0.0.1", 1), 0)
    assert "forerun[mooncake]" in found.value.hint
    fake = type(sys)("mooncake.store")
    fake.MooncakeDistributedStore = Shared  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mooncake.store", fake)
    with socket.socket() as bound:  # it does not listen, and no other socket can
        bound.bind(("127.0.0.1", 0))
        with pytest.raises(BadRequest, match="no Mooncake master answers at mooncake://127.0.0.1"):
            open_mooncake(bound.getsockname(), 0)
