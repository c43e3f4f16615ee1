"""Parts of several responses in one stream: all of them, in order, and the stream ends when none is open."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

import pytest

from forerun.ray import outbox
from forerun.ray.outbox import Outboxes


async def parts(number: int, count: int) -> AsyncIterator[tuple[str, Any]]:
    for part in range(count):
        await asyncio.sleep(0)
        yield "replica", (number, part)


async def read(boxes: Outboxes, front: str) -> tuple[dict[int, list[Any]], int]:
    found, batches = defaultdict[int, list[Any]](list), 0
    async for batch in boxes.batches(front):
        batches += 1
        for number, part in batch:
            found[number].append(part)
    return found, batches


async def test_all_parts_arrive_in_order_and_few_at_a_time_are_sent(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(outbox, "LINGER_S", 0.05)
    boxes = Outboxes()
    readers = [asyncio.create_task(read(boxes, front)) for front in "ab"]
    await asyncio.gather(*(boxes.fill("a" if number < 30 else "b", number, parts(number, 50)) for number in range(40)))
    (first, batches), (second, _) = [await reader for reader in readers]
    assert set(first) == set(range(30)) and set(second) == set(range(30, 40))
    for number, received in (first | second).items():
        assert received == [*((number, part) for part in range(50)), None]
    assert batches < 30 * 50 / 4
    assert not boxes._boxes


async def test_a_request_that_fails_or_is_cancelled_ends(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(outbox, "LINGER_S", 0.05)

    async def failing() -> AsyncIterator[tuple[str, Any]]:
        yield "replica", "first"
        raise ValueError

    async def endless() -> AsyncIterator[tuple[str, Any]]:
        yield "replica", "first"
        await asyncio.Event().wait()

    boxes = Outboxes()
    with pytest.raises(ValueError):
        await boxes.fill("a", 1, failing())
    open_one = asyncio.create_task(boxes.fill("a", 2, endless()))
    reader = asyncio.create_task(read(boxes, "a"))
    while boxes._boxes["a"].open == 0 or not boxes._boxes["a"].parts.empty():
        await asyncio.sleep(0.001)
    assert not reader.done()  # as long as one is open
    open_one.cancel()
    assert (await reader)[0] == {1: ["first", None], 2: ["first", None]}


async def test_parts_wait_for_a_reader_that_comes_later(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(outbox, "LINGER_S", 0.05)
    boxes = Outboxes()
    await boxes.fill("a", 1, parts(1, 3))
    assert (await read(boxes, "a"))[0] == {1: [(1, 0), (1, 1), (1, 2), None]}
    await boxes.fill("a", 2, parts(2, 1))  # after the stream has ended
    assert (await read(boxes, "a"))[0] == {2: [(2, 0), None]}
