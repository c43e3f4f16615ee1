"""The fuzz run: each kind of defect makes it not clean, and streams are told apart by what they received."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from forerun_research.scripts import serve_fuzz
from forerun_research.scripts.fuzz_requests import any_bytes, any_request, any_session, mutated
from forerun_research.scripts.serve_fuzz import Fuzzing, FuzzReport, Stall, memory_growth, problems
from forerun_research.scripts.serve_requests import LoadRequest

ASK = LoadRequest("Why?", 4, 0.0, 0)
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def clean() -> FuzzReport:
    report = FuzzReport(streams=3, gaps=[Stall(1.0, 10.0)], firsts=[Stall(2.0, 20.0)])
    report.statuses["400"] = 5
    return report


def verdict(report: FuzzReport, **more: Any) -> list[str]:
    given: dict[str, Any] = {"left": {}, "errors": [], "growth": 0.0, "exit_status": 0} | more
    return problems(report, **given)


def test_a_run_without_defects_is_clean():
    report = clean()
    report.find_stalls(share=0.5, wait=0.5)
    assert verdict(report, growth=serve_fuzz.MAX_GROWTH_MB) == []


@pytest.mark.parametrize("name", ["changed", "lost", "stalled", "failures"])
def test_one_entry_of_any_kind_is_enough(name: str):
    report = clean()
    getattr(report, name).append("x")
    assert len(verdict(report)) == 1


@pytest.mark.parametrize(
    "more", [{"left": {"answers_open": 1}}, {"errors": ["x"]}, {"growth": 33.0}, {"exit_status": -9}], ids=str
)
def test_what_the_server_leaves_behind_counts(more: dict[str, Any]):
    assert len(verdict(clean(), **more)) == 1


def test_a_run_without_streams_or_fuzzers_is_not_clean():
    empty, alone = FuzzReport(), clean()
    alone.statuses.clear()
    assert verdict(empty) and verdict(alone)


def test_stalls_are_beyond_the_share_and_name_what_ran_beside_them():
    report = clean()
    report.gaps.append(Stall(3.1, 50.0))
    report.sent = [(1.0, 46.0, "before"), (2.0, 47.5, "beside"), (51.0, 52.0, "after")]
    report.find_stalls(share=1.0, wait=0.1)
    assert len(report.stalled) == 1 and "beside" in report.stalled[0]
    assert "before" not in report.stalled[0] and "after" not in report.stalled[0]
    report.find_stalls(share=2.0, wait=-1.0)
    assert len(report.stalled) == 2  # the first token, now that its share is smaller


def test_memory_is_flat_or_not():
    noisy = [500.0 + 40 * (number % 2) for number in range(300)]
    assert memory_growth(noisy) == 0 and memory_growth([]) == 0
    assert memory_growth([100.0 + number for number in range(300)]) > 140
    assert memory_growth([float(number) for number in range(100)] + [100.0] * 200) < 1  # while caches fill


def chunk(*events: Any) -> bytes:
    body = b"".join(b"data: " + (event if isinstance(event, bytes) else json.dumps(event).encode()) + b"\n\n"
                    for event in events)  # fmt: skip
    return b"%x\r\n%s\r\n" % (len(body), body)


def delta(text: str) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}}]}


def streamed(reply: bytes) -> FuzzReport:
    """One stream from a server that sends these bytes and closes."""

    async def run() -> FuzzReport:
        async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(reply)
            writer.close()

        server = await asyncio.start_server(respond, "127.0.0.1", 0)
        async with server:
            fuzzing = Fuzzing("127.0.0.1", server.sockets[0].getsockname()[1], 0)
            await fuzzing.stream(ASK, "So it is.")
            return fuzzing.report

    return asyncio.run(run())


def test_a_whole_stream_is_compared():
    good = streamed(HEAD + chunk(delta("")) + chunk(delta("So it")) + chunk(delta(" is."), b"[DONE]"))
    assert (good.streams, good.changed, good.lost, len(good.gaps), len(good.firsts)) == (1, [], [], 1, 1)
    other = streamed(HEAD + chunk(delta("")) + chunk(delta("So it")) + chunk(delta(" was."), b"[DONE]"))
    assert len(other.changed) == 1 and not other.lost


@pytest.mark.parametrize("reply", [b"", b"HTTP/1.1 429 Too Many Requests\r\n\r\n", HEAD + chunk(delta("So it is."))])
def test_a_stream_without_its_end_is_lost(reply: bytes):
    report = streamed(reply)
    assert len(report.lost) == 1 and not report.changed


@pytest.mark.parametrize("make", [any_request, mutated, any_session])
def test_requests_are_the_same_for_the_same_seed_and_of_many_kinds(make: Callable[..., tuple[str, dict[str, Any]]]):
    def drawn(seed: int) -> list[tuple[str, str]]:
        draws = random.Random(seed)
        return [(path, json.dumps(body)) for path, body in (make(draws, "m") for _ in range(200))]

    assert drawn(1) == drawn(1) != drawn(2)
    if make is mutated:
        paths = {path for path, _ in drawn(1)}
        assert {"/v1/messages", "/v1/responses", "/v1/completions", "/tokenize"} < paths
    draws = random.Random(1)
    assert all(isinstance(any_bytes(draws, "m"), bytes) for _ in range(8))
