"""Progress: nothing for short jobs and in quiet mode, a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
from rich.console import Console

from forerun.core import progress
from forerun.core.progress import counter, line, status, track


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(params=[io.StringIO, Terminal], ids=["file", "terminal"])
def stream(request: pytest.FixtureRequest) -> io.StringIO:
    return request.param()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BAR_AFTER_S", "LINE_AFTER_S", "LINE_INTERVAL_S"):
        monkeypatch.setattr(progress, name, 0.02)


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def showing() -> int:
    """Jobs that may still show something: each has a thread for it."""
    return sum(thread.name == "forerun-progress" for thread in threading.enumerate())


def test_a_short_job_shows_nothing(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BAR_AFTER_S", "LINE_AFTER_S"):
        monkeypatch.setattr(progress, name, 600.0)  # however slow the machine is
    assert list(track(range(10), "reading", stream=stream)) == list(range(10)) and stream.getvalue() == ""


def test_quiet_is_quiet(stream: io.StringIO, soon: None) -> None:
    for _ in track(range(3), "reading", True, stream=stream):
        assert not showing()
    assert stream.getvalue() == ""


def test_lines_come_while_one_item_takes_long_and_at_the_end(soon: None) -> None:
    stream = io.StringIO()
    for item in track(range(2), "reading", stream=stream):
        seen = stream.getvalue().count(f"reading: {item} of 2, ")
        wait_for(lambda: stream.getvalue().count(f"reading: {item} of 2, ") > seen + 1)  # noqa: B023
    assert stream.getvalue().splitlines()[-1] == "reading: 2 of 2 in 0 s"


def test_a_line() -> None:
    assert line("reading", 0, 10, 5.2) == "reading: 0 of 10, 5 s so far"
    assert line("reading", 2, 10, 3.0) == "reading: 2 of 10, about 12 s left"


def test_on_a_terminal_there_is_a_bar_before_the_first_item_is_done(soon: None) -> None:
    stream = Terminal()
    with counter(3, "reading", stream=stream) as advance:
        wait_for(lambda: "0/3" in stream.getvalue())
        advance()
        wait_for(lambda: "1/3" in stream.getvalue())
        with counter(5, "inside", stream=stream):
            wait_for(lambda: showing() == 1)  # it has found the other's bar, and given up
    assert "inside" not in stream.getvalue()


def test_a_job_of_unknown_length_has_lines_too(soon: None) -> None:
    stream = io.StringIO()
    with status("loading", Console(file=stream)) as update:
        wait_for(lambda: "loading, 0 s so far" in stream.getvalue())
        update("measuring")
        wait_for(lambda: "measuring, 0 s so far" in stream.getvalue())


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_a_spinner_that_the_terminal_can_show(encoding: str, soon: None) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, errors="strict", write_through=True)
    console = Console(file=stream, force_terminal=True)
    with status("loading", console):
        wait_for(lambda: b"loading" in raw.getvalue())
        inside = Terminal()
        with counter(5, "inside", stream=inside):
            wait_for(lambda: showing() == 0)
    assert inside.getvalue() == "" and raw.getvalue().isascii() == (encoding == "ascii")


def test_a_reader_that_has_gone_does_not_end_the_job(soon: None) -> None:
    stream = io.StringIO()
    for _ in track(range(2), "reading", stream=stream):
        stream.close()
        wait_for(lambda: showing() == 0)


@pytest.mark.parametrize("columns", [20, 60])
def test_a_narrow_terminal_without_unicode(columns: int) -> None:
    code = "import time; from forerun.core.progress import track\n"
    code += "for _ in track(range(12), 'loading layers'): time.sleep(0.1)"
    ours, theirs = pty.openpty()
    env = os.environ | {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "COLUMNS": str(columns), "TERM": "xterm"}
    with subprocess.Popen([sys.executable, "-c", code], stderr=theirs, stdout=theirs, env=env) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                shown += os.read(ours, 10_000)
            except OSError:
                break
    os.close(ours)
    assert process.returncode == 0 and shown.isascii() and b"loading" in shown and b"Traceback" not in shown
    if columns == 60:  # on one line, which is removed at the end
        assert b"/12" in shown and b"-----" in shown and shown.count(b"\x1b[1A") == 1
