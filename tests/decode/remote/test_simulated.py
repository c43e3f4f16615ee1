"""Whole answers with a drafter behind a simulated network: never below plain decoding, whatever the round trip, and
nothing is waited for that is not worth it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forerun.decode.drafters.remote import RoundTrips
from tests.decode.remote.simulated import NAME, ONE_CORE, Network, RemoteWorld
from tests.decode.simulator import CATEGORIES, Text, World

TOKENS = 64
ROUND_TRIPS_S = (0.0, 0.02, 0.05, 0.1)


def against_plain(network: Network, category: str, seeds: range, before: int = 0) -> list[float]:
    """Speed of single answers, each in a process of its own that has answered `before` others."""
    found, kind = [], replace(CATEGORIES[category], tokens=TOKENS)
    for seed in seeds:
        world, text = RemoteWorld(network), Text(kind, seed)
        for other in range(before):
            world.answer([Text(kind, 100 + 10 * seed + other)])
        found.append(World(ONE_CORE, ("lookup",)).answer([text], plain=True)[0] / world.answer([text])[0])
    return found


@pytest.mark.parametrize("round_trip_s", ROUND_TRIPS_S)
@pytest.mark.parametrize("category", ["code", "maths", "chat"])
def test_no_answer_is_below_plain_at_any_round_trip(category: str, round_trip_s: float) -> None:
    first = against_plain(Network(round_trip_s), category, range(3))
    later = against_plain(Network(round_trip_s), category, range(50, 53), before=2)
    assert min(*first, *later) >= 0.97
    assert sum(first) >= 3.0 and sum(later) >= 3.0


@pytest.mark.parametrize("round_trip_s", [0.0, 0.1])
@pytest.mark.parametrize("category", ["code", "maths", "chat"])
def test_a_server_that_slows_the_target_down_is_used_only_where_it_gains(category: str, round_trip_s: float) -> None:
    shared_bus = Network(round_trip_s, slowdown=1.3)
    assert min(against_plain(shared_bus, category, range(3))) >= 0.95  # the first answer of all finds it out
    assert min(against_plain(shared_bus, category, range(50, 53), before=2)) >= 0.97


def test_a_near_server_is_worth_it_for_code() -> None:
    assert sum(against_plain(Network(0.0), "code", range(3))) / 3 >= 1.2


def test_a_server_that_never_answers_is_not_waited_for() -> None:
    assert min(against_plain(Network(0.02, silent=True), "code", range(3))) >= 0.99


def test_slowdown_is_measured() -> None:
    for slowdown in (1.0, 1.3):
        world = RemoteWorld(Network(0.1, slowdown=slowdown))
        world.answer([Text(replace(CATEGORIES["code"], tokens=TOKENS), 1)])
        assert world.server.orders
        assert world.controller.slowdowns[NAME].extra == pytest.approx(slowdown - 1.0, abs=0.12)


def test_a_draft_ordered_some_tokens_ago_is_not_waited_for() -> None:
    """By then all these tokens have to be right before it is of any use."""
    world = RemoteWorld(Network(0.1))
    world.answer([Text(replace(CATEGORIES["maths"], tokens=TOKENS), 2)])
    assert world.server.orders > 2
    assert world.condition.waited_s < 0.05 * world.clock.now


def test_guesses_that_never_hit_are_tried_now_and_then() -> None:
    trips = RoundTrips()
    for _ in range(40):
        trips.observe_guess(hit=False)
    tried = [trips.guess_pays() for _ in range(40)]
    assert 1 <= sum(tried) <= 4
