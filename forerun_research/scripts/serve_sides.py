"""Both sides of the load run, each in a process of its own: `forerun serve`, and the library.

The library runs the same requests as one batch, or one of them as a stream. Neither side is used while the other one
is timed.
"""

from __future__ import annotations

import multiprocessing
import re
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from forerun_research.scripts.serve_requests import LoadRequest

NAME = "load"
OPTIONS = ("model", "device", "threads", "kv_cache_tokens", "max_model_len", "timeout")


class ServerSide:
    """`forerun serve` as people start it, on a free port."""

    host = "127.0.0.1"

    def __init__(self, settings: dict[str, Any], log: Path) -> None:
        command = [sys.executable, "-m", "forerun.cli", "serve", "--port", "0", "--name", NAME]
        for name in OPTIONS:
            if settings.get(name) is not None:
                command += [f"--{name.replace('_', '-')}", str(settings[name])]
        self._log = log.open("w")
        self._process = subprocess.Popen(command, stderr=self._log, cwd=Path(__file__).resolve().parent.parent)
        self.process = psutil.Process(self._process.pid)
        self.port = self._wait_for_port(log)
        self._wait_until_ready()

    def _wait_for_port(self, log: Path) -> int:
        while self._process.poll() is None:
            found = re.search(r"http://127\.0\.0\.1:(\d+)", log.read_text())
            if found:
                return int(found[1])
            time.sleep(0.1)
        raise SystemExit(f"the server did not start:\n{log.read_text()}")

    def _wait_until_ready(self) -> None:
        while True:
            try:
                self.get("/ready")
                return
            except OSError:
                time.sleep(0.1)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://{self.host}:{self.port}{path}", timeout=30) as response:
            return response.read().decode()

    def figure(self, name: str) -> float:
        """A sample of /metrics without labels."""
        return float(next(line.split()[1] for line in self.get("/metrics").splitlines() if line.startswith(f"{name} ")))

    def close(self) -> int:
        self._process.terminate()
        try:
            return self._process.wait(60)
        finally:
            self._process.kill()
            self._log.close()


@dataclass
class Memory:
    """Resident memory of a process, sampled once a second in a thread; use as a context."""

    process: psutil.Process
    samples: list[tuple[float, float]] = field(default_factory=list)  # time.perf_counter(), MB
    _done: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Memory:
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._done.wait(1.0):
            self.samples.append((time.perf_counter(), self.process.memory_info().rss / 1e6))

    def slope(self, skip: float) -> float:
        """MB a minute by least squares, without the first `skip` of all samples, when caches still fill."""
        kept = self.samples[int(len(self.samples) * skip) :]
        if len(kept) < 3:
            return 0.0
        mean_t, mean_m = (sum(pair[i] for pair in kept) / len(kept) for i in (0, 1))
        spread = sum((t - mean_t) ** 2 for t, _ in kept)
        return 60 * sum((t - mean_t) * (m - mean_m) for t, m in kept) / spread


class LibrarySide:
    """An `LLM` of the same settings behind a pipe."""

    def __init__(self, settings: dict[str, Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_library, args=(theirs, settings), daemon=True)
        self._process.start()
        theirs.close()

    def batch(self, asks: list[LoadRequest]) -> tuple[float, int, list[str]]:
        """Seconds, tokens and texts of all requests as one batch."""
        return self._call("batch", asks)

    def first(self, ask: LoadRequest) -> float:
        """Seconds to the first token of a stream, the prompt's encoding included."""
        return self._call("first", ask)

    def _call(self, name: str, value: Any) -> Any:
        self._pipe.send((name, value))
        return self._pipe.recv()

    def close(self) -> None:
        with suppress(OSError):  # it may be gone already
            self._pipe.send(("close", None))
        self._process.join(30)


def _library(pipe: Connection, settings: dict[str, Any]) -> None:
    from forerun import LLM

    with LLM(quiet=True, **{name: value for name, value in settings.items() if value is not None}) as llm:
        while True:
            name, value = pipe.recv()
            if name == "close":
                return
            pipe.send(_batch(llm, value) if name == "batch" else _first(llm, value))


def _params(ask: LoadRequest) -> Any:
    from forerun import SamplingParams

    return SamplingParams(max_tokens=ask.max_tokens, temperature=ask.temperature, seed=ask.seed)


def _batch(llm: Any, asks: list[LoadRequest]) -> tuple[float, int, list[str]]:
    start = time.perf_counter()
    runs = llm.driver.run([llm.request(llm.encode(ask.messages), _params(ask)) for ask in asks])
    seconds = time.perf_counter() - start
    texts = ["".join(event.text for event in events) for events in runs]
    return seconds, sum(len(event.token_ids) for events in runs for event in events), texts


def _first(llm: Any, ask: LoadRequest) -> float:
    start, first = time.perf_counter(), 0.0
    for event in llm.stream(ask.messages, _params(ask)):
        if event.text and not first:
            first = time.perf_counter() - start
    return first
