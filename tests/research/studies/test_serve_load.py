"""The load run's own parts: a judge of servers must read their answers right."""

from __future__ import annotations

import asyncio
import copy
import json
from typing import Any

import psutil
import pytest

from forerun_research.scripts import serve_load
from forerun_research.scripts.serve_clients import ClientAnswer, ask_once, dechunked, outcomes
from forerun_research.scripts.serve_requests import LoadRequest, mixed
from forerun_research.scripts.serve_sides import Memory

ASK = LoadRequest("Who counts the ships?", 8, 0.0, 1)


def test_requests_are_the_same_each_time_and_of_all_kinds():
    asks = mixed(200, seed=3, leaving=0.2)
    assert asks == mixed(200, seed=3, leaving=0.2) != mixed(200, seed=4, leaving=0.2)
    assert 40 < sum(ask.greedy for ask in asks) < 160 and 10 < sum(ask.leave_after > 0 for ask in asks) < 80
    assert min(len(ask.content) for ask in asks) < 200 < 1000 < max(len(ask.content) for ask in asks)
    assert json.loads(ASK.http("m", "h").partition(b"\r\n\r\n")[2])["stream"] is True


def response(*chunks: dict[str, Any], done: bool = True) -> bytes:
    events = [f"data: {json.dumps(chunk, separators=(',', ':'))}\n\n".encode() for chunk in chunks]
    events += [b"data: [DONE]\n\n"] if done else []
    body = b"".join(b"%x\r\n%s\r\n" % (len(event), event) for event in events)
    return b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + body


def says(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}}]}


USAGE = {"choices": [], "usage": {"completion_tokens": 2}}


async def serve_bytes(data: bytes, ask: LoadRequest = ASK) -> ClientAnswer:
    """One answer from a server that says just that, in two pieces, and hangs up."""

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in (data[: len(data) // 2], data[len(data) // 2 :]):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.001)
        writer.close()

    server = await asyncio.start_server(speak, "127.0.0.1", 0)
    async with server:
        return await ask_once("127.0.0.1", server.sockets[0].getsockname()[1], "m", ask)


async def test_a_whole_answer_is_read():
    answer = await serve_bytes(response(says(""), says("the sé"), says("a"), USAGE))
    assert (answer.text, answer.tokens, answer.complete, answer.error) == ("the séa", 2, True, "")
    assert 0 < answer.first_s <= answer.total_s and dechunked(b"") == b""
    assert outcomes([answer]) == {"complete": 1}


async def test_an_answer_that_ends_too_soon_is_an_error():
    answer = await serve_bytes(response(says("the"), done=False))
    assert not answer.complete and answer.text == "the" and outcomes([answer]) == {"the stream ended too soon": 1}


async def test_a_client_that_leaves_is_no_error():
    leaving = LoadRequest("x", 8, 0.0, 1, leave_after=1)
    answer = await serve_bytes(response(*[says("word")] * 50), leaving)
    assert answer.left and outcomes([answer]) == {"left by the client": 1}


@pytest.mark.parametrize(("header", "name"), [(b"Retry-After: 2\r\n", "429 announced"), (b"", "status 429")])
async def test_only_announced_refusals_are_as_they_should_be(header: bytes, name: str):
    answer = await serve_bytes(b"HTTP/1.1 429 Too Many\r\n" + header + b"content-length: 2\r\n\r\n{}")
    assert outcomes([answer]) == {name: 1} and (name in serve_load.EXPECTED_OUTCOMES) is bool(header)


async def test_no_server_answers():
    answer = await ask_once("127.0.0.1", 1, "m", ASK)
    assert answer.error.startswith("no connection")


def test_the_slope_of_memory():
    memory = Memory(psutil.Process(), [(float(t), 100.0 + (50.0 if t < 20 else 70.0 + t / 6)) for t in range(60)])
    assert memory.slope(1 / 3) == pytest.approx(10.0)
    assert Memory(psutil.Process(), [(0.0, 1.0)]).slope(0.3) == 0.0


GOOD: dict[str, Any] = {
    "first": {"added_ms": 3.0, "server_ms": 10.0, "library_ms": 7.0},
    "throughput": {"overhead": 0.02, "greedy_different": 0, "server_tokens_per_s": 98.0, "library_tokens_per_s": 100.0},
    "load": {
        "growth_mb": 1.0,
        "greedy_different": 0,
        "sampled_different": 0,
        "greedy_compared": 5,
        "outcomes": {"complete": 9, "429 announced": 1},
        "open_afterwards": 0,
        "slope_mb_per_minute": 0.1,
        "resident_mb": {"last": 500.0},
    },
}


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("first", "added_ms", 15.0),
        ("throughput", "overhead", 0.06),
        ("throughput", "greedy_different", 1),
        ("load", "growth_mb", 50.0),
        ("load", "greedy_different", 1),
        ("load", "greedy_compared", 0),
        ("load", "outcomes", {"complete": 9, "status 500": 1}),
        ("load", "open_afterwards", 1),
    ],
)
def test_every_bound_can_break(part: str, name: str, value: Any):
    assert serve_load.broken(GOOD) == []
    bad = copy.deepcopy(GOOD)
    bad[part][name] = value
    assert len(serve_load.broken(bad)) == 1
    assert serve_load.table(bad | {"broken": serve_load.broken(bad)}).row_count >= 5
