"""Progress of long jobs on stderr: a bar on a terminal, elsewhere a plain line every few seconds, also while one item
takes long. Knows nothing of what is tracked.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, TextIO, TypeVar

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")

BAR_AFTER_S = 0.5  # a job that ends sooner shows no bar
LINE_AFTER_S, LINE_INTERVAL_S = 2.0, 5.0  # until the first line, and between two
BAR_COLUMNS, OTHER_COLUMNS = 40, 40  # of a terminal: the bar at most, what stands beside it about
_bar = threading.Lock()  # one bar at a time: a job within a job shows none


def track(items: Sequence[T], label: str, quiet: bool = False, *, stream: TextIO | None = None) -> Iterator[T]:
    """Yield the items and show how many are done, on `stream` (stderr). `quiet`: show nothing."""
    with counter(len(items), label, quiet, stream=stream) as advance:
        for item in items:
            yield item
            advance()


@contextmanager
def counter(
    total: int, label: str, quiet: bool = False, *, stream: TextIO | None = None
) -> Iterator[Callable[..., None]]:
    """A function to call each time one of `total` things is done, or with how many; shows them as `track` does."""
    stream = sys.stderr if stream is None else stream
    if quiet:
        yield lambda count=1: None
        return
    job = (_Bar if stream.isatty() else _Lines)(total, label, stream)
    with _shown(job):
        yield job.advance


@contextmanager
def status(text: str, console: Console) -> Iterator[Callable[[str], None]]:
    """Show what a job of unknown length does, and a function that changes the text: a spinner on a terminal."""
    if console.is_terminal:
        with _bar, console.status(text, spinner="dots" if console.encoding.startswith("utf") else "line") as spinner:
            yield spinner.update
        return
    job = _Texts(text, console.file)
    with _shown(job):
        yield job.update


@contextmanager
def _shown(job: _Lines) -> Iterator[None]:
    thread = threading.Thread(target=job.show, name="forerun-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        job.over.set()
        thread.join()


class _Lines:
    """A job's lines; `show` runs in a thread of its own."""

    def __init__(self, total: int, label: str, stream: IO[str]) -> None:
        self.total, self.label, self.stream = total, label, stream
        self.done, self.start, self.over = 0, time.monotonic(), threading.Event()

    def advance(self, count: int = 1) -> None:
        self.done += count

    def show(self) -> None:
        wait = LINE_AFTER_S
        while not self.over.wait(wait):
            wait = LINE_INTERVAL_S
            self._print(self._line(time.monotonic() - self.start))
        if wait == LINE_INTERVAL_S and self.done == self.total:
            self._print(f"{self.label}: {self.done} of {self.total} in {time.monotonic() - self.start:.0f} s")

    def _line(self, seconds: float) -> str:
        return line(self.label, self.done, self.total, seconds)

    def _print(self, text: str) -> None:
        try:
            print(text, file=self.stream, flush=True)
        except (OSError, ValueError):  # its reader has gone: the job continues
            self.over.set()


def line(label: str, done: int, total: int, seconds: float) -> str:
    """One line about a job that runs."""
    estimate = f"about {seconds / done * (total - done):.0f} s left" if done else f"{seconds:.0f} s so far"
    return f"{label}: {done} of {total}, {estimate}"


class _Texts(_Lines):
    """Lines of a job that has no number of items."""

    def __init__(self, text: str, stream: IO[str]) -> None:
        super().__init__(-1, text, stream)

    def update(self, text: str) -> None:
        self.label = text

    def _line(self, seconds: float) -> str:
        return f"{self.label}, {seconds:.0f} s so far"


class _Bar(_Lines):
    """A job's bar."""

    def show(self) -> None:
        if self.over.wait(BAR_AFTER_S) or not _bar.acquire(blocking=False):
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(file=self.stream)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(max(4, min(BAR_COLUMNS, console.width - OTHER_COLUMNS))),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        try:
            with Progress(*columns, console=console, transient=True) as progress:
                task = progress.add_task(self.label, total=self.total, completed=self.done)
                while not self.over.wait(0.1):
                    progress.update(task, completed=self.done)
        finally:
            _bar.release()
