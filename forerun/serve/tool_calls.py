"""Reads calls out of an answer as it comes: text, then calls in the model's own form, told piece by piece.

Two forms are known. Qwen's (and Hermes'): `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, among text.
Llama's: an answer that is `{"name": ..., "parameters": {...}}`, several of them parted by `;`. A bare object that names
one of the tools counts in either form, fenced or not, as small models forget the marks. What begins like a call and is
none is text all the same. Knows no HTTP, no grammar and no tokens.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

BEGIN, END = "<tool_call>", "</tool_call>"
TAG = "<|python_tag|>"
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_FENCE = re.compile(r"\s*```(?:json)?[ \t]*\n\s*(?=\{)")
_FENCE_BEGUN = re.compile(r"`{1,3}(?:j(?:s(?:on?)?)?)?[ \t]*(?:\n\s*)?")
_OPENING, _KEYS = '{"name":"', (',"arguments":{', ',"parameters":{')


@dataclass
class Call:
    """One call so far."""

    name: str
    arguments: str = ""
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")


@dataclass
class Piece:
    """What a bit of text added: content, or a part of call number `call`; its first part has the call itself."""

    content: str = ""
    call: int = -1
    begun: Call | None = None
    arguments: str = ""


class CallReader:
    """One answer. `push` what comes, then `finish`; `calls` are those so far. `only`: nothing else is an answer, what
    was cut off before it became a call least of all."""

    def __init__(self, names: Collection[str], only: bool = False) -> None:
        self._names, self._only = names, only
        self.calls: list[Call] = []
        self._buffer = ""
        self._state: Callable[[], bool] = self._start
        self._marked = False  # the call at hand stands between marks
        self._fence = ""  # what stood before a bare object
        self._depth, self._quoted, self._escaped = 0, False, False
        self._pieces: list[Piece] = []

    def push(self, text: str) -> list[Piece]:
        self._buffer += text
        while self._state():
            pass
        told, self._pieces = self._pieces, []
        return told

    def finish(self) -> list[Piece]:
        """What was held back. White space after calls is nobody's."""
        told = self.push("")
        rest, self._buffer = self._buffer, ""
        if self._state == self._head:
            self._whole(rest, marked=self._marked, end="")
        elif self._state in (self._start, self._text):
            self._say(rest if not self.calls or rest.strip() else "")
        return told + self._pieces

    # -- states: each returns whether there is more to do with what is there -------------------------------------------

    def _start(self) -> bool:
        """Nothing was said yet: a bare object may be a call."""
        begun = self._buffer.lstrip()
        if not begun or TAG.startswith(begun):
            return False
        if begun.startswith(TAG):
            self._buffer = begun[len(TAG) :]
            return True
        if "```".startswith(begun[:3]):
            found = _FENCE.match(self._buffer)
            if not found:
                if _FENCE_BEGUN.fullmatch(begun):
                    return False
                self._state = self._text
                return True
            self._fence, self._buffer = found[0], self._buffer[found.end() :]
            begun = self._buffer
        self._state, self._marked = (self._head, False) if begun[0] == "{" else (self._text, False)
        return True

    def _text(self) -> bool:
        at = self._buffer.find(BEGIN)
        if at >= 0:
            self._say(self._buffer[:at].rstrip())
            self._buffer = self._buffer[at + len(BEGIN) :]
            self._state, self._marked = self._head, True
            return True
        # White space before a call is no content, nor is a mark that is still being written
        held = _overlap(self._buffer, BEGIN)
        kept = self._buffer[: len(self._buffer) - held].rstrip()
        if kept:
            self._say(kept)
            self._buffer = self._buffer[len(kept) :]
        return False

    def _head(self) -> bool:
        found = _HEAD.match(self._buffer)
        if found and (self._marked or found[1] in self._names):
            self._begin(found[1])
            self._buffer = self._buffer[found.end() :]
            self._state = self._arguments
            return True
        if not self._marked:
            if self._possible():
                return False
            self._buffer, self._fence, self._state = self._fence + self._buffer, "", self._text
            return True
        at = self._buffer.find(END)
        if at < 0:
            return False
        body, self._buffer = self._buffer[:at], self._buffer[at + len(END) :]
        self._whole(body, marked=True)
        self._state = self._between
        return True

    def _arguments(self) -> bool:
        """Their text, as it is, up to the end of the object."""
        for at, char in enumerate(self._buffer):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = char == "\\", char != '"'
            elif char == '"':
                self._quoted = True
            else:
                self._depth += (char in "{[") - (char in "}]")
                if not self._depth:
                    self._add(self._buffer[: at + 1])
                    self._buffer, self._state = self._buffer[at + 1 :], self._tail
                    return True
        self._add(self._buffer)
        self._buffer = ""
        return False

    def _tail(self) -> bool:
        """After the arguments: the object's end, and the mark's."""
        if not self._marked:
            self._buffer = self._buffer.lstrip()
            if self._buffer.startswith("}"):
                self._buffer, self._state = self._buffer[1:], self._between
            return self._state == self._between
        at, again = self._buffer.find(END), self._buffer.find(BEGIN)
        if again >= 0 and (at < 0 or again < at):  # the end was forgotten
            self._buffer, self._state = self._buffer[again:], self._between
        elif at >= 0:
            self._buffer, self._state = self._buffer[at + len(END) :], self._between
        return self._state == self._between

    def _between(self) -> bool:
        """After a call: another one, or text."""
        begun = self._buffer.lstrip(" \t\r\n;`" if not self._marked else " \t\r\n")
        if not begun:
            return False
        if self._marked or begun[0] != "{":
            self._buffer, self._state = begun, self._text
        else:
            self._buffer, self._state = begun, self._head
        return True

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _possible(self) -> bool:
        """Whether a bare object may still turn out to be a call of one of the tools."""
        written = re.sub(r"\s+", "", self._buffer)
        if len(written) < len(_OPENING):
            return _OPENING.startswith(written)
        name, quote, after = written[len(_OPENING) :].partition('"')
        if not written.startswith(_OPENING) or not quote:
            return written.startswith(_OPENING) and any(known.startswith(name) for known in self._names)
        return name in self._names and any(key.startswith(after) or after.startswith(key) for key in _KEYS)

    def _whole(self, body: str, marked: bool, end: str = END) -> None:
        """A call that is not written in the usual order, or that is none."""
        try:
            found = json.loads(body)
            name, values = found["name"], found.get("arguments", found.get("parameters", {}))
            fits = isinstance(name, str) and (marked or name in self._names)
        except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
            fits = False
        if fits:
            self._begin(name)
            self._add(values if isinstance(values, str) else json.dumps(values, ensure_ascii=False))
        else:
            self._say(f"{BEGIN}{body}{end}" if marked else self._fence + body)

    def _say(self, text: str) -> None:
        if text and not self._only:
            self._pieces.append(Piece(content=text))

    def _begin(self, name: str) -> None:
        self._depth, self._quoted, self._escaped = 0, False, False
        self.calls.append(Call(name))
        self._pieces.append(Piece(call=len(self.calls) - 1, begun=self.calls[-1]))

    def _add(self, arguments: str) -> None:
        if arguments:
            self.calls[-1].arguments += arguments
            self._pieces.append(Piece(call=len(self.calls) - 1, arguments=arguments))


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins `mark`."""
    for size in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0
