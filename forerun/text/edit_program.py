"""Edits as programs: copy steps over the numbered lines of a text, and new lines between them.

    <copy 1-12>
    <new>
        return a * b
    </new>
    <copy 14-end>

Copies go forward, each line is copied at most once; what is not copied is deleted. Any text can be made of any other,
but for new lines that begin with `</new>`. Knows lines and programs, no model and no tokens.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

NEW, END_NEW = "<new>", "</new>"
_HEADER = re.compile(r"<copy (\d+)-(\d+|end)>")
MIN_COPIED_LINES = 2  # between two changes: a program of many short copies is longer than the lines


@dataclass(frozen=True)
class CopyStep:
    """Lines `first` to `last`, counted from 1; `last` None: to the end, which ends the program."""

    first: int
    last: int | None


@dataclass(frozen=True)
class NewStep:
    lines: tuple[str, ...]


ProgramStep = CopyStep | NewStep


class SourceLines:
    """A text as lines without their ends. A last line without an end, and ends of two characters, are as before in
    what is made of the lines."""

    def __init__(self, text: str) -> None:
        self.line_end = "\r\n" if "\r\n" in text and text.count("\r\n") == text.count("\n") else "\n"
        self.lines = text.split(self.line_end)
        self.ends_open = self.lines[-1] != ""  # the last line has no line end
        if not self.ends_open:
            self.lines.pop()

    def numbered(self) -> str:
        return "\n".join(f"{number}|{line}" for number, line in enumerate(self.lines, 1))

    def span(self, step: CopyStep) -> list[str]:
        return self.lines[step.first - 1 : step.last]

    def ended(self, lines: Sequence[str]) -> list[str]:
        """The lines of a whole text with their ends, as they are in this one."""
        found = [line + self.line_end for line in lines]
        return [*found[:-1], *lines[-1:]] if self.ends_open and self.lines else found

    def join(self, lines: Sequence[str]) -> str:
        """A whole text of these lines, with line ends as in this one."""
        return "".join(self.ended(lines))


def oracle(old: SourceLines, new: Sequence[str]) -> list[ProgramStep]:
    """A program that makes `new` of `old`, by a comparison of the lines."""
    matcher = difflib.SequenceMatcher(None, old.lines, new, autojunk=False)
    found: list[ProgramStep] = []
    written: list[str] = []
    for tag, i, j, a, b in matcher.get_opcodes():
        at_end = j == len(old.lines) and b == len(new)
        if tag == "equal" and (j - i >= MIN_COPIED_LINES or i == 0 or at_end):
            found += [NewStep(tuple(written))] if written else []
            found.append(CopyStep(i + 1, None if at_end else j))
            written = []
        else:
            written += new[a:b]
    found += [NewStep(tuple(written))] if written or not found else []
    if any(line.startswith(END_NEW) for step in found if isinstance(step, NewStep) for line in step.lines):
        raise ValueError(f"a new line begins with {END_NEW}")
    return found


def program_text(steps: Iterable[ProgramStep], shown: SourceLines | None = None) -> str:
    """A program as a model writes it; `shown`: with the copied lines after each copy but the last."""
    parts: list[str] = []
    for step in steps:
        if isinstance(step, CopyStep):
            parts.append(f"<copy {step.first}-{'end' if step.last is None else step.last}>")
            parts += shown.span(step) if shown is not None and step.last is not None else []
        else:
            parts += [NEW, *step.lines, END_NEW]
    return "".join(part + "\n" for part in parts)


class ProgramReader:
    """Turns a program into lines of the new text, as the program comes."""

    def __init__(self, source: SourceLines) -> None:
        self.source = source
        self.steps: list[ProgramStep] = []
        self.complete = True  # the program could end here
        self._rest = ""
        self._written: list[str] | None = None  # by the new step that is open

    def push(self, text: str) -> list[str]:
        """Lines of the new text that are known now."""
        *lines, self._rest = (self._rest + text).split("\n")
        found: list[str] = []
        for line in lines:
            found += self._read(line)
        self.complete = self._written is None and not self._rest
        return found

    def flush(self) -> list[str]:
        """Nothing: what was not copied is not in the new text."""
        return []

    def _read(self, line: str) -> list[str]:
        if self._written is not None:
            if line == END_NEW:
                self.steps.append(NewStep(tuple(self._written)))
                self._written = None
                return []
            self._written.append(line)
            return [line]
        if line == NEW:
            self._written = []
            return []
        header = _HEADER.fullmatch(line)
        if header is None:
            raise ValueError(f"{line!r:.80} is no step of a program")
        step = CopyStep(int(header[1]), None if header[2] == "end" else int(header[2]))
        self.steps.append(step)
        return self.source.span(step)


def apply_program(source: SourceLines, program: str) -> str:
    """The new text of a whole program."""
    reader = ProgramReader(source)
    lines = reader.push(program)
    if not reader.complete:
        raise ValueError("the program ends inside a step")
    return source.join(lines)


# -- patterns of the steps ---------------------------------------------------------------------------------------------


def step_pattern(first: int, count: int, may_write: bool, may_end: bool) -> str:
    """A regex of what a step begins with, for a text of `count` lines of which those from `first` on may be copied: a
    copy up to its hyphen or to the end of the text (`-end` is one token of many tokenizers), or a whole new step."""
    ways = [rf"<copy {number_pattern(first, count)}-(end>\n)?"] if first <= count else []
    if may_write:
        ways.append(rf"{NEW}\n(?:{line_pattern(END_NEW)}\n)*<\/new>\n")
    return f"({'|'.join(ways)})" + ("?" if may_end else "")


def line_pattern(marker: str) -> str:
    """A regex of lines that do not begin with a marker."""
    found = ""
    for char in reversed(marker):
        shown = "\\/" if char == "/" else char
        found = rf"(?:[^\n{shown}][^\n]*" + (f"|{shown}{found})?" if found else ")?")
    return found


def range_pattern(first: int, count: int) -> str:
    """A regex of what follows the hyphen of a copy that begins at line `first`."""
    return rf"({number_pattern(first, count)}|end)>\n"


def number_pattern(low: int, high: int) -> str:
    """A regex of the numbers from `low` to `high`, without leading zeros."""
    ways = []
    for digits in range(len(str(low)), len(str(high)) + 1):
        least, most = max(low, 10 ** (digits - 1)), min(high, 10**digits - 1)
        ways.append(_digits_between(str(least), str(most)))
    return f"({'|'.join(ways)})"


def _digits_between(low: str, high: str) -> str:
    """For numbers of the same length."""
    if not low:
        return ""
    head, rest = int(low[0]), len(low) - 1
    if low[0] == high[0]:
        return low[0] + _digits_between(low[1:], high[1:])
    ways = [low[0] + _digits_between(low[1:], "9" * rest), high[0] + _digits_between("0" * rest, high[1:])]
    if int(high[0]) - head > 1:
        ways.append(f"[{head + 1}-{int(high[0]) - 1}]" + f"[0-9]{{{rest}}}" * (rest > 0))
    return f"({'|'.join(ways)})"
