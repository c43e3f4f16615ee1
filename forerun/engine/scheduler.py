"""What runs next: admits, chunks, preempts. It moves pages and counters; it never sees a tensor or a token's meaning.

Each step is filled in this order: sequences that decode (one token each), then prefills in order of arrival, cut into
chunks so that a step stays within its token budget and decoding never waits for a whole prompt. A sequence whose prompt
is drafted has pages for all of it from the start, and no work here until that is done. A guide is a guest: it is let in
only where there is room for two, and is the first to go.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol, runtime_checkable

from forerun.cache.approximate import ApproximateCache, ApproximatePages
from forerun.cache.pins import Pins
from forerun.cache.pool import PagePool
from forerun.cache.prefix import PrefixTree
from forerun.cache.tiers import Tiers
from forerun.engine.prefixes import Prefixes
from forerun.engine.sequence import Sequence, Status
from forerun.engine.siblings import Siblings
from forerun.engine.work import Work

GUIDED_SHARE = 4  # a guided prefill runs in chunks of this part of a step's tokens: the guide says a word in each step


@runtime_checkable
class Keeper(Protocol):
    """Whoever else keeps exact pages and gives them back when asked, as a source of prefill that reuses texts."""

    def remember(self, tokens: Seq[int], pages: Seq[int]) -> None: ...

    def release(self, count: int) -> int: ...

    def clear(self) -> None: ...


class Scheduler:
    def __init__(
        self,
        pool: PagePool,
        tree: PrefixTree | None,
        approximate: ApproximateCache | None,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        tiers: Tiers | None = None,
    ) -> None:
        self.pool, self.tree, self.approximate = pool, tree, approximate
        self.prefixes, self.siblings = Prefixes(pool, tree, approximate, tiers), Siblings(pool)
        if tiers is not None and tree is not None:
            tree.on_evict = tiers.spill
        self.pins, self.max_num_seqs, self.max_num_batched_tokens = Pins(pool), max_num_seqs, max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission
        self.keepers: list[Keeper] = []
        self.on_leaving: Callable[[Sequence], None] = lambda seq: None  # called before a sequence loses its pages
        self._preempted = False
        self.guided_share = GUIDED_SHARE  # 1: a guided prompt is cut as if there were no guide

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)
        if seq.request.session is not None:
            self.pins.begin(seq.request.session)

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    @property
    def everyone(self) -> list[Sequence]:
        return [*self.running, *self.waiting]

    @property
    def drafting(self) -> list[Sequence]:
        """Sequences whose prompts are being drafted, in order of admission."""
        return [seq for seq in self.running if seq.drafting]

    @property
    def spare_tokens(self) -> int:
        """Of a step's budget, what drafting prompts may take: not what decodes, nor all that others' prefill needs."""
        active = self._active()
        left = max(1, self.max_num_batched_tokens - sum(seq.remaining == 1 for seq in active))
        return -(-left // 2) if self.waiting or any(seq.remaining > 1 for seq in active) else left

    def schedule(self, spent: int = 0) -> list[Work]:
        """What one forward runs; `spent` tokens of the step's budget went into something else, but nobody who decodes
        waits for that."""
        active = self._active()
        decoding = [seq for seq in active if seq.remaining == 1]
        budget = max(self.max_num_batched_tokens - spent, min(self.max_num_batched_tokens, len(decoding)))
        work: list[Work] = []
        for seq in decoding:
            if budget and seq.status is Status.RUNNING and self._grow(seq, 1):
                work.append(Work(seq, 1))
                budget -= seq.real is None or self.guided_share > 1
        for seq in [s for s in active if s.remaining > 1]:
            count = min(seq.remaining, budget, self._chunk(seq))
            ahead = count if seq.guide is None else seq.remaining  # pages for all that its guide will leave to it
            if count and seq.status is Status.RUNNING and self._grow(seq, ahead):
                work.append(Work(seq, count))
                budget -= count
        if self._preempted:  # what was just taken away is not handed out again in the same step
            self._preempted = False
            return [w for w in work if w.seq.status is Status.RUNNING]
        while budget > 0 and (admitted := self._admit()) is not None:
            if admitted.drafting or admitted.held:
                continue
            count = min(admitted.remaining, budget, self._chunk(admitted))
            self._grow(admitted, count)
            work.append(Work(admitted, count))
            budget -= count
        return work

    def _active(self) -> list[Sequence]:
        return [seq for seq in self.running if not seq.drafting and not seq.held]

    def _chunk(self, seq: Sequence) -> int:
        return (
            self.max_num_batched_tokens
            if seq.guide is None
            else max(1, self.max_num_batched_tokens // self.guided_share)
        )

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
        self.siblings.keep(seq, self.running, self.waiting)
        self.siblings.settle(self.waiting)
        self._give_up_pages(seq)

    def dismiss(self, guide: Sequence) -> None:
        """A guide goes, whatever it is doing; what it has said stays with the sequence it guided, and so does what a
        draft model has read for both."""
        assert guide.real is not None
        guide.real.guide = None
        both = min(len(guide.pages), len(guide.real.pages))
        self.pool.copy_planes(guide.pages[:both], guide.real.pages[:both])
        self.finish(guide)

    def remember(self, seq: Sequence) -> None:
        """Make what a sequence has computed so far known to others: exact K/V to all, the rest to those who asked for
        the like of it."""
        if self.tree is not None and seq.params.cache:
            new = self.tree.insert(seq.packed(seq.exact), seq.pages)
            seq.usage.written += new * self.pool.page_size
            for keeper in self.keepers:
                keeper.remember(seq.packed(seq.exact), seq.pages)
        own = seq.approximate
        others = seq.params.cache and seq.real is None  # may read it
        if self.approximate is not None and own is not None and not own.drafting and others:
            where = ApproximatePages(seq.pages, own.first, own.depths)
            self.approximate.insert(own.key, seq.packed(seq.computed), where)

    def _admit(self) -> Sequence | None:
        """Start the next waiting sequence on whatever prefix of it is known."""
        seq = self._next()
        if seq is None or len(self.running) >= self.max_num_seqs:
            return None
        drafted = self.siblings.find(seq, self.running)
        if drafted is None and self.prefixes.in_flight(seq, self.running):
            return None
        known = self.prefixes.known(seq)
        if drafted is not None and len(known) < len(drafted.pages):
            known = drafted.pages.tolist()
        else:
            drafted = None  # all of it is known exactly
        self.pool.retain(known)
        self.prefixes.touch(seq)
        missing = self.pool.pages_for(len(seq.tokens)) - len(known)
        if not self.make_room(missing):
            self.pool.release(known)  # its turn comes when others end; admitting now would only preempt them
            return self._admit() if self._unpin_for(seq) else None
        self.waiting.remove(seq)
        self.running.append(seq)
        seq.status = Status.RUNNING
        served = self.prefixes.begin(seq, known) if drafted is None else self.siblings.begin(seq, drafted)
        self.siblings.settle(self.waiting)
        if not seq.admitted:
            seq.admitted = True
            if self.tree is not None and seq.real is None:
                self.tree.count_read(seq.packed(seq.exact))
            seq.usage.cached_tokens, seq.usage.served = sum(served.values()), served
            seq.usage.queued_s = time.perf_counter() - seq.request.arrived
        return seq

    def _next(self) -> Sequence | None:
        """Whose turn it is: the first in line, but for answers that wait for another one's draft of their prompt."""
        for seq in list(self.waiting):
            if seq.real is not None and not self._room_for_two(seq):
                self.dismiss(seq)
            elif not self.siblings.awaited(seq, self.running):
                return seq
        return None

    def _unpin_for(self, seq: Sequence) -> bool:
        """Whether the next in line can be tried again: nothing runs, so that only pins can be in its way. Idle ones go
        first; a turn that has begun is let in first, so that its pages are free when it is over."""
        if self.running or self.pins.give_up(sparing=seq.request.session):
            return not self.running
        turn = next((s for s in self.waiting if s.request.session in self.pins), None)
        if turn is not None and seq.request.session not in self.pins:
            self.waiting.remove(turn)
            self.waiting.appendleft(turn)
            return True
        return self.pins.give_up_any(seq.request.session)

    def _room_for_two(self, guide: Sequence) -> bool:
        """Whether a guide would leave room for the sequence it guides."""
        missing = 2 * (self.pool.pages_for(len(guide.tokens)) - len(self.prefixes.known(guide)))
        return len(self.running) + 2 <= self.max_num_seqs and self.make_room(missing)

    def _grow(self, seq: Sequence, count: int) -> bool:
        """Pages for `count` more entries; where there are none, the youngest are preempted, at last this one itself."""
        missing = self.pool.pages_for(seq.computed + count) - len(seq.pages)
        while not self.make_room(missing):
            if len(self.running) == 1 and self.pins.give_up_any(seq.request.session):
                continue
            victim = self._victim()
            self._preempt(victim)
            if victim is seq:
                return False
        if missing > 0:
            seq.pages.extend(self.pool.allocate(missing, after=seq.pages[-1] if seq.pages else None))
        return True

    def _victim(self) -> Sequence:
        """A guide, else the youngest; a session's turn goes on as long as there is anybody else."""
        guide = next((seq for seq in self.running if seq.real is not None), None)
        others = [seq for seq in self.running if seq.request.session not in self.pins]
        return guide or (others or self.running)[-1]

    def make_room(self, count: int) -> bool:
        """Whether `count` pages are free, after taking them from what is merely remembered if need be: approximate K/V
        goes first."""
        if count > self.pool.free:
            self.pins.expire()
        remembered = (self.approximate, self.tree)
        for cache in (*remembered, self.siblings, *remembered):  # they may hold the same pages
            if cache is not None and count > self.pool.free:
                cache.evict(count - self.pool.free)
        for keeper in self.keepers:  # what they let go of is free once the tree does, too
            while count > self.pool.free and self.tree is not None and keeper.release(count - self.pool.free):
                self.tree.evict(count - self.pool.free)
        return count <= self.pool.free

    def _preempt(self, seq: Sequence) -> None:
        """Give a sequence's pages back and let it start over later; its tokens stay, so nothing is drawn twice."""
        self._preempted = True
        if seq.real is not None:
            self.dismiss(seq)
            return
        self.running.remove(seq)
        seq.status = Status.WAITING
        seq.usage.preemptions += 1
        self._give_up_pages(seq)
        self.waiting.appendleft(seq)

    def _give_up_pages(self, seq: Sequence) -> None:
        self.on_leaving(seq)
        self.remember(seq)
        session = seq.request.session
        if session is not None and seq.status is Status.FINISHED and seq.real is None:
            self.pins.end(session)
            if self.tree is not None and seq.exact:  # a turn that never ran leaves what was pinned before
                self.pins.hold(session, self.tree.match(seq.packed(seq.exact)))
        self.pool.release(seq.pages)
        seq.pages = type(seq.pages)("i")
        seq.computed, seq.ready = 0, None
