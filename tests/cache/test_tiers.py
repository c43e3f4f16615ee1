"""Host and disk tiers against a plain dictionary: what comes back is what was computed, or nothing."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from forerun.cache.pins import Pins
from forerun.cache.pool import PagePool
from forerun.cache.prefix import PrefixTree
from forerun.cache.tiers import TierConfig, Tiers
from forerun.errors import BadRequest
from forerun.models.config import ModelConfig

CONFIG = ModelConfig("llama", 64, 16, 2, 1, 1, 2, 32, 512)
PAGE = 4
PAGE_BYTES = 2 * 2 * PAGE * 2 * 4


class World:
    """A pool with a tree and tiers, whose K/V follows from the tokens: no model is needed to tell right from wrong."""

    def __init__(self, pages: int, config: TierConfig, identity: str = "model", dtype: torch.dtype = torch.float32):
        self.pool = PagePool(CONFIG, pages, PAGE, dtype, torch.device("cpu"))
        self.tree = PrefixTree(self.pool)
        self.tiers = Tiers(self.pool, config, identity)
        self.tree.on_evict = self.tiers.spill
        self.pins = Pins(self.pool)

    def ask(self, tokens: list[int]) -> dict[str, int]:
        """What the scheduler does for a prompt; every page that is read must hold what its tokens give."""
        known = self.tree.match(tokens)
        self.pool.retain(known)
        served = {"pool": len(known) * PAGE}
        missing = len(tokens) // PAGE - len(known)
        if missing > self.pool.free:
            self.tree.evict(missing - self.pool.free)
        if missing > self.pool.free:
            self.pool.release(known)
            return served
        restored, more = self.tiers.restore(tokens, known)
        pages = [*known, *restored]
        for i, page in enumerate(pages):
            self.check(tokens[: (i + 1) * PAGE], page)
        for i in range(len(pages), len(tokens) // PAGE):
            pages += self.pool.allocate(1)
            self.compute(tokens[: (i + 1) * PAGE], pages[-1])
        self.tree.insert(tokens, pages)
        self.pool.release(pages)
        return served | more

    def compute(self, prefix: list[int], page: int) -> None:
        for number, cache in enumerate(cache for layer in self.pool.kv for cache in layer):
            cache[page * PAGE : (page + 1) * PAGE] = value(prefix, number)

    def check(self, prefix: list[int], page: int) -> None:
        for number, cache in enumerate(cache for layer in self.pool.kv for cache in layer):
            assert (cache[page * PAGE : (page + 1) * PAGE] == value(prefix, number)).all(), prefix

    def crash(self) -> None:
        """The process is gone: what was not written is lost, and so is the lock."""
        disk = self.tiers.disk
        assert disk is not None
        with disk._changed:
            disk._queue.clear()
            disk._closed = True
            disk._changed.notify_all()
        if disk._thread is not None:
            disk._thread.join()
        disk._alive.release()

    def spill_all(self) -> None:
        self.tree.evict(self.pool.num_pages)
        if self.tiers.disk is not None:
            self.tiers.disk.flush()


def value(prefix: list[int], number: int) -> float:
    return float(hash((tuple(prefix), number)) % 1000)


def text(*runs: int) -> list[int]:
    return [token for token in runs for _ in range(PAGE)]


def test_evicted_pages_come_back_from_host_memory_and_then_from_disk(tmp_path: Path):
    world = World(8, TierConfig(host_bytes=2 * PAGE_BYTES, disk=tmp_path))
    world.ask(text(1, 2, 3, 4))
    world.spill_all()
    assert world.tree.num_pages == 0 and world.pool.used == 0
    served = world.ask(text(1, 2, 3, 4))
    assert served["host"] == served["disk"] == 2 * PAGE and served["pool"] == 0
    assert world.ask(text(1, 2, 9))["pool"] == 2 * PAGE


def test_only_the_prefix_up_to_the_first_unknown_page_is_read(tmp_path: Path):
    world = World(8, TierConfig(disk=tmp_path))
    world.ask(text(1, 2, 3))
    world.spill_all()
    assert world.ask(text(1, 7, 3))["disk"] == PAGE  # the same page after other tokens is another page
    assert world.tiers.keys(b"") == []


def test_a_new_process_reads_what_an_earlier_one_wrote_at_its_end(tmp_path: Path):
    world = World(8, TierConfig(disk=tmp_path))
    world.ask(text(1, 2, 3))
    world.ask(text(1, 2, 4))
    world.tiers.close(world.tree)
    world = World(8, TierConfig(disk=tmp_path))
    assert world.ask(text(1, 2, 4, 5))["disk"] == 3 * PAGE and world.ask(text(1, 2, 3))["disk"] == PAGE


@pytest.mark.parametrize("changes", [{"identity": "another"}, {"dtype": torch.float64}])
def test_another_models_pages_are_not_read(tmp_path: Path, changes: dict):
    first = World(8, TierConfig(disk=tmp_path))
    first.ask(text(1, 2, 3))
    first.tiers.close(first.tree)
    second = World(8, TierConfig(disk=tmp_path), **changes)
    assert second.ask(text(1, 2, 3))["disk"] == 0
    second.tiers.close(second.tree)
    third = World(8, TierConfig(disk=tmp_path))  # and are left alone
    assert third.ask(text(1, 2, 3))["disk"] == 3 * PAGE


@pytest.mark.parametrize("host_pages", [0, 5])
def test_random_use_with_crashes_and_damage_agrees_with_what_the_tokens_give(tmp_path: Path, host_pages: int):
    draw = random.Random(host_pages)
    config = TierConfig(host_bytes=host_pages * PAGE_BYTES, disk=tmp_path, disk_bytes=400_000)
    world, restarts, served = World(24, config), 0, dict.fromkeys(("pool", "host", "disk"), 0)
    for _ in range(1500):
        prob = draw.random()
        tokens = text(*(draw.randrange(3) for _ in range(draw.randrange(1, 9))))
        if prob < 0.8:
            for name, count in world.ask(tokens).items():
                served[name] += count
        elif prob < 0.88:
            world.tree.evict(draw.randrange(1, 24))
        elif prob < 0.93:
            name = draw.choice("ab")
            world.pins.open(name, 60.0)
            world.pins.hold(name, world.tree.match(tokens))
        elif prob < 0.95:
            world.pins.close(draw.choice("ab"))
        elif prob < 0.96:
            world.tree.clear()
            world.tiers.clear()
        elif prob < 0.98:
            damage(tmp_path, draw)
        else:
            world.crash() if draw.random() < 0.5 else world.tiers.close(world.tree)
            world, restarts = World(24, config), restarts + 1
        assert int(world.pool.refs.sum()) == world.tree.num_pages + world.pins.num_pages
    assert restarts > 5 and served["disk"] > 100 and bool(served["host"]) == bool(host_pages)
    world.pins.clear()
    world.tree.clear()
    assert world.pool.used == 0
    world.tiers.close(world.tree)


def damage(folder: Path, draw: random.Random) -> None:
    files = sorted(folder.glob("*.safetensors"))
    if files:
        path = draw.choice(files)
        data = bytearray(path.read_bytes())
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"host_bytes": -1}, "host_bytes is -1"),
        ({"host_bytes": True}, "host_bytes is True"),
        ({"disk_bytes": 0}, "disk_bytes is 0"),
        ({"disk": 3}, "disk is 3"),
        ({"disk": ""}, "disk is ''"),
    ],
)
def test_wrong_settings_are_refused(values: dict, said: str):
    with pytest.raises(BadRequest, match=said):
        TierConfig(**values)


def test_a_host_tier_of_less_than_a_page_is_refused():
    with pytest.raises(BadRequest, match="a page has 128 bytes"):
        World(8, TierConfig(host_bytes=PAGE_BYTES - 1))
