"""From tokens to text as they come: whole characters only, and stop strings wherever token boundaries fall.

Knows no scheduler and no model. Text that might be the beginning of a stop string is held back until it is not.
"""

from __future__ import annotations

from forerun.text.tokenizer import Detokenizer


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
