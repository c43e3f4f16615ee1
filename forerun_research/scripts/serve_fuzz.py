"""Fuzzing beside checked streams: parameters, grammars, schemas, bodies and sockets against a real `forerun serve`.

    python -m forerun_research.scripts.serve_fuzz [--minutes 30] [--streams 8] [--fuzzers 8] [--model NAME] [--seed 0]

Streams ask the same questions again and again; each answer has to be the library's. A calm phase without fuzzers
measures the longest gap between two events and the longest wait for the first; a stream's share is that, times the
number of all clients over that of streams. One verdict at the end, exit status 1 where it is not clean: no stream
changed, lost, or stalled for more than 2 s beyond its share; no 5xx; memory flat after the first third; every page back
in the pool.
`--streams 58 --fuzzers 6 --minutes 5` is the load of 64 clients of which a tenth is hostile.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import signal
import socket
import struct
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from forerun_research.scripts.fuzz_requests import CHAT, any_bytes, any_request, any_session, mutated
from forerun_research.scripts.serve_clients import dechunked
from forerun_research.scripts.serve_requests import LoadRequest, mixed
from forerun_research.scripts.serve_sides import NAME, LibrarySide, Memory, ServerSide

MAX_STALL_S = 2.0  # of a stream, beyond its share
MAX_GROWTH_MB = 32.0  # of resident memory after the first third
CALM_SHARE, MAX_CALM_S = 0.2, 60.0  # of the time, without fuzzers
TICK_S = 0.05
FUZZ_TIMEOUT_S = 120.0  # for one request of a fuzzer
WARM_UP_SHARE = 1 / 3
EXPECTED = (200, 400, 401, 404, 405, 408, 409, 411, 413, 415, 421, 429, 431, 501)


@dataclass
class FuzzReport:
    streams: int = 0
    changed: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    stalled: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)  # the longest of each stream
    firsts: list[float] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    late_s: float = 0.0
    failures: list[str] = field(default_factory=list)  # 5xx, with what was sent


class Fuzzing:
    def __init__(self, host: str, port: int, seed: int) -> None:
        self.host, self.port, self.seed = host, port, seed
        self.report = FuzzReport()
        self.late_s, self.ticked = 0.0, time.perf_counter()  # that this process itself was late: paused, without a core

    def clock(self) -> float:
        """Time without what this process was paused for."""
        now = time.perf_counter()
        return now - self.late_s - self._late(now)  # after a pause what was received may be read before the next tick

    def _late(self, now: float) -> float:
        return max(0.0, now - self.ticked - 2 * TICK_S)

    async def watch_clock(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now = time.perf_counter()
            self.late_s, self.ticked = self.late_s + self._late(now), now

    # -- streams -------------------------------------------------------------------------------------------------------

    async def streams(self, asks: list[LoadRequest], texts: list[str], seconds: float) -> None:
        end = time.perf_counter() + seconds

        async def client(number: int) -> None:
            for at in itertools.count(number):
                if time.perf_counter() > end:
                    return
                await self.stream(asks[at % len(asks)], texts[at % len(asks)])

        await asyncio.gather(*(client(number) for number in range(len(asks))))

    async def stream(self, ask: LoadRequest, expected: str) -> None:
        report, raw, longest, first = self.report, bytearray(), 0.0, 0.0
        begun = last = self.clock()
        try:
            reader, writer = await asyncio.open_connection(self.host, self.port)
            writer.write(ask.http(NAME, self.host))
            while b"data: [DONE]" not in raw[-64:] and (piece := await reader.read(65536)):
                raw += piece
                now = self.clock()
                if raw.count(b"data: ", 0, 8192) > 1:  # the first has no text
                    longest, first = max(longest, now - last) if first else 0.0, first or now - begun
                last = now
            writer.close()
        except OSError as error:
            report.lost.append(str(error))
            return
        report.streams += 1
        if b"data: [DONE]" not in raw[-64:]:
            if raw[9:12] == b"429":
                report.statuses["429 of a stream"] += 1
                await asyncio.sleep(0.5)
            else:
                report.lost.append(bytes(raw[-300:]).decode("utf-8", "replace"))
            return
        report.gaps.append(longest)
        report.firsts.append(first)
        lines = dechunked(bytes(raw.partition(b"\r\n\r\n")[2])).split(b"\n\n")
        events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
        text = "".join(c["delta"].get("content") or "" for event in events for c in event.get("choices", ()))
        if text != expected:
            report.changed.append(f"{ask.content[:60]!r}: {text[:80]!r} for {expected[:80]!r}")

    # -- fuzzers -------------------------------------------------------------------------------------------------------

    async def fuzz(self, number: int, until: float) -> None:
        draws = random.Random(f"{self.seed}-{number}")
        while time.perf_counter() < until:
            kind = draws.choice((self._request, self._request, self._bytes, self._socket))
            try:
                await asyncio.wait_for(kind(draws), FUZZ_TIMEOUT_S)
            except TimeoutError:
                self.report.statuses["no answer in time"] += 1
                self.report.failures.append(f"no answer to {kind.__name__} within {FUZZ_TIMEOUT_S:g} s")
            except OSError:
                self.report.statuses["closed"] += 1

    async def _request(self, draws: random.Random) -> None:
        path, body = draws.choice((any_request, any_request, mutated, any_session))(draws, NAME)
        await self._post(path, json.dumps(body).encode())

    async def _bytes(self, draws: random.Random) -> None:
        path = draws.choice((CHAT, "/v1/completions", "/v1/messages", "/v1/responses", "/tokenize", "/forerun/tokens"))
        await self._post(path, any_bytes(draws, NAME))

    async def _post(self, path: str, body: bytes) -> None:
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            writer.write(_head(path, len(body), "Connection: close\r\n") + body)
            raw = await reader.read(-1)
        finally:
            writer.close()
        self._count(raw, body)

    def _count(self, raw: bytes, sent: bytes) -> None:
        status = int(raw[9:12]) if raw[9:12].isdigit() else 0
        self.report.statuses[str(status or "closed")] += 1
        failed = b'"server_error"' in raw or b'"api_error"' in raw
        if status != 501 and (failed or (status and status not in EXPECTED)):
            self.report.failures.append(f"{raw[-400:]!r} to {sent[:600]!r}")

    async def _socket(self, draws: random.Random) -> None:
        """A client that misuses its connection; what it gets back, if anything, is counted."""
        asked = LoadRequest("Count to a thousand.", 400, 0.0, 0).http(NAME, self.host)
        reader, writer = await asyncio.open_connection(self.host, self.port)

        async def pause() -> None:
            await asyncio.sleep(draws.random() * 3)

        kind = draws.randrange(9)
        self.report.statuses[f"socket {kind}"] += 1
        with contextlib.closing(writer):
            if kind == 0:  # nothing at all
                await pause()
            elif kind == 1:  # a part of the head
                writer.write(asked[: draws.randrange(1, 60)])
                await pause()
            elif kind == 2:  # slowly
                for at in range(0, 200, 10):
                    writer.write(asked[at : at + 10])
                    await asyncio.sleep(0.2)
            elif kind == 3:  # less than was announced, then half-closed
                writer.write(_head(CHAT, 1000) + b'{"model"')
                writer.write_eof()
                await pause()
            elif kind == 4:  # left in the middle, with a reset
                writer.write(asked)
                await reader.read(draws.choice((1, 300, 2000)))
                raw: socket.socket = writer.get_extra_info("socket")
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            elif kind == 5:  # does not read
                writer.write(asked)
                await asyncio.sleep(5)
            elif kind == 6:
                writer.write(draws.randbytes(2000))
                self._count(await reader.read(-1), b"random bytes")
            elif kind == 7:  # two lengths
                writer.write(_head(CHAT, 5, "Transfer-Encoding: chunked\r\n") + b"zz\r\n{}\r\n0\r\n\r\n")
                await pause()
            else:  # more than is allowed
                writer.write(_head(CHAT, 50_000_000) + b"x" * 100_000)
                await pause()


def _head(path: str, length: int, more: str = "") -> bytes:
    lines = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n{more}"
    return f"{lines}Content-Length: {length}\r\n\r\n".encode()


async def run(server: ServerSide, asks: list[LoadRequest], texts: list[str], args: argparse.Namespace) -> FuzzReport:
    fuzzing, seconds = Fuzzing(server.host, server.port, args.seed), args.minutes * 60
    fuzzing.ticked = time.perf_counter()
    watch = asyncio.create_task(fuzzing.watch_clock())
    await fuzzing.streams(asks, texts, min(MAX_CALM_S, seconds * CALM_SHARE))
    calm, factor = fuzzing.report, (args.streams + args.fuzzers) / args.streams
    share, wait = max(calm.gaps, default=0.0) * factor, max(calm.firsts, default=0.0) * factor
    print(f"calm: longest gap {max(calm.gaps, default=0):.2f} s, longest first {max(calm.firsts, default=0):.2f} s")
    fuzzing.report = FuzzReport(changed=calm.changed, lost=calm.lost)
    until = time.perf_counter() + seconds
    await asyncio.gather(
        fuzzing.streams(asks, texts, seconds), *(fuzzing.fuzz(number, until) for number in range(args.fuzzers))
    )
    watch.cancel()
    report = fuzzing.report
    report.late_s = fuzzing.late_s
    report.stalled = [gap for gap in report.gaps if gap > MAX_STALL_S + share]
    report.stalled += [first for first in report.firsts if first > MAX_STALL_S + wait]
    return report


def pages_missing(server: ServerSide) -> int:
    """References to pages that neither an answer, a cache nor a pin has, once all answers have ended."""
    end, busy = time.monotonic() + 120, ("answers_open", "sequences_running", "sequences_waiting", "pages_pinned")
    while True:
        missing = int(server.figure("forerun_page_references_lost"))
        figures = {name: int(server.figure(f"forerun_{name}")) for name in busy}
        if not missing and not any(figures[name] for name in busy[:3]):
            return 0
        if time.monotonic() > end:
            print(f"pages are missing beside {figures}")
            return missing
        time.sleep(0.5)


def end_once(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # `timeout` sends it twice
    sys.exit(143)


def main() -> int:
    args = parse_args()
    signal.signal(signal.SIGTERM, end_once)  # so that the server is ended, too
    settings = {name: getattr(args, name) for name in ("model", "threads", "kv_cache_tokens", "max_model_len")}
    asks = mixed(args.streams, args.seed, sampled=0.0 if args.greedy else 0.4)
    library = LibrarySide(settings)
    texts = [library.batch([ask])[2][0] for ask in asks]
    library.close()
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "server.log"
        server = ServerSide(settings, log)
        try:
            with Memory(server.process) as memory:
                report = asyncio.run(run(server, asks, texts, args))
            missing = pages_missing(server)
            errors = [line for line in log.read_text().splitlines() if " ERROR " in line]
        finally:
            left = server.close()
    kept = [size for _, size in memory.samples[int(len(memory.samples) * WARM_UP_SHARE) :]] or [0.0]
    growth = kept[-1] - kept[0]
    print(f"streams: {report.streams}, changed {len(report.changed)}, lost {len(report.lost)}, "
          f"stalled {len(report.stalled)}; longest gap {max(report.gaps, default=0):.2f} s, "
          f"longest first {max(report.firsts, default=0):.2f} s")  # fmt: skip
    print(f"fuzzers: {sum(report.statuses.values())}: {dict(report.statuses.most_common())}")
    print(f"5xx or none: {len(report.failures)}, errors in the log {len(errors)}")
    tenths = [f"{memory.samples[len(memory.samples) * i // 10][1]:.0f}" for i in range(10)] if memory.samples else []
    print(
        f"memory: {kept[0]:.0f} MB after the first third, {kept[-1]:.0f} MB at the end (by tenths {' '.join(tenths)})"
    )
    print(f"pages missing: {missing}; this program itself was late by {report.late_s:.1f} s, which does not count")
    for line in [*report.changed, *report.lost, *report.failures, *errors][:20]:
        print(f"  {line[:1200]}")
    clean = not (report.changed or report.lost or report.stalled or report.failures or missing or left)
    clean = clean and growth <= MAX_GROWTH_MB and report.streams > 0
    print("CLEAN" if clean else "NOT CLEAN")
    return 0 if clean else 1


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fuzzing beside checked streams.")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--fuzzers", type=int, default=8)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a name, folder or .gguf file")
    parser.add_argument("--greedy", action="store_true", help="no sampled streams: where rounding may decide a draw")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kv-cache-tokens", type=int, default=8192, help="small: all of it is written early")
    parser.add_argument("--max-model-len", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
