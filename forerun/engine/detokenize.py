"""From tokens to text as they come: whole characters only, and stop strings wherever token boundaries fall.

Knows no scheduler and no model. Text that might be the beginning of a stop string is held back until it is not.
"""

from __future__ import annotations

from collections.abc import Hashable

from forerun.text.tokenizer import Detokenizer, Tokenizer


class Texts:
    """The texts of many sequences; without a tokenizer all are empty."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._streams: dict[Hashable, TextStream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def push(self, key: Hashable, token_id: int, stop: tuple[str, ...]) -> str:
        if self._tokenizer is None:
            return ""
        if key not in self._streams:
            self._streams[key] = TextStream(self._tokenizer.stream(), stop)
        return self._streams[key].push(token_id)

    def stopped(self, key: Hashable) -> bool:
        return key in self._streams and self._streams[key].stopped

    def end(self, key: Hashable) -> str:
        """The rest of a text; nothing is kept of it."""
        stream = self._streams.pop(key, None)
        return "" if stream is None else stream.flush()


class TextStream:
    """The text of one sequence. `push` returns what can be shown now; `stopped` says that a stop string was met."""

    def __init__(self, detokenizer: Detokenizer, stop: tuple[str, ...]) -> None:
        self._detokenizer, self._stop = detokenizer, stop
        self._held = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        return self._release(self._detokenizer.push(token_id))

    def flush(self) -> str:
        """The rest, when no more tokens come."""
        if self.stopped:
            return ""
        shown = self._release(self._detokenizer.flush())
        rest, self._held = ("" if self.stopped else self._held), ""
        return shown + rest

    def _release(self, new: str) -> str:
        if not self._stop or self.stopped:
            return "" if self.stopped else new
        text = self._held + new
        found = [at for at in (text.find(s) for s in self._stop) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max(_overlap(text, s) for s in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
