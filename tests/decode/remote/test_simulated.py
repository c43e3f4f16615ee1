"""Whole answers with a drafter behind a simulated network: never below plain decoding, whatever the round trip, and
nothing is waited for that is not worth it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from forerun.decode.control.acceptance import RequestStats
from forerun.decode.control.cost import ServerRounds, Slowdown
from forerun.decode.drafters.remote import RoundTrips
from tests.decode.remote.simulated import NAME, ONE_CORE, Network, RemoteWorld
from tests.decode.simulator import CATEGORIES, Text, World

TOKENS = 64
ROUND_TRIPS_S = (0.0, 0.02, 0.05, 0.1)


def name_drafters(world: RemoteWorld) -> None:
    """Requests name their drafters."""
    begin = world.controller.new_request

    def named(*given: Any, **more: Any) -> RequestStats:
        stats = begin(*given, **more)
        stats.named = True
        return stats

    world.controller.new_request = named  # type: ignore[method-assign]


def against_plain(network: Network, category: str, seeds: range, before: int = 0, named: bool = False) -> list[float]:
    """Speed of single answers, each in a process of its own that has answered `before` others; `named`: requests name
    their drafters."""
    found, kind = [], replace(CATEGORIES[category], tokens=TOKENS)
    for seed in seeds:
        world, text = RemoteWorld(network), Text(kind, seed)
        if named:
            name_drafters(world)
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


@pytest.mark.parametrize("slowdown", [1.3, 1.6])
def test_a_near_server_on_the_same_bus_takes_turns_with_the_target(slowdown: float) -> None:
    """As a draft model in the target's own process would: nothing is computed beside steps, and drafts gain."""
    for category, least in (("code", 1.1), ("maths", 1.0), ("chat", 0.97)):
        found = against_plain(Network(0.0, slowdown), category, range(8), before=1, named=True)
        assert sum(found) / len(found) >= least
    assert min(against_plain(Network(0.1, slowdown), "code", range(4), before=1, named=True)) >= 0.97


@pytest.mark.parametrize(("slowdown", "gain"), [(1.0, 1.02), (1.3, 1.1)])
def test_a_round_of_several_tokens_gains_more_than_one_of_each(slowdown: float, gain: float) -> None:
    """Near by; and far away it loses nothing either."""
    near, block = Network(0.0, slowdown), ServerRounds(12, 0.1)
    chains, blocks = (against_plain(n, "code", range(6), before=2) for n in (near, replace(near, rounds=block)))
    assert sum(blocks) >= gain * sum(chains) and min(blocks) >= 0.97
    for category in ("maths", "chat"):
        for round_trip_s in (0.0, 0.05, 0.1):
            network = Network(round_trip_s, slowdown, rounds=block)
            assert min(against_plain(network, category, range(3), before=1)) >= 0.97


@pytest.mark.parametrize("category", ["code", "maths", "chat"])
def test_a_far_server_on_the_same_bus_is_left_alone_where_steps_were_timed_beside_it(category: str) -> None:
    """By name, and in the first answer of all: reading its prompt there would be lost."""
    kind = replace(CATEGORIES[category], tokens=TOKENS)
    for seed, timed in ((0, 1.4), (1, 1.1), (2, 1.1)):  # steps beside a prompt that is read are slower than those timed
        world, text = RemoteWorld(Network(0.05, slowdown=1.4)), Text(kind, seed)
        name_drafters(world)
        slowdown = world.controller.slowdowns[NAME]
        slowdown.measured(1.0, timed)
        slowdown.round_s, slowdown.way_s = 0.02, 0.05
        seconds = World(ONE_CORE, ("lookup",)).answer([text], plain=True)[0]
        assert seconds / world.answer([text])[0] >= 0.97
    assert slowdown.takes_turns


