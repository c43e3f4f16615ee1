"""What runs next: admits, chunks, preempts. It moves pages and counters; it never sees a tensor or a token's meaning.

Each step is filled in this order: sequences that decode (one token each), then prefills in order of arrival, cut into
chunks so that a step stays within its token budget and decoding never waits for a whole prompt. A sequence whose prompt
is drafted has pages for all of it from the start, and runs nothing here until that is done. A provisional sequence is
admitted only where there is room for the final one too, and is the first to be preempted.

`Prefixes` is the one place that admission asks what a waiting sequence can start from: the prefix tree, host memory and
disk, an earlier draft, or the draft of another answer to the same request; and whether it should wait because a running
sequence is about to have more of it.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from forerun.cache.approximate import ApproximateCache, ApproximatePages
from forerun.cache.pins import Pins
from forerun.cache.pool import PagePool
from forerun.cache.prefix import PrefixTree
from forerun.cache.tiers import Tiers
from forerun.engine.sequence import Phase, ScheduledSequence, Sequence, common_prefix
from forerun.engine.speculative_prefill import SharedDraft, SharedDrafts
from forerun.prefill.sources.chunk_index import ChunkIndex
from forerun.prefill.state import PrefillState

# a prefill with a provisional sequence runs in chunks of a step's tokens divided by this: one such token per step
PROVISIONAL_CHUNK_DIVISOR = 4


class Scheduler:
    """The queue, the running sequences, and their pages."""

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
        self.prefixes = Prefixes(pool, tree, approximate, tiers)
        self.shared_drafts = self.prefixes.shared_drafts
        if tiers is not None and tree is not None:
            tree.on_evict = tiers.spill
        self.pins, self.max_num_seqs, self.max_num_batched_tokens = Pins(pool), max_num_seqs, max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission
        self.text_caches: list[ChunkIndex] = []  # of exact pages beside the prefix tree
        self.on_release: Callable[[Sequence], None] = lambda seq: None  # called before a sequence loses its pages
        self._preempted = False
        self.chunk_divisor = PROVISIONAL_CHUNK_DIVISOR  # 1: chunks are as if there were no provisional sequence
        # Tokens of an answer that run at once after a preemption, apart from the prompt's; None: no difference
        self.answer_rows: int | None = None

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)
        if seq.request.session is not None:
            self.pins.begin(seq.request.session)

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    @property
    def sequences(self) -> list[Sequence]:
        return [*self.running, *self.waiting]

    @property
    def drafting(self) -> list[Sequence]:
        """Sequences whose prompts are being drafted, in order of admission."""
        return [seq for seq in self.running if seq.phase is Phase.DRAFTING]

    @property
    def spare_tokens(self) -> int:
        """Of a step's budget, what drafting prompts may take: not what decodes, nor all that others' prefill needs."""
        active = self._active()
        left = max(1, self.max_num_batched_tokens - sum(seq.remaining == 1 for seq in active))
        return -(-left // 2) if self.waiting or any(seq.remaining > 1 for seq in active) else left

    def schedule(self, spent: int = 0) -> list[ScheduledSequence]:
        """What one forward runs; `spent` tokens of the step's budget went into drafting prompts, but no sequence that
        decodes waits for that."""
        active = self._active()
        decoding = [seq for seq in active if seq.remaining == 1]
        budget = max(self.max_num_batched_tokens - spent, min(self.max_num_batched_tokens, len(decoding)))
        batch: list[ScheduledSequence] = []
        for seq in decoding:
            if budget and seq.running and self._grow(seq, 1):
                batch.append(ScheduledSequence(seq, 1))
                budget -= seq.final is None or self.chunk_divisor > 1
        for seq in [s for s in active if s.remaining > 1]:
            count = min(seq.remaining, budget, self._chunk(seq))
            # with a provisional sequence, pages for all that it leaves to this one
            ahead = count if _without_provisional(seq) else seq.remaining
            if count and seq.running and self._grow(seq, ahead):
                batch.append(ScheduledSequence(seq, count))
                budget -= count
        if self._preempted:  # what was just taken away is not handed out again in the same step
            self._preempted = False
            return [s for s in batch if s.seq.running]
        while budget > 0 and (admitted := self._admit()) is not None:
            if admitted.phase in (Phase.DRAFTING, Phase.HELD):
                continue
            count = min(admitted.remaining, budget, self._chunk(admitted))
            self._grow(admitted, count)
            batch.append(ScheduledSequence(admitted, count))
            budget -= count
        return batch

    def _active(self) -> list[Sequence]:
        return [seq for seq in self.running if seq.phase in (Phase.PREFILLING, Phase.DECODING)]

    def _chunk(self, seq: Sequence) -> int:
        most = self.max_num_batched_tokens
        if self.answer_rows is not None:
            prompt_left = len(seq.request.prompt_ids) - seq.computed
            most = min(most, prompt_left if prompt_left > 0 else self.answer_rows)
        return (
            most if _without_provisional(seq) else max(1, min(most, self.max_num_batched_tokens // self.chunk_divisor))
        )

    def reserve(self, seq: Sequence, nodes: int) -> int:
        """Pages for a draft of up to `nodes` tokens after a sequence; how many there is room for. Drafts take what is
        free and at most one cached page, and never preempt another sequence."""
        missing = self.pool.pages_for(len(seq.tokens) + nodes) - len(seq.pages)
        if missing > 0 and self.pool.free == 0:
            self.make_room(1)
        count = min(missing, self.pool.free)
        if count > 0:
            seq.pages.extend(self.pool.allocate(count, after=seq.pages[-1]))
        return min(nodes, len(seq.pages) * self.pool.page_size - len(seq.tokens))

    def trim(self, seq: Sequence) -> None:
        """Give back the pages that held only rejected tokens."""
        keep = self.pool.pages_for(len(seq.tokens))
        if len(seq.pages) > keep:
            self.pool.release(seq.pages[keep:])
            del seq.pages[keep:]

    def finish(self, seq: Sequence) -> None:
        """Take a sequence out; its whole pages stay known to the prefix tree."""
        if seq.running:
            self.running.remove(seq)
        else:
            self.waiting.remove(seq)
        if seq.draft_key is not None:
            self.shared_drafts.hold(seq, self.running, self.waiting)
        if self.shared_drafts:
            self.shared_drafts.release_unneeded(self.waiting)
        self._release_pages(seq, ended=True)
        seq.enter(Phase.FINISHED)

    def end_provisional(self, seq: Sequence) -> None:
        """A provisional sequence ends, whatever it is doing; the tokens it has emitted stay with the final sequence,
        and so does what a draft model has read for both."""
        final = seq.final
        assert final is not None and final.provisional is not None
        final.provisional.seq = None
        both = min(len(seq.pages), len(final.pages))
        self.pool.copy_draft_kv(seq.pages[:both], final.pages[:both])
        self.finish(seq)
        if final.phase is Phase.HELD:
            final.enter_next()

    def publish(self, seq: Sequence) -> None:
        """Make what a sequence has computed so far known to others: exact K/V to all, drafted K/V to requests of the
        same draft key."""
        if not seq.params.cache:
            return
        if self.tree is not None:
            new = self.tree.insert(seq.packed(seq.exact), seq.pages)
            seq.usage.written += new * self.pool.page_size
            for cache in self.text_caches:
                cache.remember(seq.packed(seq.exact), seq.pages)
        state = seq.prefill
        done = state is not None and seq.phase is not Phase.DRAFTING and seq.final is None
        if self.approximate is not None and state is not None and seq.draft_key is not None and done:
            where = ApproximatePages(seq.pages, state.first, state.depths)
            self.approximate.insert(seq.draft_key, seq.packed(seq.computed), where)

    def _admit(self) -> Sequence | None:
        """Start the next waiting sequence on whatever prefix of it is known."""
        seq = self._next()
        if seq is None or len(self.running) >= self.max_num_seqs:
            return None
        start = self.prefixes.find(seq, self.running)
        if start is None:
            return None
        self.pool.retain(start.pages)
        missing = self.pool.pages_for(len(seq.tokens)) - len(start.pages)
        if not self.make_room(missing):
            self.pool.release(start.pages)  # it starts when others end; admitting now would only preempt them
            return self._admit() if self._unpin_for(seq) else None
        self.waiting.remove(seq)
        self.running.append(seq)
        served = self.prefixes.begin(seq, start)
        seq.enter_next()
        if self.shared_drafts:
            self.shared_drafts.release_unneeded(self.waiting)
        if not seq.usage.preemptions:
            if self.tree is not None and seq.final is None:
                self.tree.count_read(seq.packed(seq.exact))
            seq.usage.cached_tokens, seq.usage.served = sum(served.values()), served
            seq.usage.queued_s = time.perf_counter() - seq.request.arrived
        return seq

    def _next(self) -> Sequence | None:
        """The first in the queue, but for answers that wait until another one has drafted their prompt."""
        for seq in list(self.waiting):
            if seq.final is not None and not self._room_for_both(seq):
                self.end_provisional(seq)
            elif seq.draft_key is None or not self.shared_drafts.awaited(seq, self.running):
                return seq
        return None

    def _unpin_for(self, seq: Sequence) -> bool:
        """Whether the next in the queue can be tried again: nothing runs, so that only pins can be in its way. Idle
        pins go first; a turn that has begun is admitted first, so that its pages are free when it is over."""
        if self.running or self.pins.give_up(sparing=seq.request.session):
            return not self.running
        turn = next((s for s in self.waiting if s.request.session in self.pins), None)
        if turn is not None and seq.request.session not in self.pins:
            self.waiting.remove(turn)
            self.waiting.appendleft(turn)
            return True
        return self.pins.give_up_any(seq.request.session)

    def _room_for_both(self, seq: Sequence) -> bool:
        """Whether a provisional sequence would leave room for the final one."""
        missing = 2 * (self.pool.pages_for(len(seq.tokens)) - len(self.prefixes.exact_pages(seq)))
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
        """A provisional sequence, else the youngest; a session's turn only where no other sequence is left."""
        provisional = next((seq for seq in self.running if seq.final is not None), None)
        others = [seq for seq in self.running if seq.request.session not in self.pins]
        return provisional or (others or self.running)[-1]

    def make_room(self, count: int) -> bool:
        """Whether `count` pages are free, after evicting cached ones if need be: approximate K/V goes first."""
        if count > self.pool.free:
            self.pins.expire()
        caches = (self.approximate, self.tree)
        for cache in (*caches, self.shared_drafts, *caches):  # they may hold the same pages
            if cache is not None and count > self.pool.free:
                cache.evict(count - self.pool.free)
        for text_cache in self.text_caches:  # what they release is free once the tree evicts it, too
            while count > self.pool.free and self.tree is not None and text_cache.release(count - self.pool.free):
                self.tree.evict(count - self.pool.free)
        return count <= self.pool.free

    def _preempt(self, seq: Sequence) -> None:
        """Give a sequence's pages back and let it start over later; its tokens stay, so nothing is sampled twice."""
        self._preempted = True
        if seq.final is not None:
            self.end_provisional(seq)
            return
        self.running.remove(seq)
        seq.usage.preemptions += 1
        self._release_pages(seq, ended=False)
        seq.enter(Phase.WAITING)
        self.waiting.appendleft(seq)

    def _release_pages(self, seq: Sequence, ended: bool) -> None:
        self.on_release(seq)
        self.publish(seq)
        session = seq.request.session
        if session is not None and ended and seq.final is None:
            self.pins.end(session)
            if self.tree is not None and seq.exact:  # a turn that never ran leaves what was pinned before
                self.pins.hold(session, self.tree.match(seq.packed(seq.exact)))
        self.pool.release(seq.pages)
        seq.pages, seq.computed, seq.prefill = array("i"), 0, None


