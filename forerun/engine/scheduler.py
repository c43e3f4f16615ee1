"""What runs next: admits, chunks, preempts. It moves pages and counters; it never sees a tensor or a token's meaning.

Each step is filled in this order: sequences that decode (one token each), then prefills in order of arrival, cut into
chunks so that a step stays within its token budget and decoding never waits for a whole prompt.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from forerun.cache.pool import PagePool
from forerun.cache.prefix import PrefixTree
from forerun.core import Draft
from forerun.engine.sequence import Sequence, Status


@dataclass
class Work:
    """Run the next `count` tokens of a sequence that have no K/V yet, and what was guessed to follow them."""

    seq: Sequence
    count: int
    draft: Draft = field(default_factory=Draft)

    @property
    def samples(self) -> bool:
        """Whether this brings the sequence to its end, so that its next token is drawn."""
        return self.seq.computed + self.count == len(self.seq.tokens)


class Scheduler:
    def __init__(self, pool: PagePool, tree: PrefixTree | None, max_batch: int, chunk_tokens: int) -> None:
        self.pool, self.tree = pool, tree
        self.max_batch, self.chunk_tokens = max_batch, chunk_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission
        self._preempted = False

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    @property
    def everyone(self) -> list[Sequence]:
        return [*self.running, *self.waiting]

    def schedule(self) -> list[Work]:
        budget = self.chunk_tokens
        work: list[Work] = []
        for seq in [s for s in self.running if s.remaining == 1]:
            if budget and seq.status is Status.RUNNING and self._grow(seq, 1):
                work.append(Work(seq, 1))
                budget -= 1
        for seq in [s for s in self.running if s.remaining > 1]:
            count = min(seq.remaining, budget)
            if count and seq.status is Status.RUNNING and self._grow(seq, count):
                work.append(Work(seq, count))
                budget -= count
        if self._preempted:  # what was just taken away is not handed out again in the same step
            self._preempted = False
            return [w for w in work if w.seq.status is Status.RUNNING]
        while budget > 0 and (admitted := self._admit()) is not None:
            count = min(admitted.remaining, budget)
            self._grow(admitted, count)
            work.append(Work(admitted, count))
            budget -= count
        return work

    def reserve(self, seq: Sequence, nodes: int) -> int:
        """Pages for a draft of up to `nodes` tokens after a sequence; how many there is room for. Guesses take what is
        free and at most one page that is merely remembered, and never push another sequence out."""
        missing = self.pool.pages_for(len(seq.tokens) + nodes) - len(seq.pages)
        if missing > 0 and self.pool.free == 0:
            self.make_room(1)
        count = min(missing, self.pool.free)
        if count > 0:
            seq.pages.extend(self.pool.allocate(count, after=seq.pages[-1]))
        return min(nodes, len(seq.pages) * self.pool.page_size - len(seq.tokens))

    def trim(self, seq: Sequence) -> None:
        """Give back the pages that only rejected guesses lay on."""
        keep = self.pool.pages_for(len(seq.tokens))
        if len(seq.pages) > keep:
            self.pool.release(seq.pages[keep:])
            del seq.pages[keep:]

    def finish(self, seq: Sequence) -> None:
        """Take a sequence out; its whole pages stay known to the prefix tree."""
        if seq.status is Status.RUNNING:
            self.running.remove(seq)
        elif seq.status is Status.WAITING:
            self.waiting.remove(seq)
        seq.status = Status.FINISHED
        self._give_up_pages(seq)

    def remember(self, seq: Sequence) -> None:
        """Make what a sequence has computed so far known to others."""
        if self.tree is not None:
            self.tree.insert(seq.tokens[: seq.computed], seq.pages)

    def _admit(self) -> Sequence | None:
        """Start the next waiting sequence on whatever prefix of it is known."""
        if not self.waiting or len(self.running) >= self.max_batch:
            return None
        seq = self.waiting[0]
        if self._prefix_in_flight(seq):
            return None
        # at least one token must run, or there would be no logits to sample from
        known = self.tree.match(seq.tokens[:-1]) if self.tree is not None else []
        self.pool.retain(known)
        missing = self.pool.pages_for(len(seq.tokens)) - len(known)
        if not self.make_room(missing):
            self.pool.release(known)  # its turn comes when others end; admitting now would only preempt them
            return None
        self.waiting.popleft()
        self.running.append(seq)
        seq.status = Status.RUNNING
        seq.pages.extend(known)
        seq.computed = len(known) * self.pool.page_size
        if not seq.admitted:
            seq.admitted = True
            seq.usage.cached_tokens = seq.computed
            seq.usage.queued_s = time.perf_counter() - seq.request.arrived
        return seq

    def _prefix_in_flight(self, seq: Sequence) -> bool:
        """Whether a running prefill is computing a prefix this one could read: then waiting is cheaper than running."""
        if self.tree is None:
            return False
        page = self.pool.page_size
        head = seq.tokens[:page]
        leaders = [r for r in self.running if r.prefilling and r.tokens[:page] == head]
        if not leaders or len(seq.tokens) <= page:
            return False
        known = len(self.tree.match(seq.tokens[:-1])) * page
        return any(_common_prefix(r.tokens, seq.tokens) // page * page > max(known, 0) for r in leaders)

    def _grow(self, seq: Sequence, count: int) -> bool:
        """Pages for `count` more entries; where there are none, the youngest are preempted, at last this one itself."""
        missing = self.pool.pages_for(seq.computed + count) - len(seq.pages)
        while not self.make_room(missing):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is seq:
                return False
        if missing > 0:
            seq.pages.extend(self.pool.allocate(missing, after=seq.pages[-1] if seq.pages else None))
        return True

    def make_room(self, count: int) -> bool:
        """Whether `count` pages are free, after taking them from the prefix tree if need be."""
        if self.tree is not None and count > self.pool.free:
            self.tree.evict(count - self.pool.free)
        return count <= self.pool.free

    def _preempt(self, seq: Sequence) -> None:
        """Give a sequence's pages back and let it start over later; its tokens stay, so nothing is drawn twice."""
        self.running.remove(seq)
        self._preempted = True
        seq.status = Status.WAITING
        seq.usage.preemptions += 1
        self._give_up_pages(seq)
        self.waiting.appendleft(seq)

    def _give_up_pages(self, seq: Sequence) -> None:
        self.remember(seq)
        self.pool.release(seq.pages)
        seq.pages = type(seq.pages)("i")
        seq.computed = 0


def _common_prefix(a: list[int], b: list[int]) -> int:
    """Length of the common prefix, by halving: comparing slices is far faster than comparing tokens."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
