"""Between threads: events from the thread that steps the engine to an event loop; work in a thread that ends with it.

Waking a loop costs a system call, and the stepping thread would pay it for every stream of its batch: a `Mailbox` wakes
it once for all events of a step.

OpenMP keeps a team of threads for every thread that has ever used it. Once there are more of them than cores, threads
no longer spin at the end of a parallel loop; they sleep and are woken, thousands of times in a forward. Measured on two
cores: a model opened in one thread and stepped in another gives a third fewer tokens a second than in one alone. A team
ends with its thread.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import psutil

from forerun.errors import BadRequest

T = TypeVar("T")

# More would only wait for each other: 64 on two cores decode at a third of the speed of 2, and with tens of thousands
# the system gives up in ways that no program can catch
MAX_THREADS, MAX_THREADS_PER_CORE = 64, 8  # the larger of both


def choose_threads(asked: int | str | None) -> tuple[int, str]:
    """CPU threads and why so many: `auto` or None takes what OMP_NUM_THREADS asks for, else one for each core that
    this process may use."""
    allowed, cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0, os.cpu_count() or 1
    limit = max(MAX_THREADS, MAX_THREADS_PER_CORE * cores)
    if isinstance(asked, int):
        if asked > limit:
            raise BadRequest(f"threads is {asked:,}, at most {limit:,} make sense on {cores} cores", "leave it out")
        return asked, "as asked"
    variable = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if variable.isdecimal() and int(variable):
        return min(int(variable), limit), "OMP_NUM_THREADS" + (f", at most {limit}" if int(variable) > limit else "")
    physical = psutil.cpu_count(logical=False) or cores
    if 0 < allowed < physical:
        return allowed, f"one for each of the {allowed} cores that this process may use, of {physical}"
    return physical, "one for each core"


class Mailbox(Generic[T]):
    """Undelivered items for the readers of one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._waiting: deque[tuple[asyncio.Queue[T], T]] = deque()
        self._announced = False

    def put(self, inbox: asyncio.Queue[T], item: T) -> None:
        """From any thread; raises where the loop is closed."""
        self._waiting.append((inbox, item))
        if self._announced:  # the loop has not started to deliver: it will find this item, too
            return
        self._announced = True
        try:
            self.loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:
            self._announced = False
            raise

    def _deliver(self) -> None:
        self._announced = False  # before the queue is read: later items announce themselves again
        while self._waiting:
            inbox, item = self._waiting.popleft()
            inbox.put_nowait(item)


def run_in_thread(work: Callable[[], T]) -> T:
    """Return what `work` returns, or raise what it raises."""
    found: dict[str, Any] = {}

    def run() -> None:
        try:
            found["result"] = work()
        except BaseException as error:
            found["error"] = error

    thread = threading.Thread(target=run, name="forerun-work", daemon=True)  # Ctrl-C does not wait for it
    thread.start()
    thread.join()
    if "error" in found:
        raise found["error"]
    return found["result"]
