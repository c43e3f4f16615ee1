"""Approximate K/V that later requests may start from, kept apart from what is exact.

One tree of prefixes for each key (profile and source), over the same pool. Its pages have a type of their own that is
no sequence of numbers, so that the exact tree cannot take them; they leave it only as copies on a
sequence's own pages, because a sequence that reads them recomputes some. Knows no request and no model.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forerun.cache.pool import PagePool
from forerun.cache.prefix import PrefixTree


@dataclass(frozen=True)
class ApproximatePages:
    """Where the K/V of a text lies of which only the first entries are exact."""

    pages: array[int]
    first: int  # entries before it are exact: whole pages
    depths: np.ndarray  # [n] int16: layers of the first n entries that the target itself computed; of the rest, all


class _Tree(PrefixTree):
    """Drops exact pages even while they are referenced elsewhere: else neither this tree nor the exact one could ever
    evict a page that both list."""

    def __init__(self, pool: PagePool, exact: np.ndarray) -> None:
        super().__init__(pool)
        self._exact = exact

    def _can_drop(self, page: int) -> bool:
        return bool(self._exact[page]) or super()._can_drop(page)


class ApproximateCache:
    def __init__(self, pool: PagePool) -> None:
        self.pool, self.layers = pool, len(pool.kv)
        self._trees: dict[str, PrefixTree] = {}  # least recently used first
        # what is known of pages that a tree lists; of all others it means nothing
        self._exact = np.zeros(pool.num_pages, dtype=bool)
        self._depths = np.zeros((pool.num_pages, pool.page_size), dtype=np.int16)

    @property
    def num_pages(self) -> int:
        return sum(tree.num_pages for tree in self._trees.values())

    def insert(self, key: str, tokens: Sequence[int], where: ApproximatePages) -> None:
        """Make the whole pages of `tokens` known under this key."""
        size = self.pool.page_size
        whole = min(len(tokens) // size, len(where.pages))
        pages = where.pages[:whole]
        depths = np.full(whole * size, self.layers, dtype=np.int16)
        given = min(len(depths), len(where.depths))
        depths[:given] = where.depths[:given]
        rows = np.array(pages, dtype=np.int64)
        self._exact[rows] = np.arange(whole) < where.first // size
        self._depths[rows] = depths.reshape(whole, size)
        self._tree(key).insert(tokens, pages)

    def known(self, key: str, tokens: Sequence[int]) -> int:
        """Entries of a text that are known under this key."""
        return len(self._match(key, tokens)) * self.pool.page_size

    def read(self, key: str, tokens: Sequence[int], first: int, onto: array[int]) -> np.ndarray:
        """Copy what is known of a text from entry `first` on onto the reader's own pages. Returns the depths of all
        entries that then have K/V; those before `first` are the reader's own, and exact."""
        size = self.pool.page_size
        pages = self._match(key, tokens)[first // size :]
        if pages:
            self.pool.copy(pages, onto[first // size : first // size + len(pages)])
        exact = np.full(first, self.layers, dtype=np.int16)
        return np.concatenate((exact, self._depths[pages].reshape(-1))) if pages else exact

    def copy_draft_kv_of(self, tokens: Sequence[int], first: int, onto: array[int]) -> None:
        """Copy what a draft model has computed for a text from entry `first` on: that is as exact here as anywhere."""
        for key in list(self._trees):
            pages = self._match(key, tokens)[first // self.pool.page_size : len(onto)]
            self.pool.copy_draft_kv(pages, onto[first // self.pool.page_size :][: len(pages)])

    def forget(self, tokens: Sequence[int]) -> None:
        """A text is known exactly now, so it is no longer read here."""
        for tree in self._trees.values():
            tree.forget(tokens)

    def evict(self, count: int) -> int:
        """Let go of at least `count` pages that no sequence needs, where there are as many."""
        freed = 0
        for key, tree in list(self._trees.items()):
            if freed < count:
                freed += tree.evict(count - freed)
            if not tree.num_pages:
                del self._trees[key]
        return freed

    def clear(self) -> None:
        for tree in self._trees.values():
            tree.clear()
        self._trees.clear()

    def _tree(self, key: str) -> PrefixTree:
        tree = self._trees.pop(key, None) or _Tree(self.pool, self._exact)
        self._trees[key] = tree  # now the most recently used
        return tree

    def _match(self, key: str, tokens: Sequence[int]) -> list[int]:
        return self._tree(key).match(tokens) if key in self._trees else []
