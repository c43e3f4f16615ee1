"""How many threads compute, and work in a thread that ends with it.

OpenMP keeps a team of threads for every thread that has ever used it. Once there are more of them than cores, threads
no longer spin at the end of a parallel loop; they sleep and are woken, thousands of times in a forward. Measured on two
cores: a model opened in one thread and stepped in another gives a third fewer tokens a second than in one alone. A team
ends with its thread.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import psutil

T = TypeVar("T")


def default_threads() -> int:
    """What OMP_NUM_THREADS asks for, else one for each core."""
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(asked) if asked.isdecimal() and int(asked) else psutil.cpu_count(logical=False) or os.cpu_count() or 1


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
