"""One engine in a process of its own: memory and threads are separate, and the idle side waits on a pipe.

Knows how to start, ask and end a side; what a side measures is in its own module.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from forerun.cli import GC_ALLOCATIONS
from forerun.errors import BadRequest, ForerunError

Sample = dict[str, Any]


@dataclass(frozen=True)
class SideSpec:
    """What a side is to open, the same for all sides of a bench except `engine`."""

    engine: str  # forerun, transformers or llama.cpp
    model: str
    weights: str = "auto"
    device: str = "auto"
    threads: int = 1
    context: int = 1024  # longest prompt and answer together
    batch: int = 1  # most requests at once
    shape: str | None = None  # random weights of this shape instead of a model
    draft: str | None = None  # a second model that guesses for the first; with `shape`: another shape
    profile: str | None = None  # of speculative prefill
    disk: str | None = None  # folder of a disk tier


class Side(Protocol):
    """What an engine must be able to do to be measured. Times are seconds, prompts are token ids."""

    def about(self) -> dict[str, Any]:
        """Versions and settings worth keeping with the figures."""
        ...

    def decode(self, ids: list[int], tokens: int) -> Sample:
        """One cold greedy answer of exactly `tokens` tokens: `ttft_s`, `ms_per_token`, `token_ids`."""
        ...

    def prefill(self, ids: list[int]) -> Sample:
        """Time to the first token of a prompt never seen before: `ttft_s`."""
        ...

    def batch(self, prompts: list[list[int]], tokens: int) -> Sample:
        """All prompts at once, `tokens` tokens each: `total_s`, `tokens_per_s`."""
        ...


def open_side(spec: SideSpec) -> Side:
    if spec.engine == "forerun":
        from forerun_research.bench.ours import ForerunSide

        return ForerunSide(spec)
    if spec.engine == "transformers":
        from forerun_research.bench.peers.transformers import TransformersSide

        return TransformersSide(spec)
    if spec.engine == "llama.cpp":
        from forerun_research.bench.peers.llamacpp import LlamaCppSide

        return LlamaCppSide(spec)
    raise BadRequest(f"no engine is called {spec.engine!r}", "use transformers, llama.cpp or none")


class SideProcess:
    """A side in a child process; `call` runs one of its methods there and brings the result."""

    def __init__(self, spec: SideSpec) -> None:
        self.name = spec.engine
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, spec), name=f"bench-{spec.engine}", daemon=True)
        # Ctrl-C reaches the whole process group: the child never sees it, the parent decides what it means
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        theirs.close()
        try:
            self.about: dict[str, Any] = self._receive()
        except BaseException:
            self.close()
            raise

    def call(self, method: str, *args: Any) -> Any:
        self._pipe.send((method, args))
        return self._receive()

    def _receive(self) -> Any:
        try:
            kind, value = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(5)
            raise ForerunError(
                f"the {self.name} process ended by itself (exit code {self._process.exitcode})",
                "it may have run out of memory: try a smaller model or a shorter context",
            ) from None
        if kind == "error":
            raise value[0](value[1], value[2])
        if kind == "crash":
            raise RuntimeError(f"{self.name} failed: {value}")
        return value

    def close(self) -> None:
        try:
            self._pipe.send(None)
        except OSError:
            pass
        else:
            self._process.join(5)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join(5)
        self._pipe.close()

    def __enter__(self) -> SideProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


PARENT_GONE = (EOFError, BrokenPipeError, ConnectionResetError)  # what a pipe raises whose other end is closed


def _serve(pipe: Connection, spec: SideSpec) -> None:
    """The child's loop; a child whose parent has gone ends in the middle of a measurement and prints nothing."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    gc.set_threshold(GC_ALLOCATIONS, *gc.get_threshold()[1:])  # as the `forerun` command has it
    with suppress(*PARENT_GONE):
        try:
            side = open_side(spec)
            pipe.send(("ok", side.about()))
            while (job := pipe.recv()) is not None:
                method, args = job
                pipe.send(("ok", memory() if method == "memory" else getattr(side, method)(*args)))
        except PARENT_GONE:
            raise
        except ForerunError as error:
            pipe.send(("error", (type(error), str(error), error.hint)))
        except Exception:
            pipe.send(("crash", traceback.format_exc()))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def memory() -> dict[str, int]:
    """Bytes this process holds: resident now, the most it ever was, and on the GPU."""
    import psutil
    import torch

    resident = psutil.Process(os.getpid()).memory_info().rss
    found = {"rss_bytes": resident, "peak_bytes": max(resident, _high_water())}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["gpu_peak_bytes"] = torch.cuda.max_memory_allocated()
    return found


def _high_water() -> int:
    """The peak of this process since it started its program; `getrusage` would count the parent's too."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def alternate(sides: Sequence[SideProcess], runs: int, method: str, *args: Any) -> dict[str, list[Sample]]:
    """A B A B: every side once for warmth, then `runs` times in turn, so that slow drifts of the machine hit all."""
    from forerun.core.progress import track  # brings torch, which a child loads for itself

    samples: dict[str, list[Sample]] = {side.name: [] for side in sides}
    for number, side in enumerate(track([*sides] * (runs + 1), f"measuring {method}")):
        sample = side.call(method, *args)
        if number >= len(sides):
            samples[side.name].append(sample)
    return samples
