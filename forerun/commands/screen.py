"""An answer in a terminal as it comes. Provisional text is dim, and is replaced by the answer itself as soon as all of
it is confirmed or retracted; where output is no terminal, only the answer is written. And tables.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from forerun.engine.sequence import Event

DIM, PLAIN, CLEAR = "\x1b[2m", "\x1b[22m", "\x1b[J"
TAB_COLUMNS = 8


class Screen:
    """Writes events from the left edge on; `text` is the answer so far."""

    def __init__(self, out: TextIO) -> None:
        self.text = ""
        self._out, self._terminal = out, out.isatty()
        self._shown = ""  # provisional text that is on the screen
        self._open = 0  # provisional tokens that are neither confirmed nor retracted
        self._held = ""  # answer that is on the screen as provisional text, with more of that after it

    def show(self, event: Event) -> None:
        if event.provisional:
            if not self._terminal:
                return
            self._shown += event.text
            self._open += len(event.token_ids)
            self._out.write(f"{DIM}{event.text}{PLAIN}" if event.text else "")
        else:
            self.text += event.text
            self._held += event.text
            self._open = 0 if event.retracted or event.finish_reason else max(0, self._open - event.confirmed)
            if not self._open:
                self._out.write(self._erase() + self._held)
                self._held = ""
        self._out.flush()

    def _erase(self) -> str:
        """Back to where the provisional text began, with nothing after it."""
        if not self._shown:
            return ""
        up = rows(self._shown, shutil.get_terminal_size().columns) - 1
        self._shown = ""
        return "\r" + (f"\x1b[{up}A" if up else "") + CLEAR


def rows(text: str, columns: int) -> int:
    """Lines that a text takes on a screen, from the left edge on."""
    lines = text.expandtabs(TAB_COLUMNS).split("\n")
    from rich.cells import cell_len

    return sum(max(1, -(-cell_len(line) // max(1, columns))) for line in lines)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], **options: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns, title_justify="left", **options)
    for row in rows:
        table.add_row(*row)
    Console(highlight=False).print(table)
