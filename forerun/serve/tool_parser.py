"""Parses tool calls out of streamed text, incrementally: content, then calls in the model's own form.

Two forms are parsed. Qwen's (and Hermes'): `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, among text.
Llama's: a whole output `{"name": ..., "parameters": {...}}`, several of them separated by `;`. A bare object that names
one of the tools counts in either form, fenced or not, as small models omit the marks. Text that begins like a call and
is not one stays content. Knows no HTTP, no grammar and no tokens.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from forerun.engine.output import overlap

CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_FENCE = re.compile(r"\s*```(?:json)?[ \t]*\n\s*(?=\{)")
_FENCE_BEGUN = re.compile(r"`{1,3}(?:j(?:s(?:on?)?)?)?[ \t]*(?:\n\s*)?")
_CUT_CALL = re.compile(r'$|\{$|\{"')  # the beginning of an object, without white space
_OPENING, _KEYS = '{"name":"', (',"arguments":{', ',"parameters":{')


@dataclass
class ParsedCall:
    """One call so far."""

    name: str
    arguments: str = ""
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")


@dataclass
class ToolCallDelta:
    """What some text added: content, or a part of call number `call`; its first part has the call itself."""

    content: str = ""
    call: int = -1
    begun: ParsedCall | None = None
    arguments: str = ""


class ToolCallParser:
    """For one output: `push` its text, then `finish`; `calls` are those so far. `only`: content is dropped, and so is a
    call that was cut off before its name."""

    def __init__(self, names: Collection[str], only: bool = False) -> None:
        self._names, self._only = names, only
        self.calls: list[ParsedCall] = []
        self._buffer = ""
        self._state: Callable[[], bool] = self._start
        self._marked = False  # the current call is between marks
        self._fence = ""  # the fence before a bare object
        self._depth, self._quoted, self._escaped = 0, False, False
        self._deltas: list[ToolCallDelta] = []

    def push(self, text: str) -> list[ToolCallDelta]:
        self._buffer += text
        while self._state():
            pass
        deltas, self._deltas = self._deltas, []
        return deltas

    def finish(self, cut_off: bool = False) -> list[ToolCallDelta]:
        """The rest that was held back. White space after calls is dropped. `cut_off`: the output ended at its length
        limit; then a call without its whole name is no content either, and is dropped."""
        deltas = self.push("")
        rest, self._buffer = self._buffer, ""
        if self._state == self._head:
            self._whole(rest, self._marked, end="", drop=cut_off and bool(_CUT_CALL.match(re.sub(r"\s+", "", rest))))
        elif cut_off and rest.strip() and any(mark.startswith(rest.strip()) for mark in (CALL_BEGIN, PYTHON_TAG)):
            pass  # a part of the mark
        elif self._state in (self._start, self._text):
            self._emit_content(rest if not self.calls or rest.strip() else "")
        return deltas + self._deltas

    # -- states: each returns whether the buffer has more to parse ----------------------------------------------------

    def _start(self) -> bool:
        """At the beginning: a bare object may be a call."""
        begun = self._buffer.lstrip()
        if not begun or PYTHON_TAG.startswith(begun):
            return False
        if begun.startswith(PYTHON_TAG):
            self._buffer = begun[len(PYTHON_TAG) :]
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
        at = self._buffer.find(CALL_BEGIN)
        if at >= 0:
            self._emit_content(self._buffer[:at].rstrip())
            self._buffer = self._buffer[at + len(CALL_BEGIN) :]
            self._state, self._marked = self._head, True
            return True
        # White space before a call is no content, nor is an incomplete mark
        held = overlap(self._buffer, CALL_BEGIN)
        kept = self._buffer[: len(self._buffer) - held].rstrip()
        if kept:
            self._emit_content(kept)
            self._buffer = self._buffer[len(kept) :]
        return False

    def _head(self) -> bool:
        found = _HEAD.match(self._buffer)
        if found and (self._marked or found[1] in self._names):
            self._emit_call(found[1])
            self._buffer = self._buffer[found.end() :]
            self._state = self._arguments
            return True
        if not self._marked:
            if self._possible():
                return False
            self._buffer, self._fence, self._state = self._fence + self._buffer, "", self._text
            return True
        at = self._buffer.find(CALL_END)
        if at < 0:
            return False
        body, self._buffer = self._buffer[:at], self._buffer[at + len(CALL_END) :]
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
                    self._emit_arguments(self._buffer[: at + 1])
                    self._buffer, self._state = self._buffer[at + 1 :], self._tail
                    return True
        self._emit_arguments(self._buffer)
        self._buffer = ""
        return False

    def _tail(self) -> bool:
        """After the arguments: the end of the object, and the end mark."""
        if not self._marked:
            self._buffer = self._buffer.lstrip()
            if self._buffer.startswith("}"):
                self._buffer, self._state = self._buffer[1:], self._between
            return self._state == self._between
        at, again = self._buffer.find(CALL_END), self._buffer.find(CALL_BEGIN)
        if again >= 0 and (at < 0 or again < at):  # the end mark is missing
            self._buffer, self._state = self._buffer[again:], self._between
        elif at >= 0:
            self._buffer, self._state = self._buffer[at + len(CALL_END) :], self._between
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
        """Whether a bare object may still become a call of one of the tools."""
        written = re.sub(r"\s+", "", self._buffer)
        if len(written) < len(_OPENING):
            return _OPENING.startswith(written)
        name, quote, after = written[len(_OPENING) :].partition('"')
        if not written.startswith(_OPENING) or not quote:
            return written.startswith(_OPENING) and any(known.startswith(name) for known in self._names)
        return name in self._names and any(key.startswith(after) or after.startswith(key) for key in _KEYS)

    def _whole(self, body: str, marked: bool, end: str = CALL_END, drop: bool = False) -> None:
        """A call whose keys are in another order, or text that is not a call."""
        try:
            found = json.loads(body)
            name, values = found["name"], found.get("arguments", found.get("parameters", {}))
            fits = isinstance(name, str) and (marked or name in self._names)
        except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
            fits = False
        if fits:
            self._emit_call(name)
            self._emit_arguments(values if isinstance(values, str) else json.dumps(values, ensure_ascii=False))
        elif not drop:
            self._emit_content(f"{CALL_BEGIN}{body}{end}" if marked else self._fence + body)

    def _emit_content(self, text: str) -> None:
        if text and not self._only:
            self._deltas.append(ToolCallDelta(content=text))

    def _emit_call(self, name: str) -> None:
        self._depth, self._quoted, self._escaped = 0, False, False
        self.calls.append(ParsedCall(name))
        self._deltas.append(ToolCallDelta(call=len(self.calls) - 1, begun=self.calls[-1]))

    def _emit_arguments(self, arguments: str) -> None:
        if arguments:
            self.calls[-1].arguments += arguments
            self._deltas.append(ToolCallDelta(call=len(self.calls) - 1, arguments=arguments))
