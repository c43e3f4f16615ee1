"""Messages typed or pasted into a terminal. A pasted text of several lines is one message. Knows no model."""

from __future__ import annotations

import contextlib
import select
import sys

PASTE_PAUSE_S = 0.05  # lines of a paste arrive sooner than this after each other; typed ones do not


def enable_editing() -> None:
    """Line editing and history for `input()`; a terminal then marks what is pasted, and its line breaks stay in it."""
    with contextlib.suppress(ImportError):
        import readline

        readline.parse_and_bind("set enable-bracketed-paste on")


def read_message(prompt: str) -> str:
    """One message. Where pasted lines arrive one by one, those that are there already belong to it."""
    lines = [input(prompt)]
    with contextlib.suppress(EOFError):
        while _line_waits():
            lines.append(input(""))
    return "\n".join(lines)


def _line_waits() -> bool:
    """Whether a terminal holds another line; input from a pipe is one message a line."""
    try:
        return sys.stdin.isatty() and bool(select.select([sys.stdin], [], [], PASTE_PAUSE_S)[0])
    except (OSError, ValueError):  # no file, or none that can be waited for
        return False
