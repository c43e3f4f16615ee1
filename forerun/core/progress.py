"""Progress on stderr of jobs that take longer than two seconds: a bar on a terminal, elsewhere a plain line every five
seconds. Knows nothing of what is tracked.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TextIO, TypeVar

T = TypeVar("T")

SHOW_AFTER_S = 2.0  # a job that ends sooner shows nothing
LINE_INTERVAL_S = 5.0  # between two plain lines


def track(
    items: Sequence[T],
    label: str,
    quiet: bool = False,
    *,
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[T]:
    """Yield the items and show how many are done, on `stream` (stderr). `quiet`: show nothing."""
    stream = sys.stderr if stream is None else stream
    if quiet:
        yield from items
    elif stream.isatty():
        yield from _with_bar(items, label, stream, clock)
    else:
        yield from _with_lines(items, label, stream, clock)


@contextmanager
def counter(total: int, label: str, quiet: bool = False) -> Iterator[Callable[[], None]]:
    """A function to call each time one of `total` things is done; shows how many are, as `track` does."""
    with closing(track(range(total), label, quiet)) as steps:  # type: ignore[type-var]

        def advance() -> None:
            next(steps, None)

        advance()
        yield advance


def _with_bar(items: Sequence[T], label: str, stream: TextIO, clock: Callable[[], float]) -> Iterator[T]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    progress = Progress(*columns, console=Console(file=stream), transient=True)
    start, shown = clock(), False
    task = progress.add_task(label, total=len(items))
    try:
        for item in items:
            yield item
            progress.advance(task)
            if not shown and clock() - start > SHOW_AFTER_S:
                progress.start()
                shown = True
    finally:
        if shown:
            progress.stop()


def _with_lines(items: Sequence[T], label: str, stream: TextIO, clock: Callable[[], float]) -> Iterator[T]:
    start = clock()
    due, shown = start + SHOW_AFTER_S, False
    for done, item in enumerate(items, 1):
        yield item
        now = clock()
        if done == len(items) and shown:
            print(f"{label}: {done} of {len(items)} in {now - start:.0f} s", file=stream, flush=True)
        elif done < len(items) and now > due:
            left = (now - start) / done * (len(items) - done)
            print(f"{label}: {done} of {len(items)}, about {left:.0f} s left", file=stream, flush=True)
            due, shown = now + LINE_INTERVAL_S, True