def test_drafts_in_turn_are_as_deep_as_the_server_is_sure() -> None:
    kind, found = replace(CATEGORIES["code"], tokens=TOKENS), {}
    for stated in (0.8, 0.99):
        world = RemoteWorld(Network(0.0, slowdown=1.6))
        name_drafters(world)
        slowdown = world.controller.slowdowns[NAME]
        slowdown.measured(1.0, 1.6)
        slowdown.round_s = world.server.round_s
        world.spec.drafter_pool[NAME].counts["trees"] = 1  # a round's length is known
        world.stated = stated
        world.answer([Text(kind, 2)])
        found[stated] = world.server.depths[:6]
    assert max(found[0.8]) <= 4 and max(found[0.99]) > 8


@pytest.mark.parametrize(("slowdown", "timed"), [(1.4, 1.4), (1.6, 1.15)])
def test_mixed_answers_of_one_process_are_never_below_plain(slowdown: float, timed: float) -> None:
    """Reading is begun where each token left can win it back, also where steps beside it are slower than those timed;
    and a draft in turn has to gain over what free drafters have already."""
    order, seconds = ("chat", "code", "roleplay", "edits", "chat", "translation", "maths", "edits"), [0.0, 0.0]
    for seed in range(3):
        world, free = RemoteWorld(Network(0.0, slowdown)), World(ONE_CORE, ("lookup",))
        known = world.controller.slowdowns[NAME]
        known.measured(1.0, timed)
        drafter = world.spec.drafter_pool[NAME]
        known.round_s = drafter.trips.round_s = world.server.round_s
        drafter.counts["trees"] = 1  # a round's length is known
        for number, category in enumerate(order):
            kind = replace(CATEGORIES[category], tokens=min(TOKENS, CATEGORIES[category].tokens))
            text = Text(kind, 100 * seed + number)
            taken = world.answer([text])[0]
            assert World(ONE_CORE, ("lookup",)).answer([text], plain=True)[0] / taken >= 0.97
            if category == "edits":
                seconds = [sum(pair) for pair in zip(seconds, (free.answer([text])[0], taken), strict=True)]
    assert seconds[0] / seconds[1] >= 0.82  # 0.74 where a draft in turn counts whole beside free ones


def test_slowdown_that_was_timed_replaces_what_is_assumed() -> None:
    slowdown = Slowdown(shares_memory=True)
    assert slowdown.extra == pytest.approx(0.15) and not slowdown.takes_turns  # what a round takes is not known
    slowdown.round_s = 0.02
    for seconds, extra, turns in ((0.051, 0.02, False), (0.056, 0.12, True), (0.07, 0.4, True)):
        slowdown.measured(0.05, seconds)
        assert slowdown.extra == pytest.approx(extra, abs=1e-3) and slowdown.takes_turns == turns


def test_no_order_is_in_flight_beside_steps_of_a_target_that_takes_turns() -> None:
    world = RemoteWorld(Network(0.0, slowdown=1.6))
    name_drafters(world)
    kind = replace(CATEGORIES["code"], tokens=TOKENS)
    world.answer([Text(kind, 1)])
    drafter, trees = world.spec.drafter_pool[NAME], world.server.orders
    assert world.controller.slowdowns[NAME].takes_turns
    before = drafter.figures()["guesses"]
    world.answer([Text(kind, 2)])
    assert world.server.orders > trees + 5 and drafter.figures()["guesses"] == before


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


def test_the_measured_round_trip_decides_between_ordinary_and_parallel_drafting() -> None:
    """A guess that hits saves the way there and back, one that misses is late by the round that runs."""
    for network_s, parallel in ((0.0, False), (0.1, True)):
        trips = RoundTrips()
        trips.hits, trips.round_s, trips.server_s, trips.network_s = 0.4, 0.02, 0.001, network_s
        assert [trips.guess_pays() for _ in range(8)] == [parallel] * 8


def test_one_slow_tree_does_not_decide_what_a_server_takes() -> None:
    trips = RoundTrips()
    trips.round_s, trips.network_s = 0.014, 0.016
    trips.at_most(0.010, 0.002)
    assert (trips.round_s, trips.network_s) == (0.010, 0.002)
    trips.at_most(0.0, 0.05)  # a server that says nothing of its rounds, a slow handshake
    assert (trips.round_s, trips.network_s) == (0.010, 0.002)
