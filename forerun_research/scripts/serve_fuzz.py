"""Fuzzing beside checked streams: parameters, grammars, schemas, bodies and sockets against a real `forerun serve`.

    python -m forerun_research.scripts.serve_fuzz [--minutes 30] [--streams 8] [--fuzzers 8] [--model NAME] [--seed 0]

Streams ask the same questions again and again; each answer has to be the library's. A calm phase without fuzzers
measures the longest gap between two events and the longest wait for the first; a stream's share is that, times the
number of all clients over that of streams (of the first: four times, as the server's fairness has it). A line every
half minute, one verdict at the end (`problems`), exit status 1 where it is not clean: no stream changed, lost (429
too), or stalled for more than 2 s beyond its share; no 5xx and no error in the server's log; memory flat after the
first third of the time in which streams and fuzzers run together; every answer ended and every page back in the pool.
`--streams 58 --fuzzers 6 --minutes 5` is the load of 64 clients of which a tenth is hostile. `--session-tokens 2300`
begins with fuzzers' sessions as large as half an hour makes them. `--summary FILE` writes
all figures as JSON, with the requests that were in flight during each stall and how the pool was then.
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

from forerun_research.bench.common import long_text
from forerun_research.scripts.fuzz_requests import CHAT, SESSIONS, any_bytes, any_request, any_session, mutated
from forerun_research.scripts.serve_clients import dechunked
from forerun_research.scripts.serve_requests import LoadRequest, mixed
from forerun_research.scripts.serve_sides import NAME, LibrarySide, Memory, ServerSide

MAX_STALL_S = 2.0  # of a stream, beyond its share
# A prompt that is the oldest of its key has a quarter of the prompt tokens, however many others come (docs/server.md)
OLDEST_PROMPT_FACTOR = 4.0
MAX_GROWTH_MB = 32.0  # of resident memory after the first third, the last quarter of that beside its first
PROGRESS_S = 30.0  # between two lines
SHOWN_GAPS, SHOWN_REQUESTS = 5, 8  # in the summary: stalls or not, and the longest requests beside each
POOL_FIGURES = ("sequences_running", "sequences_waiting", "pages_free", "pages_cached", "pages_pinned")
POOL_S = 1.0  # between two samples of them
CALM_SHARE, MAX_CALM_S = 0.2, 60.0  # of the time: with fuzzers alone, then with streams alone
TICK_S = 0.05
FUZZ_TIMEOUT_S = 120.0  # for one request of a fuzzer
STREAM_TIMEOUT_S = 300.0  # for one answer: 96 tokens at most, and then it is lost
WARM_UP_SHARE = 1 / 3
FILLER_WORDS, TOKENS_PER_WORD = 600, 1.25  # of a long prompt; as SmolLM2's tokenizer has them
MIN_POOL_TOKENS, POOL_TOKENS_PER_CLIENT = 8192, 384  # small, so that memory is full early, but no stream is preempted
SETTLE_S = 120.0  # for what fuzzers left to end
MUST_BE_ZERO = ("answers_open", "sequences_running", "sequences_waiting", "page_references_lost")
EXPECTED = (200, 400, 401, 404, 405, 408, 409, 411, 413, 415, 421, 429, 431, 501)


@dataclass(frozen=True)
class Stall:
    """Time in which a stream got nothing, by the clock of the run."""

    seconds: float
    end: float


@dataclass
class FuzzReport:
    streams: int = 0
    changed: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    stalled: list[str] = field(default_factory=list)
    gaps: list[Stall] = field(default_factory=list)  # the longest of each stream
    firsts: list[Stall] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    since: float = 0.0  # time.perf_counter() when streams and fuzzers began to run together
    late_s: float = 0.0
    failures: list[str] = field(default_factory=list)  # 5xx, with what was sent
    sent: list[tuple[float, float, str]] = field(default_factory=list)  # by fuzzers: begin, end, the request's start
    pool: list[tuple[float, list[int]]] = field(default_factory=list)  # when, and POOL_FIGURES then

    def longest(self) -> tuple[float, float]:
        """The longest gap between two events, and the longest wait for the first."""
        gap, first = (max((stall.seconds for stall in found), default=0.0) for found in (self.gaps, self.firsts))
        return gap, first

    def find_stalls(self, share: float, wait: float) -> None:
        """`share`, `wait`: what a gap and a first event may take by the number of clients."""
        found = [(stall, "gap") for stall in self.gaps if stall.seconds > MAX_STALL_S + share]
        found += [(stall, "first") for stall in self.firsts if stall.seconds > MAX_STALL_S + wait]
        self.stalled += [f"{kind} {self.shown(stall)}" for stall, kind in found]

    def shown(self, stall: Stall) -> str:
        start = stall.end - stall.seconds
        beside = [(end - begin, text) for begin, end, text in self.sent if end > start and begin < stall.end]
        longest = [f"{seconds:.1f} s {text}" for seconds, text in sorted(beside, reverse=True)[:SHOWN_REQUESTS]]
        pool = [figures for at, figures in self.pool if start - POOL_S < at < stall.end + POOL_S]
        return f"of {stall.seconds:.2f} s at {stall.end:.0f} s beside {len(beside)}: {longest}; {POOL_FIGURES} {pool}"


class Fuzzing:
    def __init__(self, host: str, port: int, seed: int) -> None:
        self.host, self.port, self.seed = host, port, seed
        self.report, self.start = FuzzReport(), time.perf_counter()
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

    async def watch_pool(self, server: ServerSide) -> None:
        while True:
            await asyncio.sleep(POOL_S)
            with contextlib.suppress(OSError):
                text = await asyncio.to_thread(server.get, "/metrics")
                found = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
                figures = [int(float(found[f"forerun_{name}"])) for name in POOL_FIGURES]
                self.report.pool.append((self.clock() - self.start, figures))

    # -- streams -------------------------------------------------------------------------------------------------------

    async def streams(self, asks: list[LoadRequest], texts: list[str], seconds: float) -> None:
        end = time.perf_counter() + seconds

        async def client(number: int) -> None:
            for at in itertools.count(number):
                await self.stream(asks[at % len(asks)], texts[at % len(asks)])
                if time.perf_counter() > end:
                    return

        await asyncio.gather(*(client(number) for number in range(len(asks))))

    async def stream(self, ask: LoadRequest, expected: str) -> None:
        report = self.report
        report.streams += 1
        try:
            raw = await asyncio.wait_for(self.receive(ask), STREAM_TIMEOUT_S)
        except (OSError, TimeoutError) as error:
            report.lost.append(repr(error))
            return
        if b"data: [DONE]" not in raw[-64:]:
            report.lost.append(raw[-300:].decode("utf-8", "replace"))
            await asyncio.sleep(0.5)  # a server that refuses is not asked without end
            return
        lines = dechunked(raw.partition(b"\r\n\r\n")[2]).split(b"\n\n")
        events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
        text = "".join(c["delta"].get("content") or "" for event in events for c in event.get("choices", ()))
        if text != expected:
            report.changed.append(f"{ask.content[:60]!r}: {text[:80]!r} for {expected[:80]!r}")

    async def receive(self, ask: LoadRequest) -> bytes:
        """The whole response; records the wait for its first event and the longest gap between two."""
        raw, longest, first, begun = bytearray(), Stall(0.0, 0.0), False, self.clock()
        last = begun
        reader, writer = await asyncio.open_connection(self.host, self.port)
        with contextlib.closing(writer):
            writer.write(ask.http(NAME, self.host))
            while b"data: [DONE]" not in raw[-64:] and (piece := await reader.read(65536)):
                raw += piece
                if b"data: " not in piece or raw.count(b"data: ", 0, 8192) < 2:
                    continue  # a comment that keeps the connection open, or the first event, which has no text
                now = self.clock()
                if first:
                    longest = max(longest, Stall(now - last, now - self.start), key=lambda stall: stall.seconds)
                else:
                    self.report.firsts.append(Stall(now - begun, now - self.start))
                first, last = True, now
        self.report.gaps.append(longest)
        return bytes(raw)

    # -- fuzzers -------------------------------------------------------------------------------------------------------

    async def grow_sessions(self, tokens: int) -> None:
        """The sessions that fuzzers continue, each with about so many tokens."""
        text = " ".join(long_text().split()[: int(tokens / TOKENS_PER_WORD)])
        for name in SESSIONS:
            message = {"role": "user", "content": f"{name}: {text}"}
            asked = {"model": NAME, "messages": [message], "max_tokens": 4, "forerun": {"session": name}}
            await self._post(CHAT, json.dumps(asked).encode())

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
        path, body = draws.choice((any_request, any_request, mutated, mutated, any_session))(draws, NAME)
        await self._post(path, json.dumps(body).encode())

    async def _bytes(self, draws: random.Random) -> None:
        path = draws.choice((CHAT, "/v1/completions", "/v1/messages", "/v1/responses", "/tokenize", "/forerun/tokens"))
        await self._post(path, any_bytes(draws, NAME))

    async def _post(self, path: str, body: bytes) -> None:
        begun = self.clock()
        try:
            reader, writer = await asyncio.open_connection(self.host, self.port)
            with contextlib.closing(writer):
                writer.write(_head(path, len(body), "Connection: close\r\n") + body)
                raw = await reader.read(-1)
        finally:
            shown = f"{path}, {len(body)} bytes: {body[:160]!r}"
            self.report.sent.append((begun - self.start, self.clock() - self.start, shown))
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
    watching = (fuzzing.watch_clock(), fuzzing.watch_pool(server), show_progress(fuzzing, server))
    watch = [asyncio.create_task(each) for each in watching]
    # Other prompts, as those of the calm phase are to be new to the cache, and all pages of the pool once
    warm_up = [*mixed(args.streams, args.seed + 1), *fillers(args.kv_cache_tokens)]
    await asyncio.gather(*(fuzzing.receive(ask) for ask in warm_up))
    calm_s = min(MAX_CALM_S, seconds * CALM_SHARE)
    until = time.perf_counter() + calm_s  # fuzzers alone, until the caches of grammars and responses are full
    await asyncio.gather(*(fuzzing.fuzz(-1 - number, until) for number in range(args.fuzzers)))
    fuzzing.report = FuzzReport(failures=fuzzing.report.failures)
    await fuzzing.streams(asks, texts, calm_s)
    calm, factor = fuzzing.report, (args.streams + args.fuzzers) / args.streams
    gap, first = calm.longest()
    print(f"calm: {calm.streams} streams, longest gap {gap:.2f} s, longest first {first:.2f} s", flush=True)
    fuzzing.report = FuzzReport(changed=calm.changed, lost=calm.lost, failures=calm.failures)
    if args.session_tokens:
        await fuzzing.grow_sessions(args.session_tokens)
    fuzzing.report.since = time.perf_counter()
    until = fuzzing.report.since + seconds
    await asyncio.gather(
        fuzzing.streams(asks, texts, seconds), *(fuzzing.fuzz(number, until) for number in range(args.fuzzers))
    )
    for task in watch:
        task.cancel()
    report = fuzzing.report
    report.late_s = fuzzing.late_s
    report.find_stalls(gap * factor, first * max(factor, OLDEST_PROMPT_FACTOR))
    return report


def fillers(tokens: int) -> list[LoadRequest]:
    """Long prompts that need so many tokens of K/V together, or some more."""
    text = " ".join(long_text().split()[:FILLER_WORDS])
    return [LoadRequest(f"{number}: {text}", 1, 0.0, 0) for number in range(1 + tokens // FILLER_WORDS)]


async def show_progress(fuzzing: Fuzzing, server: ServerSide) -> None:
    while True:
        await asyncio.sleep(PROGRESS_S)
        report, memory = fuzzing.report, server.process.memory_info().rss / 1e6
        gap, first = report.longest()
        print(f"{time.perf_counter() - fuzzing.start:5.0f} s: {report.streams} streams, changed {len(report.changed)}, "
              f"lost {len(report.lost)}; longest gap {gap:.2f} s, first {first:.2f} s; "
              f"{sum(report.statuses.values())} of fuzzers, 5xx or none {len(report.failures)}; {memory:.0f} MB; "
              f"late {fuzzing.late_s:.1f} s", flush=True)  # fmt: skip


def left_behind(server: ServerSide) -> dict[str, int]:
    """What has not ended or come back in time after the last request: answers, sequences, references to pages that
    neither an answer, a cache nor a pin has."""
    end = time.monotonic() + SETTLE_S
    while True:
        figures = {name: int(server.figure(f"forerun_{name}")) for name in MUST_BE_ZERO}
        if not any(figures.values()) or time.monotonic() > end:
            return {name: value for name, value in figures.items() if value}
        time.sleep(0.5)


def memory_growth(samples: list[float]) -> float:
    """MB from the first quarter after the warm-up to the last one, each by its least: what requests need while they run
    comes and goes, and freed memory goes back to the system every half minute."""
    kept = samples[int(len(samples) * WARM_UP_SHARE) :]
    quarter = max(1, len(kept) // 4)
    return min(kept[-quarter:]) - min(kept[:quarter]) if kept else 0.0


def problems(report: FuzzReport, left: dict[str, int], errors: list[str], growth: float, exit_status: int) -> list[str]:
    """Why a run is not clean; empty: it is."""
    found = {"changed": report.changed, "lost": report.lost, "stalled": report.stalled}
    found |= {"5xx or no response": report.failures, "errors in the log": errors}
    why = [f"{name}: {len(values)}" for name, values in found.items() if values]
    why += [f"left behind: {left}"] if left else []
    why += [f"memory grew by {growth:.0f} MB"] if growth > MAX_GROWTH_MB else []
    why += [f"the server ended with {exit_status}"] if exit_status else []
    return why + ([] if report.streams and report.statuses else ["no streams, or no fuzzers"])


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
            left = left_behind(server)
            errors = [line for line in log.read_text().splitlines() if " ERROR " in line]
        finally:
            exit_status = server.close()
    samples = [size for at, size in memory.samples if at >= report.since]
    growth, (longest, first) = memory_growth(samples), report.longest()
    why = problems(report, left, errors, growth, exit_status)
    tenths = [round(samples[len(samples) * i // 10]) for i in range(10)] if samples else []
    print(f"streams: {report.streams}, changed {len(report.changed)}, lost {len(report.lost)}, "
          f"stalled {len(report.stalled)}; longest gap {longest:.2f} s, longest first {first:.2f} s")  # fmt: skip
    print(f"fuzzers: {sum(report.statuses.values())}: {dict(report.statuses.most_common())}")
    print(f"5xx or none: {len(report.failures)}, errors in the log {len(errors)}")
    by_tenths = " ".join(map(str, tenths))
    print(f"memory: {growth:+.0f} MB after a third of the time that all ran together (by tenths {by_tenths})")
    print(f"left behind: {left or 0}; this program itself was late by {report.late_s:.1f} s, which does not count")
    details = [*report.changed, *report.lost, *report.stalled, *report.failures, *errors]
    for line in details[:20]:
        print(f"  {line[:1200]}")
    if args.summary:
        figures = {"problems": why, "streams": report.streams, "longest_gap_s": longest, "longest_first_s": first}
        figures |= {
            "statuses": dict(report.statuses),
            "memory_mb": tenths,
            "growth_mb": growth,
            "late_s": report.late_s,
        }
        for name, stalls in (("longest_gaps", report.gaps), ("longest_firsts", report.firsts)):
            longest_ones = sorted(stalls, key=lambda stall: -stall.seconds)[:SHOWN_GAPS]
            figures[name] = [report.shown(stall) for stall in longest_ones]
        figures |= {"arguments": str(args), "details": details}
        args.summary.write_text(json.dumps(figures, indent=1))
    print("CLEAN" if not why else f"NOT CLEAN: {'; '.join(why)}")
    return 1 if why else 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fuzzing beside checked streams.")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--fuzzers", type=int, default=8)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a name, folder or .gguf file")
    parser.add_argument("--greedy", action="store_true", help="no sampled streams: where rounding may decide a draw")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kv-cache-tokens", type=int, help="default: 384 for each client, 8,192 at least")
    parser.add_argument("--max-model-len", type=int, default=None)
    parser.add_argument("--session-tokens", type=int, default=0, help="of each session when fuzzers begin")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--summary", type=Path, help="a file for all figures, as JSON")
    args = parser.parse_args()
    args.kv_cache_tokens = args.kv_cache_tokens or max(
        MIN_POOL_TOKENS, POOL_TOKENS_PER_CLIENT * (args.streams + args.fuzzers)
    )
    return args


if __name__ == "__main__":
    sys.exit(main())
