"""A unified diff of a text and its new version, hunk by hunk while the new version still comes.

Where the last lines that came are lines of the old text, both are aligned there, and everything before is compared and
emitted. The diff is always right, and as short as a whole comparison's unless a block of lines occurs several times.
Lines are compared with their ends, as `patch` and `git apply` do: one that has lost its end, or got one, has changed.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence

from forerun.text.edit_program import SourceLines

CONTEXT_LINES = 3  # around a change
_ALIGNED_LINES = 2 * CONTEXT_LINES  # the context after one change and before the next
_NO_LINE_END = "\n\\ No newline at end of file\n"


class DiffStream:
    def __init__(self, source: SourceLines, name: str) -> None:
        self._old = source.ended(source.lines)
        self._source = source
        self._held: list[str] = []  # where the last line has no end: the one that may be the last
        tab = "\t" if " " in name else ""  # ends a name with spaces, as in git's diffs
        self._head = f"--- a/{name}{tab}\n+++ b/{name}{tab}\n"
        self._old_at = self._new_at = 0  # what was compared
        self._new: list[str] = []  # that was not
        self._lead = 0  # lines that were aligned and begin what is compared next
        self._places: dict[tuple[str, ...], list[int]] = {}
        for i in range(len(self._old) - _ALIGNED_LINES + 1):
            self._places.setdefault(tuple(self._old[i : i + _ALIGNED_LINES]), []).append(i)

    def push(self, lines: Sequence[str]) -> str:
        """Hunks that are complete with these lines."""
        found, known = "", [*self._held, *lines]
        if self._source.ends_open:
            self._held = [known.pop()] if known else []
        for line in known:
            self._new.append(line + self._source.line_end)
            place = self._aligned_place()
            if place is not None:
                found += self._compare(place + CONTEXT_LINES, len(self._new) - CONTEXT_LINES, last=False)
                self._lead = CONTEXT_LINES
        return found

    def _aligned_place(self) -> int | None:
        """Where the last lines are in the old text, behind the lines that were aligned before."""
        first = len(self._new) - _ALIGNED_LINES
        if first >= 0 and self._new == self._old[self._old_at : self._old_at + len(self._new)]:
            return self._old_at + first
        places = self._places.get(tuple(self._new[first:]), ()) if first >= self._lead else ()
        return next((place for place in places if place >= self._old_at + self._lead), None)

    def finish(self) -> str:
        """The rest, when no more lines come."""
        self._new += self._source.ended(self._held)
        return self._compare(len(self._old), len(self._new), last=True)

    def _compare(self, old_end: int, new_count: int, last: bool) -> str:
        old, new = self._old[self._old_at : old_end], self._new[:new_count]
        found = "" if old == new else "".join(self._hunks(old, new, last))
        self._old_at, self._new_at, self._new = old_end, self._new_at + new_count, self._new[new_count:]
        if found:
            found, self._head = self._head + found, ""
        return found

    def _hunks(self, old: list[str], new: list[str], last: bool) -> Iterator[str]:
        for group in self._groups(old, new, 0 if last else CONTEXT_LINES):
            (_, i, _, a, _), (_, _, j, _, b) = group[0], group[-1]
            yield f"@@ -{_range(self._old_at + i, j - i)} +{_range(self._new_at + a, b - a)} @@\n"
            for tag, i1, i2, a1, a2 in group:
                if tag == "equal":
                    yield from _marked(" ", old[i1:i2])
                    continue
                yield from _marked("-", old[i1:i2])
                yield from _marked("+", new[a1:a2])

    def _groups(self, old: list[str], new: list[str], tail: int) -> Iterator[list[tuple[str, int, int, int, int]]]:
        """Changes with the lines around them; lines that were aligned stay so, whatever else they are equal to."""
        lead = self._lead
        inner = difflib.SequenceMatcher(None, old[lead : len(old) - tail], new[lead : len(new) - tail], autojunk=False)
        matcher = difflib.SequenceMatcher(None, old, new)
        codes = [("equal", 0, lead, 0, lead)] if lead else []
        codes += [(tag, i + lead, j + lead, a + lead, b + lead) for tag, i, j, a, b in inner.get_opcodes()]
        codes += [("equal", len(old) - tail, len(old), len(new) - tail, len(new))] if tail else []
        matcher.opcodes = _joined(codes)  # type: ignore[attr-defined]
        return matcher.get_grouped_opcodes(CONTEXT_LINES)  # type: ignore[return-value]


def _joined(codes: list[tuple[str, int, int, int, int]]) -> list[tuple[str, int, int, int, int]]:
    """Equal spans that follow each other as one."""
    found: list[tuple[str, int, int, int, int]] = []
    for code in codes:
        if found and code[0] == found[-1][0] == "equal":
            found[-1] = ("equal", found[-1][1], code[2], found[-1][3], code[4])
        else:
            found.append(code)
    return found


def _marked(mark: str, lines: Sequence[str]) -> Iterator[str]:
    for line in lines:
        yield f"{mark}{line}" + ("" if line.endswith("\n") else _NO_LINE_END)


def _range(before: int, count: int) -> str:
    return f"{before + (count > 0)}" + ("" if count == 1 else f",{count}")
