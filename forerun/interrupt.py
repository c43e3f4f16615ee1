"""Ctrl-C of the `forerun` command: one line and exit code 130 within a second, whatever the program is doing.

Python raises KeyboardInterrupt between two instructions of the main thread: not within a long product, and where a
module is being imported the exception may be caught and leave half a module. So an interrupt ends the process at once
during an import; elsewhere KeyboardInterrupt is raised, and a thread that the system wakes ends the process where the
exception has not done so in time. What must be written whole is written within `shield`. A program that uses the
library keeps Python's own behaviour. Knows nothing of what is interrupted.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

EXIT_CODE = 130  # as shells report it
GRACE_S = 0.5  # for KeyboardInterrupt to end the process: requests are cancelled, scratch folders removed
LINE = "interrupted"

shield = threading.RLock()  # held while something is written that must be whole; the process ends afterwards
_lines: dict[Any, Callable[[], str]] = {}  # by handler: the line with which the process ends in spite of it


def answer_interrupts() -> None:
    """From now on Ctrl-C ends this process; to be called in the main thread. Where it is ignored it stays ignored."""
    if answered() or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        return
    read, write = os.pipe()
    os.set_blocking(write, False)
    _lines[_on_interrupt] = lambda: LINE
    signal.signal(signal.SIGINT, _on_interrupt)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(read,), name="forerun-interrupts", daemon=True).start()


def answered() -> bool:
    """Whether this process is one in which `leave` may be called."""
    return _on_interrupt in _lines


def only_raise() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt and does no more: for a conversation, which continues after it."""
    if answered():
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def handled_by(handler: Callable[[int, FrameType | None], None], line: Callable[[], str]) -> Iterator[None]:
    """Within it Ctrl-C calls `handler` instead of raising; where the process is to end by then all the same, it ends
    with `line`. To be called in the main thread."""
    before = signal.signal(signal.SIGINT, handler)
    _lines[handler] = line
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        del _lines[handler]


def leave(line: str = LINE) -> NoReturn:
    """End the process at once: Python would wait for threads that still load weights, and a second Ctrl-C would make it
    kill them in the middle of C++ code, which aborts."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    shield.acquire()  # for ever: another thread that comes here waits until the process has ended
    with suppress(OSError):
        if os.isatty(2):
            os.write(2, b"\r\x1b[2K\x1b[?25h")  # a progress bar leaves neither itself nor a hidden cursor
        os.write(2, f"{line}\n".encode(sys.stderr.encoding or "ascii", "replace"))
    os._exit(EXIT_CODE)


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    if _importing(frame):
        leave()
    raise KeyboardInterrupt


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _watch(wakeups: int) -> None:
    while True:
        if os.read(wakeups, 1)[0] != signal.SIGINT or signal.getsignal(signal.SIGINT) not in _lines:
            continue  # a conversation or a server has its own answer to it
        time.sleep(GRACE_S)
        with shield:
            line = _lines.get(signal.getsignal(signal.SIGINT))
            if line is not None:
                leave(line())
