"""Pins hold pages for their time, and not longer."""

from __future__ import annotations

import torch

from forerun.cache.pins import Pins
from forerun.cache.pool import PagePool
from forerun.models.config import ModelConfig

CONFIG = ModelConfig("llama", 64, 16, 1, 1, 1, 2, 32, 512)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make() -> tuple[PagePool, Pins, Clock, list[int]]:
    pool, clock = PagePool(CONFIG, 8, 4, torch.float32, torch.device("cpu")), Clock()
    return pool, Pins(pool, clock), clock, pool.allocate(4)


def test_a_pin_holds_until_its_time_is_over_and_use_renews_it():
    pool, pins, clock, pages = make()
    pins.hold("unknown", pages)
    assert pins.num_pages == 0
    pins.open("a", 10.0)
    pins.hold("a", pages)
    pool.release(pages)
    clock.now = 9.0
    pins.hold("a", pages[:2])
    assert pool.used == 2
    clock.now = 18.0
    pins.expire()
    assert pool.used == 2
    clock.now = 19.0
    pins.begin("a")
    clock.now = 99.0
    pins.expire()  # never in the middle of a turn
    assert pool.used == 2
    pins.end("a")
    clock.now = 110.0
    pins.expire()
    assert pool.used == 0 and "a" in pins
    pins.close("a")
    assert "a" not in pins


def test_the_longest_unused_is_given_up_first_and_turns_last():
    pool, pins, _, pages = make()
    for name, page in zip("abc", pages, strict=False):
        pins.open(name, 10.0)
        pins.hold(name, [page])
    pool.release(pages)
    pins.begin("a")
    pins.begin("b")
    assert pins.give_up(sparing=None) and pool.refs[pages[2]] == 0
    assert not pins.give_up(sparing=None)
    assert pins.give_up(sparing="a", in_turn=True) and pool.refs[pages[0]] == 1 and pool.refs[pages[1]] == 0
    assert not pins.give_up(sparing="a", in_turn=True)
    assert pins.give_up_any("a") and pool.used == 0 and not pins.give_up_any("a")


def test_pins_of_one_owner():
    pool, pins, _, pages = make()
    pins.open("a", 10.0, ("ann", 2.0))
    pins.open("b", 10.0)
    pins.begin("b", ("bob", 1.0))
    pins.end("b")
    for name, page in zip("ab", pages, strict=False):
        pins.hold(name, [page])
    pool.release(pages)
    pins.open("a", 20.0)  # stays ann's
    assert pins.owners == {"ann": 2.0, "bob": 1.0} and not pins.give_up(sparing=None, owner="eve")
    assert pins.give_up(sparing=None, owner="bob") and pins.owners == {"ann": 2.0} and pool.used == 1
    pins.close("a")
