"""Edits as replacements: the old lines as they are in the text, and the new lines in their place.

    <<<<<<< SEARCH
        return a + b
    =======
        return a * b
    >>>>>>> REPLACE

All other lines stay. The markers are those that code models know; they are longer where the text has such lines itself.
A place is named by its content and not by its number, which models get right that cannot count lines. Replacements go
forward through the text. Knows lines, no model and no tokens.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Sequence

from forerun.text.edit_program import SourceLines, line_pattern

_MARKER_CHARS = 7


class Markers:
    """Three lines that no line of a text begins with."""

    def __init__(self, source: SourceLines) -> None:
        runs = (re.match(r"<+|=+|>+", line) for line in source.lines)
        size = max([_MARKER_CHARS, *(len(run[0]) + 1 for run in runs if run is not None)])
        self.search, self.divider, self.end = f"{'<' * size} SEARCH", "=" * size, f"{'>' * size} REPLACE"


def replace_grammar(source: SourceLines) -> str:
    """Lark rules of one or more replacements whose old lines are lines of the text that follow each other there. That
    they go forward through the text is not a part of it."""
    marks = Markers(source)
    search, divider, end = (json.dumps(line + "\n") for line in (marks.search, marks.divider, marks.end))
    old = json.dumps({"substring_chunks": [line + "\n" for line in source.lines]})
    return f"""start: replacement+
replacement: {search} OLD {divider} NEW* {end}
OLD: %regex {old} & /(.|\\n)+/
NEW: /({line_pattern(marks.end)})\\n/
"""


def replacements(old: SourceLines, new: Sequence[str]) -> str:
    """The replacements that make `new` of `old`, by a comparison of the lines. A place of which the lines occur before
    is named by more of them; lines are inserted after, or before, a line that is repeated."""
    marks, lines, done, text = Markers(old), old.lines, 0, ""
    matcher = difflib.SequenceMatcher(None, lines, new, autojunk=False)
    for tag, i, j, a, b in matcher.get_opcodes():
        if tag == "equal":
            continue
        more = 0  # lines before the change that are repeated on both sides
        while i - more > done and (i - more == j or find_lines(lines, lines[i - more : j], done) != i - more):
            more += 1
        after = int(i - more == j or find_lines(lines, lines[i - more : j], done) != i - more)
        found = lines[i - more : j + after]
        if not found or find_lines(lines, found, done) != i - more:
            raise ValueError(f"line {i + 1} cannot be named by its content")
        shown = [*lines[i - more : i], *new[a:b], *lines[j : j + after]]
        text += "".join(line + "\n" for line in [marks.search, *found, marks.divider, *shown, marks.end])
        done = j + after
    return text


def find_lines(lines: Sequence[str], part: Sequence[str], start: int) -> int | None:
    """Where some lines are first, from `start` on; white space at their ends does not count where it has to."""
    for same in (lambda line: line, str.rstrip):
        wanted = [same(line) for line in part]
        for place in range(start, len(lines) - len(part) + 1):
            if same(lines[place]) == wanted[0] and [same(x) for x in lines[place : place + len(part)]] == wanted:
                return place
    return None


class ReplaceReader:
    """Turns replacements into lines of the new text, as they come."""

    def __init__(self, source: SourceLines) -> None:
        self.source, self._marks = source, Markers(source)
        self.places: list[tuple[int, int]] = []  # first line, counted from 0, and number of lines of each replacement
        self.complete = True  # the answer could end here
        self._at = 0  # the first line that is not in the new text yet
        self._rest = ""
        self._old: list[str] | None = None  # of the replacement that is open
        self._inside_new = False

    def push(self, text: str) -> list[str]:
        """Lines of the new text that are known now."""
        *lines, self._rest = (self._rest + text).split("\n")
        found: list[str] = []
        for line in lines:
            found += self._read(line)
        self.complete = self._old is None and not self._rest
        return found

    def flush(self) -> list[str]:
        """The rest, when no more text comes."""
        return self.source.lines[self._at :]

    def _read(self, line: str) -> list[str]:
        if self._old is None:
            if line != self._marks.search:
                raise ValueError(f"{line!r:.80} begins no replacement")
            self._old = []
        elif self._inside_new and line == self._marks.end:
            self._old, self._inside_new = None, False
        elif self._inside_new:
            return [line]
        elif line == self._marks.divider:
            self._inside_new = True
            return self._up_to_old(self._old)
        else:
            self._old.append(line)
        return []

    def _up_to_old(self, old: list[str]) -> list[str]:
        place = find_lines(self.source.lines, old, self._at)
        if place is None:
            raise ValueError(f"the lines from {old[0]!r:.60} on are not in the text after line {self._at}")
        kept, self._at = self.source.lines[self._at : place], place + len(old)
        self.places.append((place, len(old)))
        return kept


class BlockReader:
    """Lines of the first code block of an answer as they come; all lines where there is no block."""

    def __init__(self, source: SourceLines) -> None:
        self.complete = True
        self._fence = fence_for(source)
        self._rest = ""
        self._before: list[str] = []  # the block begins
        self._inside = self._closed = False

    def push(self, text: str) -> list[str]:
        *lines, self._rest = (self._rest + text).split("\n")
        return [line for line in lines if self._belongs(line)]

    def flush(self) -> list[str]:
        """The rest, when no more text comes."""
        found = self.push("\n") if self._rest else []
        return found if self._inside or self._closed else self._before

    def _belongs(self, line: str) -> bool:
        if self._inside and line.rstrip() == self._fence:
            self._inside, self._closed = False, True
        elif self._inside:
            return True
        elif not self._closed and line.startswith(self._fence):
            self._inside = True
        elif not self._closed:
            self._before.append(line)
        return False


def fence_for(source: SourceLines) -> str:
    """A fence that no line of the text begins with."""
    return "`" * max(3, 1 + max((len(line) - len(line.lstrip("`")) for line in source.lines), default=0))
