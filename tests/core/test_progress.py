"""Progress: nothing for short jobs and in quiet mode, a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
from itertools import count

from forerun.core.progress import track


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream: io.StringIO, items: int, seconds_each: float, quiet: bool = False) -> str:
    """What a job shows whose items take so long."""
    ticks = count()
    found = list(track(range(items), "reading", quiet, stream=stream, clock=lambda: next(ticks) * seconds_each))
    assert found == list(range(items))
    return stream.getvalue()


def test_a_short_job_shows_nothing():
    assert shown(io.StringIO(), 10, 0.2) == "" == shown(Terminal(), 10, 0.2)


def test_without_a_terminal_a_line_is_printed_every_few_seconds():
    assert shown(io.StringIO(), 10, 1.5).splitlines() == [
        "reading: 2 of 10, about 12 s left",
        "reading: 6 of 10, about 6 s left",
        "reading: 10 of 10 in 15 s",
    ]


def test_on_a_terminal_there_is_a_bar():
    text = shown(Terminal(), 10, 1.5)
    assert "reading" in text and "left" not in text


def test_quiet_is_quiet():
    assert shown(io.StringIO(), 10, 60.0, quiet=True) == "" == shown(Terminal(), 10, 60.0, quiet=True)