def _without_provisional(seq: Sequence) -> bool:
    """Whether no provisional sequence runs for this one."""
    return seq.provisional is None or seq.provisional.seq is None


@dataclass(frozen=True)
class StartPoint:
    pages: list[int]  # with K/V of the sequence's first entries
    draft: SharedDraft | None = None  # whose pages they are; None: they are exact


class Prefixes:
    """What a waiting sequence can start from."""

    def __init__(
        self, pool: PagePool, tree: PrefixTree | None, approximate: ApproximateCache | None, tiers: Tiers | None
    ) -> None:
        self.pool, self.tree, self.approximate, self.tiers = pool, tree, approximate, tiers
        self.shared_drafts = SharedDrafts(pool)

    def find(self, seq: Sequence, running: Iterable[Sequence]) -> StartPoint | None:
        """What to start from; None where waiting for a running prefill is cheaper."""
        draft = None if seq.draft_key is None else self.shared_drafts.find(seq, running)
        if draft is None and self._in_flight(seq, running):
            return None
        self._touch(seq)
        exact = self.exact_pages(seq)
        if draft is not None and len(exact) < len(draft.pages):
            return StartPoint(draft.pages.tolist(), draft)
        return StartPoint(exact)

    def begin(self, seq: Sequence, start: StartPoint) -> dict[str, int]:
        """Start from there, with references to its pages already, and from what other tiers have after them. Returns
        the prompt tokens by where they came from."""
        if start.draft is not None:
            return self.shared_drafts.begin(seq, start.draft)
        known, served = start.pages, {"pool": len(start.pages) * self.pool.page_size}
        if self.tiers is not None and self.tree is not None and seq.params.cache:
            restored, tiers = self.tiers.restore(seq.packed(-1), known)
            known, served = [*known, *restored], served | tiers
            self.tree.insert(seq.packed(-1), known)
        seq.pages.extend(known)
        seq.computed = len(known) * self.pool.page_size
        if seq.draft_key is not None:
            self._open_draft(seq, seq.draft_key)
        return served

    def exact_pages(self, seq: Sequence) -> list[int]:
        """Pages of what is known exactly of a sequence, less than all of it: at least one token must run, or there
        would be no logits to sample from."""
        return self.tree.match(seq.packed(-1)) if self.tree is not None and seq.params.cache else []

    def _in_flight(self, seq: Sequence, running: Iterable[Sequence]) -> bool:
        """Whether a running prefill is computing a prefix this one could read: then waiting is cheaper than running."""
        if self.tree is None or not seq.params.cache:
            return False
        page, own = self.pool.page_size, seq.packed(-1)  # the last token runs in any case
        prefills = (r for r in running if r.phase is not Phase.DECODING and seq.can_read(r))
        leaders = [r for r in prefills if r.packed(page) == own[:page]]
        if not leaders or len(own) < page:
            return False
        known = max(len(self.exact_pages(seq)) * page, self._touch(seq))
        return any(common_prefix(r.packed(len(own)), own) // page * page > known for r in leaders)

    def _touch(self, seq: Sequence) -> int:
        """Entries that an earlier draft left; that marks it as used, so that others are evicted first."""
        if self.approximate is None or seq.draft_key is None:
            return 0
        return self.approximate.known(seq.draft_key, seq.packed(-1))

    def _open_draft(self, seq: Sequence, key: str) -> None:
        """Pages for the whole prompt, with what an earlier draft of it left."""
        missing = self.pool.pages_for(len(seq.tokens)) - len(seq.pages)
        seq.pages.extend(self.pool.allocate(missing, after=seq.pages[-1] if seq.pages else None))
        tokens, layers = seq.packed(len(seq.tokens)), len(self.pool.kv)
        state = PrefillState(seq.id, tokens, seq.pages, seq.computed, len(tokens), seq.params.prefill, layers)
        if self.approximate is not None and seq.params.cache:
            state.add_known(self.approximate.read(key, seq.packed(-1), state.first, seq.pages))
        seq.prefill = state
