"""Work in a thread that ends with it.

OpenMP keeps a team of threads for every thread that has ever used it. Once there are more of them than cores, nobody
spins any longer at the end of a parallel loop; everybody sleeps and is woken, thousands of times in a forward. Measured
on two cores: a model opened in one thread and stepped in another gives a third fewer tokens a second than in one alone.
A team goes when its thread does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def run_in_thread(work: Callable[[], T]) -> T:
    """What `work` returns or raises."""
    found: dict[str, Any] = {}

    def run() -> None:
        try:
            found["result"] = work()
        except BaseException as error:
            found["error"] = error

    thread = threading.Thread(target=run, name="forerun-apart", daemon=True)  # Ctrl-C does not wait for it
    thread.start()
    thread.join()
    if "error" in found:
        raise found["error"]
    return found["result"]
