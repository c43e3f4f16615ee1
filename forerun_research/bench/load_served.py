"""Servers that a bench starts for itself: `forerun serve`, as one process or with replicas, each until the block ends.

Knows commands and the line that a server prints when it is ready; no trace and no figures.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import IO

from forerun.errors import ForerunError
from forerun_research.bench.load_targets import EndpointTarget, LoadTarget, Messages, ReplayedAnswer

START_TIMEOUT_S = 120.0
KEY_CHARS = 64  # of a prompt: what begins with them goes to one process


@dataclass(frozen=True)
class ServedProcess:
    address: str
    process: subprocess.Popen[bytes]


@contextmanager
def served(model: str, replicas: int | None, threads: int = 1, options: Sequence[str] = ()) -> Iterator[ServedProcess]:
    """One process, or a front with so many replicas; each with so many threads."""
    command = [sys.executable, "-m", "forerun", "serve", "--model", model, "--name", model, "--port", "0"]
    command += ["--threads", str(threads)]
    command += [*options] if replicas is None else ["--replicas", str(replicas), *options]
    with tempfile.TemporaryFile("w+") as printed:
        process = subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT)
        try:
            yield ServedProcess(_address(process, printed), process)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(START_TIMEOUT_S)


def _address(process: subprocess.Popen[bytes], printed: IO[str]) -> str:
    """From the line that the server prints when it is ready."""
    end = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < end:
        printed.seek(0)
        if found := re.search(r"ready at (http://[^/\s]+)", printed.read()):
            return found[1]
        time.sleep(0.1)
    printed.seek(0)
    last = printed.read()[-1000:].strip()
    raise ForerunError(f"the server did not start: {last}", "try the same model with `forerun serve`")


@contextmanager
def served_beside(model: str, processes: int, threads: int) -> Iterator[LoadTarget]:
    """So many processes on this machine, plain decoding."""
    with ExitStack() as stack:
        servers = [stack.enter_context(served(model, None, threads)) for _ in range(processes)]
        yield SpreadTarget([EndpointTarget(f"{own.address}/v1", model, {}, speculation="off") for own in servers])


class SpreadTarget:
    """Several targets: prompts that begin the same go to the same one, new ones to each in turn."""

    def __init__(self, targets: Sequence[LoadTarget]) -> None:
        self._targets, self._known = targets, dict[str, LoadTarget]()

    async def ask(self, answer: ReplayedAnswer, messages: Messages, max_tokens: int, key: str | None) -> None:
        begin = str(messages[0]["content"])[:KEY_CHARS]
        target = self._known.setdefault(begin, self._targets[len(self._known) % len(self._targets)])
        await target.ask(answer, messages, max_tokens, key)
