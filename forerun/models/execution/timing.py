"""How long something takes: the median of some runs. Knows nothing of what is timed."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np


def median_seconds(run: Callable[[], object], repeats: int) -> float:
    """Of one run; a first one does not count, unless there is no other."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return float(np.median(times[1:] or times))
