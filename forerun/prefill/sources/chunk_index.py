"""An index of earlier prompts and the pages with their exact K/V: finds spans of a new prompt among them.

A text is indexed by hashes of windows at regular offsets; a prompt is looked up at every token, so a span is found at
any position. Its pages lie in the pool or, where there are such, in tiers: pages that the pool needs stay findable
there, and so do those of earlier processes. Knows tokens and pages; neither K/V nor models, nor other holders of a
page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forerun.cache.pool import PagePool
from forerun.cache.prefix import pack, unpack
from forerun.cache.tiers import Tiers

WINDOW_TOKENS = 32  # hashed to find a span; a power of two
STRIDE_TOKENS = 16  # an indexed text has one window at every multiple of this
MIN_SPAN_TOKENS = 64  # shorter spans are not worth reusing: their K/V depends mostly on what came before them
SINK_TOKENS = 4  # first entries of a text: attention sinks, whose K/V must not be copied to later positions
MAX_PLACES_PER_WINDOW = 4
HASHED_TOKENS = 256  # windows of a prompt that are hashed at once
MAX_STORED_TOKENS = 1 << 20  # of texts that only tiers hold
_BASE = 0x9E3779B97F4A7C15


@dataclass(eq=False)
class IndexedText:
    """Tokens at entries `first`, `first + 1`, ... of an earlier prompt, whole pages of them."""

    tokens: np.ndarray  # [n] int64
    first: int
    pages: list[int]  # of its first tokens, as many as the pool still has
    keys: list[int]  # hash of each window
    stored: list[bytes]  # keys of all its pages in the tiers; empty: there are none


@dataclass(frozen=True)
class ChunkMatch:
    """Entries start .. start + count of a prompt are entries old .. of an earlier one."""

    start: int
    count: int
    old: int
    slots: np.ndarray  # [count] where their K/V lies in the pool
    stored: tuple[bytes, ...] = ()  # where it lies in tiers instead: pages, the first of which has entry `old`


class ChunkIndex:
    """Holds at most `max_pages` pages, each referenced once; the least recently used text is evicted first."""

    def __init__(self, pool: PagePool, max_pages: int) -> None:
        self.pool, self.max_pages = pool, max_pages
        self.tiers: Tiers | None = None
        self.num_pages = 0
        self._texts: dict[IndexedText, None] = {}  # least recently used first
        self._places: dict[int, list[tuple[IndexedText, int]]] = {}  # window's hash -> text, offset; newest last
        self._held: set[int] = set()

    def remember(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Index the whole pages of a text with exact K/V; pages held already (a shared prefix) are not held twice."""
        size = self.pool.page_size
        whole = min(len(tokens) // size, len(pages))
        known = next((i for i in range(whole) if pages[i] not in self._held), whole)
        own = list(pages[known : min(whole, known + self.max_pages)])
        if len(own) * size < WINDOW_TOKENS:
            return
        self.release(self.num_pages + len(own) - self.max_pages)
        self.pool.retain(own)
        self._held.update(own)
        self.num_pages += len(own)
        stored = [] if self.tiers is None else self.tiers.keys(pack(tokens[: whole * size]), known)[: len(own)]
        self._add(np.array(tokens[known * size : (known + len(own)) * size], dtype=np.int64), known * size, own, stored)

    def remember_stored(self, data: bytes) -> None:
        """Index packed tokens whose pages are in tiers only."""
        if self.tiers is None or not (keys := self.tiers.keys(data)):
            return
        tokens = np.array(unpack(data)[: len(keys) * self.pool.page_size], dtype=np.int64)
        self._add(tokens, 0, [], keys)
        self._forget_stored()

    def _add(self, tokens: np.ndarray, first: int, pages: list[int], stored: list[bytes]) -> None:
        text = IndexedText(tokens, first, pages, _hashes(tokens)[::STRIDE_TOKENS].tolist(), stored)
        for n, key in enumerate(text.keys):
            places = self._places.setdefault(key, [])
            places.append((text, n * STRIDE_TOKENS))
            del places[:-MAX_PLACES_PER_WINDOW]
        self._texts[text] = None

    def release(self, count: int) -> int:
        """Release `count` pages, or all there are, from the ends of the texts; returns how many."""
        released = 0
        for text in [text for text in self._texts if text.pages]:
            if released >= count:
                break
            keep = max(0, len(text.pages) - (count - released))
            released += len(text.pages) - keep
            self._cut(text, keep)
        self._forget_stored()
        return released

    def clear(self) -> None:
        for text in list(self._texts):
            text.stored = []
            self._cut(text, 0)

    def _forget_stored(self) -> None:
        """The least recently used of what only tiers hold, beyond the limit."""
        only = [text for text in self._texts if not text.pages]
        total = sum(len(text.tokens) for text in only)
        for text in only:
            if total <= MAX_STORED_TOKENS:
                return
            total -= len(text.tokens)
            text.stored = []
            self._cut(text, 0)

    def _cut(self, text: IndexedText, keep: int) -> None:
        """Give pages back from `keep` on. What tiers are going to have stays findable."""
        size = self.pool.page_size
        gone, text.pages = text.pages[keep:], text.pages[:keep]
        self.pool.release(gone)
        self._held.difference_update(gone)
        self.num_pages -= len(gone)
        if text.stored:
            return
        text.tokens = text.tokens[: keep * size]
        left = len(range(0, len(text.tokens) - WINDOW_TOKENS + 1, STRIDE_TOKENS))
        for n, key in enumerate(text.keys[left:], left):
            places = [place for place in self._places.get(key, []) if place != (text, n * STRIDE_TOKENS)]
            if places:
                self._places[key] = places
            else:
                self._places.pop(key, None)
        del text.keys[left:]
        if not keep:
            del self._texts[text]

    def find(self, tokens: Sequence[int], start: int, end: int) -> list[ChunkMatch]:
        """Spans of tokens[start:end] that are indexed, in order; of several places the longest span."""
        new = np.array(tokens[:end], dtype=np.int64)
        found: list[ChunkMatch] = []
        at = covered = start
        last = len(new) - WINDOW_TOKENS  # where the last window begins
        hashed, keys = 0, list[int]()  # of the windows from `hashed` on: not of all, as most lie in a span
        while at <= last:
            if not hashed <= at < hashed + len(keys):
                hashed, keys = at, _hashes(new[at : at + HASHED_TOKENS + WINDOW_TOKENS - 1]).tolist()
            best: tuple[int, int, IndexedText | None, int] = (0, 0, None, 0)  # count, start, text, offset in it
            for text, offset in reversed(self._places.get(keys[at - hashed], ())):
                back, count = _extend(new, at, covered, text, offset)
                best = max(best, (count, at - back, text, offset - back), key=lambda b: b[0])
            count, first, chosen, offset = best
            if chosen is None or count < MIN_SPAN_TOKENS:
                at += 1
                continue
            found += self._matches(chosen, offset, first, count)
            self._texts[chosen] = self._texts.pop(chosen)
            at = covered = first + count
        return found

    def _matches(self, text: IndexedText, offset: int, start: int, count: int) -> list[ChunkMatch]:
        """One for what lies in the pool, one for what lies in tiers, as far as they have it."""
        size, end = self.pool.page_size, offset + count
        found, pooled = [], min(end, len(text.pages) * size)
        if pooled > offset:
            entries = np.arange(offset, pooled)
            slots = np.array(text.pages, dtype=np.int64)[entries // size] * size + entries % size
            found.append(ChunkMatch(start, len(slots), text.first + offset, slots))
        at = max(offset, pooled)
        if at < end and self.tiers is not None:
            pages = text.stored[at // size : -(-end // size)]
            there = self.tiers.count(pages)
            held = min(end, (at // size + there) * size) - at
            if held > 0:
                none = np.zeros(0, dtype=np.int64)
                found.append(ChunkMatch(start + at - offset, held, text.first + at, none, tuple(pages[:there])))
        return found


def _hashes(tokens: np.ndarray) -> np.ndarray:
    """[max(0, n - WINDOW_TOKENS + 1)] a hash of the window that starts at each token: polynomial, modulo 2 ** 64."""
    values, width, base = tokens.astype(np.uint64) + np.uint64(1), 1, _BASE
    while width < WINDOW_TOKENS:
        values = values[:-width] * np.uint64(base) + values[width:] if len(values) > width else values[:0]
        width, base = 2 * width, base * base % (1 << 64)
    return values


def _extend(new: np.ndarray, at: int, start: int, text: IndexedText, offset: int) -> tuple[int, int]:
    """(tokens before `at` that are the same too, tokens of the whole span); empty where only the hashes are equal."""
    old, sinks = text.tokens, max(0, SINK_TOKENS - text.first)
    forward = _common(new[at:], old[offset:])
    if offset < sinks:  # the window itself starts with sinks
        return offset - sinks, forward + offset - sinks
    back = _common(new[start:at][::-1], old[sinks:offset][::-1])
    return back, back + forward


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the common prefix; compares in growing steps, as most pairs differ soon."""
    length, done, step = min(len(a), len(b)), 0, 2 * WINDOW_TOKENS
    while done < length:
        differ = a[done : done + step][: length - done] != b[done : done + step][: length - done]
        if differ.any():
            return done + int(differ.argmax())
        done, step = done + len(differ), 2 * step
    return length
