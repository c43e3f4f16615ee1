"""From approximate to exact: texts that were answered from drafted K/V are computed as they should have been, when
there is nothing else to do, so that the next request about them is answered exactly.

Each step is whole in itself: read what the exact tree knows, compute a few pages more, give them to the tree. Nothing
is held in between, so a request that comes meanwhile waits for one step at most, and what was computed stays known.
Knows no request and no sequence.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable

from forerun.cache.approximate import ApproximateCache
from forerun.cache.prefix import PrefixTree
from forerun.models.execution.runner import Runner, Span

UPGRADE_CHUNK_DIVISOR = 4  # of the tokens of a step: a request that comes meanwhile waits little
MAX_WAITING_TEXTS = 32  # older ones are left as they are


class Upgrader:
    def __init__(
        self,
        runner: Runner,
        tree: PrefixTree,
        approximate: ApproximateCache,
        make_room: Callable[[int], bool],
        max_num_batched_tokens: int,
    ) -> None:
        """`max_num_batched_tokens`: what a step of the engine computes at most."""
        self._runner, self._tree, self._approximate, self._make_room = runner, tree, approximate, make_room
        self._size = runner.pool.page_size
        self._chunk = max(1, max_num_batched_tokens // UPGRADE_CHUNK_DIVISOR // self._size) * self._size
        self._waiting: deque[list[int]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, tokens: list[int]) -> None:
        """A text to be computed. The latest is computed first: it is the likeliest to be read again."""
        whole = tokens[: len(tokens) // self._size * self._size]
        others = [text for text in self._waiting if text != whole[: len(text)]]
        self._waiting = deque([*others, whole] if whole else others, MAX_WAITING_TEXTS)

    def clear(self) -> None:
        self._waiting.clear()

    def step(self) -> bool:
        """Compute some pages; False when there is nothing left to compute, or no room for it."""
        while self._waiting:
            tokens = self._waiting[-1]
            known = self._tree.match(tokens)
            if len(known) * self._size < len(tokens) and self._compute(tokens, known):
                return True
            self._waiting.pop()
        return False

    def _compute(self, tokens: list[int], known: list[int]) -> bool:
        """The next pages of a text after those that are known."""
        pool, first = self._runner.pool, len(known) * self._size
        end = min(first + self._chunk, len(tokens))
        pages = array("i", known)
        pool.retain(pages)
        try:
            if not self._make_room((end - first) // self._size):
                return False
            pages.extend(pool.allocate((end - first) // self._size, after=pages[-1] if pages else None))
            self._approximate.copy_draft_kv_of(tokens, first, pages)
            self._runner.forward([Span(tokens[first:end], first, pages, (), prompt=True)])
            self._tree.insert(tokens[:end], pages)
        finally:
            pool.release(pages)
        if end == len(tokens):
            self._approximate.forget(tokens)
        return True
