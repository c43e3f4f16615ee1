"""Answers as they come, side by side in a terminal: text so far, time to the first token, tokens a second.

One lane runs at a time, and its clock with it. Where output is no terminal, finished lanes are written one after the
other. Knows events and clocks; not what is compared.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from forerun.core.progress import status

if TYPE_CHECKING:
    from forerun.core import Usage
    from forerun.engine.sequence import Event

MIN_SIDE_BY_SIDE_COLUMNS = 90  # of the terminal; below, lanes are stacked
MAX_ANSWER_LINES = 9  # of an answer, its last ones
FRAMES_PER_S = 8


@dataclass(eq=False)
class Lane:
    """One answer as it is generated, with the times that its reader sees."""

    name: str
    text: str = ""
    provisional: str = ""  # may still be retracted
    tokens: int = 0
    token_ids: list[int] | None = None
    usage: Usage | None = None
    shown_s: float = 0.0  # to the first provisional token
    first_s: float = 0.0
    total_s: float = 0.0
    _start: float = 0.0
    _open: int = 0  # provisional tokens that are neither confirmed nor retracted

    def run(self, events: Iterable[Event]) -> None:
        """Read an answer to its end; the clock starts with the first read of `events`."""
        self._start, self.token_ids = time.perf_counter(), []
        for event in events:
            self._add(event)
        self.total_s = self.elapsed

    def _add(self, event: Event) -> None:
        if event.provisional:
            self.shown_s = self.shown_s or self.elapsed
            self.provisional += event.text
            self._open += len(event.token_ids)
            return
        assert self.token_ids is not None
        if event.token_ids:
            self.first_s = self.first_s or self.elapsed
        self._open = 0 if event.retracted or event.finish_reason else max(0, self._open - event.confirmed)
        if not self._open:
            self.provisional = ""
        self.text += event.text
        self.token_ids += event.token_ids
        self.tokens += len(event.token_ids)
        self.usage = event.usage or self.usage

    @property
    def elapsed(self) -> float:
        """Seconds since its start; 0 before that."""
        return self.total_s or (time.perf_counter() - self._start if self._start else 0.0)

    @property
    def rate(self) -> float:
        """Tokens a second after the first."""
        if self.usage is not None:
            return self.usage.tokens_per_second
        return (self.tokens - 1) / (self.elapsed - self.first_s) if self.tokens > 1 else 0.0

    @property
    def figures(self) -> str:
        parts = [f"provisional after {self.shown_s:.2f} s"] if self.shown_s else []
        if self.first_s:
            parts += [f"first token after {self.first_s:.2f} s", f"{self.rate:.1f} tokens/s"]
        return " · ".join(parts)


class Race:
    """Lanes on a screen; use as a context around their runs."""

    def __init__(self, console: Console, *lanes: Lane) -> None:
        self._console, self.lanes = console, lanes
        self._live: Any = nullcontext()
        if console.is_terminal and not console.is_dumb_terminal:
            self._live = Live(get_renderable=self._view, console=console, refresh_per_second=FRAMES_PER_S)

    def __enter__(self) -> Race:
        self._live.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._live.__exit__(*exc)

    def run(self, lane: Lane, events: Iterable[Event]) -> None:
        if isinstance(self._live, nullcontext):
            with status(lane.name, Console(stderr=True)):
                lane.run(events)
            self._console.print(f"{lane.name}: {lane.figures}", markup=False)
            self._console.print(lane.text.strip(), markup=False, style="dim")
        else:
            lane.run(events)

    def _view(self) -> RenderableType:
        """Side by side where there is room; never more lines than the screen has."""
        width, height = self._console.size
        beside = width >= MIN_SIDE_BY_SIDE_COLUMNS and len(self.lanes) > 1
        stacked = 1 if beside else len(self.lanes)
        lines = max(1, min(MAX_ANSWER_LINES, (height - 2) // stacked - 4))
        inner = (width // len(self.lanes) if beside else width) - 4
        panels = [self._panel(lane, inner, lines) for lane in self.lanes]
        if not beside:
            return Group(*panels)
        grid = Table.grid(expand=True)
        for _ in panels:
            grid.add_column(ratio=1)
        grid.add_row(*panels)
        return grid

    def _panel(self, lane: Lane, width: int, lines: int) -> Panel:
        shown = lane.provisional or lane.text
        wrapped = [part for line in shown.split("\n") for part in (textwrap.wrap(line, max(8, width)) or [""])][-lines:]
        body = Text("\n".join(wrapped + [""] * (lines - len(wrapped))), style="dim" if lane.provisional else "")
        state = "waiting" if not lane.elapsed else f"{lane.elapsed:.1f} s" + ("" if lane.total_s else " ...")
        figures = Text(lane.figures, style="dim", overflow="ellipsis", no_wrap=True)
        style = "green" if lane.elapsed and not lane.total_s else ""
        return Panel(Group(body, figures), title=Text(f"{lane.name} · {state}"), title_align="left", border_style=style)
