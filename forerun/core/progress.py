"""Progress bars for anything longer than a moment, on a terminal only. Knows nothing of what is tracked."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

T = TypeVar("T")

MIN_JOB_S = 0.5  # a job that ends sooner shows nothing


def track(items: Sequence[T], label: str, quiet: bool = False) -> Iterator[T]:
    """Yield the items; on a terminal, show a bar on stderr once the job has taken a moment."""
    if quiet or not sys.stderr.isatty():
        yield from items
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    start, shown = time.monotonic(), False
    task = progress.add_task(label, total=len(items))
    try:
        for item in items:
            yield item
            progress.advance(task)
            if not shown and time.monotonic() - start > MIN_JOB_S:
                progress.start()
                shown = True
    finally:
        if shown:
            progress.stop()
