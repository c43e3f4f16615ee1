"""Token strings met before and the pages that hold their exact K/V: which spans of a new prompt are among them.

A remembered text is known by hashes of windows at regular places; a prompt is looked up at every token, so a span is
found wherever it lies now. Knows tokens and pages; neither K/V nor models, nor who else holds a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forerun.cache.pool import PagePool

WINDOW = 32  # tokens whose hash leads to a span; a power of two
STRIDE = 16  # a remembered text is known by the windows that start at its multiples of this
LEAST = 64  # shorter spans are not worth reusing: their K/V is mostly about what came before them
SINKS = 4  # first entries of a text, whose K/V draws attention to itself and must not turn up further back
SAME = 4  # places remembered for one window
_BASE = 0x9E3779B97F4A7C15


@dataclass(eq=False)
class IndexedText:
    """Tokens at entries `first`, `first + 1`, ... of some earlier prompt, whole pages of them."""

    tokens: np.ndarray  # [n] int64
    first: int
    pages: list[int]
    keys: list[int]  # hash of each window


@dataclass(frozen=True)
class ChunkMatch:
    """Entries start .. start + count of a prompt are entries old .. of an earlier one."""

    start: int
    count: int
    old: int
    slots: np.ndarray  # [count] where their K/V lies


class ChunkIndex:
    """At most `most` pages, each referenced once; the text that was not used for longest goes first."""

    def __init__(self, pool: PagePool, most: int) -> None:
        self.pool, self.most = pool, most
        self.num_pages = 0
        self._texts: dict[IndexedText, None] = {}  # least recently used first
        self._places: dict[int, list[tuple[IndexedText, int]]] = {}  # window's hash -> text, offset; newest last
        self._held: set[int] = set()

    def remember(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Keep the whole pages of a text with exact K/V; what is kept already (a shared prefix) is not kept twice."""
        size = self.pool.page_size
        whole = min(len(tokens) // size, len(pages))
        known = next((i for i in range(whole) if pages[i] not in self._held), whole)
        own = list(pages[known : min(whole, known + self.most)])
        if len(own) * size < WINDOW:
            return
        self.release(self.num_pages + len(own) - self.most)
        first = known * size
        text = IndexedText(np.array(tokens[first : first + len(own) * size], dtype=np.int64), first, own, [])
        text.keys = _hashes(text.tokens)[::STRIDE].tolist()
        for n, key in enumerate(text.keys):
            places = self._places.setdefault(key, [])
            places.append((text, n * STRIDE))
            del places[:-SAME]
        self.pool.retain(own)
        self._held.update(own)
        self.num_pages += len(own)
        self._texts[text] = None

    def release(self, count: int) -> int:
        """Give up `count` pages, or all there are, from the ends of the texts; returns how many it were."""
        given = 0
        while given < count and self._texts:
            text = next(iter(self._texts))
            keep = max(0, len(text.pages) - (count - given))
            given += len(text.pages) - keep
            self._cut(text, keep)
        return given

    def _cut(self, text: IndexedText, keep: int) -> None:
        size = self.pool.page_size
        gone, text.pages = text.pages[keep:], text.pages[:keep]
        text.tokens = text.tokens[: keep * size]
        left = len(range(0, len(text.tokens) - WINDOW + 1, STRIDE))
        for n, key in enumerate(text.keys[left:], left):
            places = [place for place in self._places.get(key, []) if place != (text, n * STRIDE)]
            if places:
                self._places[key] = places
            else:
                self._places.pop(key, None)
        del text.keys[left:]
        self.pool.release(gone)
        self._held.difference_update(gone)
        self.num_pages -= len(gone)
        if not keep:
            del self._texts[text]

    def find(self, tokens: Sequence[int], start: int, end: int) -> list[ChunkMatch]:
        """Spans of tokens[start:end] that were met before, in order; of several the longest."""
        new = np.array(tokens[:end], dtype=np.int64)
        keys = _hashes(new).tolist()
        found: list[ChunkMatch] = []
        at = covered = start
        while at < len(keys):
            best: tuple[int, int, IndexedText | None, int] = (0, 0, None, 0)  # count, start, text, offset in it
            for text, offset in self._places.get(keys[at], ()):
                back, count = _extend(new, at, covered, text, offset)
                best = max(best, (count, at - back, text, offset - back), key=lambda b: b[0])
            count, first, chosen, offset = best
            if chosen is None or count < LEAST:
                at += 1
                continue
            found.append(ChunkMatch(first, count, chosen.first + offset, self._slots(chosen, offset, count)))
            self._texts[chosen] = self._texts.pop(chosen)
            at = covered = first + count
        return found

    def _slots(self, text: IndexedText, offset: int, count: int) -> np.ndarray:
        size, entries = self.pool.page_size, np.arange(offset, offset + count)
        return np.array(text.pages, dtype=np.int64)[entries // size] * size + entries % size


def _hashes(tokens: np.ndarray) -> np.ndarray:
    """[max(0, n - WINDOW + 1)] a hash of the window that starts at each token: polynomial, modulo 2 ** 64."""
    values, width, base = tokens.astype(np.uint64) + np.uint64(1), 1, _BASE
    while width < WINDOW:
        values = values[:-width] * np.uint64(base) + values[width:] if len(values) > width else values[:0]
        width, base = 2 * width, base * base % (1 << 64)
    return values


def _extend(new: np.ndarray, at: int, least: int, text: IndexedText, offset: int) -> tuple[int, int]:
    """(tokens before `at` that are the same too, tokens of the whole span); a hash may lie, then the span is empty."""
    old, sinks = text.tokens, max(0, SINKS - text.first)
    forward = _common(new[at:], old[offset:])
    if offset < sinks:  # the window itself starts with sinks
        return offset - sinks, forward + offset - sinks
    back = _common(new[least:at][::-1], old[sinks:offset][::-1])
    return back, back + forward


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the common prefix; looks no further than twice as far as it must, as most pairs differ soon."""
    length, done, step = min(len(a), len(b)), 0, 2 * WINDOW
    while done < length:
        differ = a[done : done + step][: length - done] != b[done : done + step][: length - done]
        if differ.any():
            return done + int(differ.argmax())
        done, step = done + len(differ), 2 * step
    return length
