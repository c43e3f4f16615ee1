"""Plots of studies as PNG files. What is drawn is a `Figure`, plain numbers; only `draw` knows matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Line:
    """A series; `low` and `high` are the ends of its intervals, where it has some."""

    name: str
    x: list[float]
    y: list[float]
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)


@dataclass
class Figure:
    title: str
    x_label: str
    y_label: str
    lines: list[Line]
    ticks: Sequence[str] = ()  # names of x = 0, 1, ...: points instead of lines
    log_y: bool = False


def draw(figure: Figure, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(max(6.4, 0.5 * len(figure.ticks) + 3), 4.4), dpi=150, layout="constrained")
    FigureCanvasAgg(canvas)
    axes = canvas.add_subplot()
    for number, line in enumerate(figure.lines):
        shift = 0.12 * (number - (len(figure.lines) - 1) / 2) if figure.ticks else 0.0
        x = [value + shift for value in line.x]
        if line.low:
            # an interval may miss its figure by a hair, or be unknown: never a negative bar
            below = [max(0.0, y - low) if math.isfinite(low) else 0.0 for y, low in zip(line.y, line.low, strict=True)]
            above = [
                max(0.0, high - y) if math.isfinite(high) else 0.0 for y, high in zip(line.y, line.high, strict=True)
            ]
            style = "o" if figure.ticks else "o-"
            axes.errorbar(x, line.y, [below, above], fmt=style, capsize=3, markersize=4, label=line.name or None)
        else:
            axes.plot(x, line.y, "o" if figure.ticks else "-", markersize=4, label=line.name or None)
    if figure.ticks:
        axes.set_xticks(range(len(figure.ticks)), figure.ticks, rotation=20, ha="right")
    if figure.log_y and any(value > 0 for line in figure.lines for value in line.y):
        axes.set_yscale("log")
    axes.set_title(figure.title, loc="left", fontsize="medium")
    axes.set_xlabel(figure.x_label)
    axes.set_ylabel(figure.y_label)
    axes.grid(alpha=0.3)
    if any(line.name for line in figure.lines):
        axes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.savefig(path)
