"""What runs next: admits, chunks, preempts. It moves pages and counters; it never sees a tensor or a token's meaning.

Each step is filled in this order: sequences that decode (one token each), then prompts, in portions by `FairShares`,
those of waiting sequences too, which are admitted when their turn comes. While answers stream, `StepPacer` bounds how
many prompt tokens a step runs; otherwise it is the step's token budget. A sequence whose prompt is drafted has pages
for all of it from the start, and runs nothing here until that is done. A provisional sequence is admitted only where
there is room for the final one too, and is the first to be preempted.

A sequence that waits may be passed by later ones of its client, and by all where there are no pages for it, until they
have had `MAX_OVERTAKING` times its own tokens; from then on none is admitted before it, though there may be room for
smaller ones. A client that holds more than its share of places or pages is preempted for one that has less. `Prefixes`
is the one place that admission asks what a sequence can start from.
"""

from __future__ import annotations

import math
import time
from array import array
from collections import deque
from collections.abc import Callable

from forerun.cache.approximate import ApproximateCache, ApproximatePages
from forerun.cache.pins import Pins
from forerun.cache.pool import PagePool
from forerun.cache.prefix import PrefixTree
from forerun.cache.tiers import Tiers
from forerun.decode.control.cost import CostCurve
from forerun.engine.fairness import FairShares, PromptLine, portion
from forerun.engine.pace import StepPacer, StepWork
from forerun.engine.preemption import victim_for_admission, victim_for_growth
from forerun.engine.sequence import Client, Phase, ScheduledSequence, Sequence
from forerun.engine.speculative_prefill import Prefixes
from forerun.prefill.sources.chunk_index import ChunkIndex

# a prefill with a provisional sequence runs in chunks of a step's tokens divided by this: one such token per step
PROVISIONAL_CHUNK_DIVISOR = 4
MAX_OVERTAKING = 3  # prompt tokens that pass a waiting sequence, for each of its own: as in `FairShares`
# Of the pool, where others need pages: sessions that grow and pause would else leave less and less of it to all others
MAX_PINNED_SHARE = 0.5
# For pages of idle pins, be they ever so few: with half of a small pool pinned, eight streams that had fitted into it
# waited for each other, the last of them for 6 s (docs/log.md)
MAX_PINNED_WAIT_S = 1.0
MAX_FAILED_ADMISSIONS = 4  # in one step: trying is slow where hundreds wait


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
        pacer: StepPacer | None = None,
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
        self.shares = FairShares()
        self.pacer = pacer or StepPacer(lambda: CostCurve({1: 1.0}))
        self.work = StepWork(0, 0, 0)  # of the step that was scheduled last
        self._untimed = False  # a sequence decodes that has not been in a step without prompt tokens
        self._shared = False  # whether there are several sequences in this step
        self._preempted: list[Sequence] = []  # in this step
        self.chunk_divisor = PROVISIONAL_CHUNK_DIVISOR  # 1: chunks are as if there were no provisional sequence
        # Tokens of an answer that run at once after a preemption, apart from the prompt's; None: no difference
        self.answer_rows: int | None = None

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)
        seq.expected_cached = len(self.prefixes.exact_pages(seq)) * self.pool.page_size
        if seq.request.session is not None:
            self.pins.begin(seq.request.session, (seq.request.client.name, seq.request.client.weight))

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
        left = self._prompt_budget(max(1, self.max_num_batched_tokens - sum(seq.remaining == 1 for seq in active)))
        return -(-left // 2) if self.waiting or any(seq.remaining > 1 for seq in active) else left

    def schedule(self, spent: int = 0) -> list[ScheduledSequence]:
        """What one forward runs; `spent` tokens of the step's budget went into drafting prompts, but no sequence that
        decodes waits for that."""
        self._shared = len(self.running) + len(self.waiting) > 1  # else there is nothing to share out
        if self._shared:
            self.shares.begin_step(self.sequences)
        decoding = [seq for seq in self._active() if seq.remaining == 1]
        budget = max(self.max_num_batched_tokens - spent, min(self.max_num_batched_tokens, len(decoding)))
        batch: list[ScheduledSequence] = []
        for seq in decoding:
            if budget and seq.running and self._grow(seq, 1):
                batch.append(ScheduledSequence(seq, 1))
                if self._shared:
                    self.shares.charge(seq.request.client, 1)
                budget -= seq.final is None or self.chunk_divisor > 1
        portions: dict[Sequence, int] = {}
        if self.waiting or len(decoding) < len(self.running):
            portions = self._prompt_portions(min(budget, self._prompt_budget(budget + spent) - spent))
        for seq, count in portions.items():
            # with a provisional sequence, pages for all that it leaves to this one
            ahead = count if _without_provisional(seq) else seq.remaining
            if seq.running and self._grow(seq, ahead):
                batch.append(ScheduledSequence(seq, count))
        if self._preempted:
            self._preempted.clear()
            batch = [s for s in batch if s.seq.running]
        self.work = self._step_work(batch, spent)
        return batch

    def _step_work(self, batch: list[ScheduledSequence], spent: int) -> StepWork:
        prompts = [s for s in batch if not s.decodes]
        tokens, paced = spent + sum(s.count for s in prompts), any(s.seq.streams for s in batch)
        context = sum(s.count * s.seq.computed for s in prompts) // max(1, tokens)
        joined = any(s.decodes and s.seq.num_generated == 1 for s in batch)
        self._untimed = tokens > 0 and (self._untimed or joined)
        return StepWork(len(batch) - len(prompts), tokens, context, paced, self._untimed)

    def _prompt_budget(self, most: int) -> int:
        """Prompt tokens of a step, of at most so many. Beside streams as many as their gap allows, of prompts that have
        just begun; for a stream that is about to begin, few more than its own prompt has left."""
        if any(seq.streams for seq in self.running):
            return self.tokens_beside_streams(0, most)
        prompts = [seq for seq in (*self._active(), *self.waiting) if seq.remaining > 1]
        if len(prompts) > 1 and any(seq.request.streamed for seq in prompts):
            shortest = min(seq.prompt_left for seq in prompts if seq.request.streamed)
            return min(most, max(-(-4 * shortest // 3), self.pacer.prompt_tokens(1, 0, most)))
        return most

    def tokens_beside_streams(self, context: int, most: int) -> int:
        """Tokens after `context` others, at most so many, that a forward may run without holding streams up."""
        rows = [seq for seq in self._active() if seq.remaining == 1]
        return self.pacer.prompt_tokens(len(rows), context, most) if any(seq.streams for seq in rows) else most

    def _seconds_beside_streams(self) -> float:
        """That prompts may take in this step."""
        rows = [seq for seq in self._active() if seq.remaining == 1]
        return self.pacer.room_s(len(rows)) if any(seq.streams for seq in rows) else math.inf

    def _prompt_portions(self, budget: int) -> dict[Sequence, int]:
        """Prompt tokens that run in this step, by sequence; those that wait are admitted when their turn comes."""
        prompts = [seq for seq in self._active() if seq.remaining > 1]
        if not self._preempted:  # else what was just taken away would be handed out again
            prompts += self._next_in_line([seq for seq in self.waiting if self._can_try(seq)])
        if not self._shared:
            return {seq: count for seq in prompts if (count := self._portion_alone(seq, budget))}
        given: dict[Sequence, int] = {}
        size, failures, left_s = portion(budget), 0, self._seconds_beside_streams()
        line = PromptLine(self.shares, prompts)
        while budget > 0 and line:
            seq = line.next()
            if seq in self._preempted:
                line.leave(seq)
                continue
            waited = seq.phase is Phase.WAITING
            if waited and not self._admit(seq):
                line.leave(seq)
                failures += self._can_try(seq)
                full, client = len(self.running) >= self.max_num_seqs, seq.request.client
                if failures == MAX_FAILED_ADMISSIONS or full:  # of other clients, one may still be preempted for
                    for other in [p for p in line if not p.running and not (full and p.request.client != client)]:
                        line.leave(other)
                continue
            if waited:
                line.admitted(seq)
            if seq.phase in (Phase.DRAFTING, Phase.HELD):
                line.leave(seq)
                continue
            most = min(seq.remaining, self._chunk(seq))
            count = min(size, budget, most - given.get(seq, 0))
            if left_s < math.inf:
                token_s = self.pacer.token_s(seq.computed)  # a token after many others takes longer
                if left_s < token_s and given:
                    break
                count = min(count, max(1, int(left_s / token_s)))
                left_s -= count * token_s
            given[seq] = given.get(seq, 0) + count
            budget -= count
            line.give(seq, count)
            if given[seq] == most:
                line.leave(seq)
        return given

    def _portion_alone(self, seq: Sequence, budget: int) -> int:
        """The same of the only sequence that there is."""
        if budget <= 0 or (seq.phase is Phase.WAITING and not self._admit(seq)):
            return 0
        return 0 if seq.phase in (Phase.DRAFTING, Phase.HELD) else min(budget, seq.remaining, self._chunk(seq))

    def _active(self) -> list[Sequence]:
        return [seq for seq in self.running if seq.phase in (Phase.PREFILLING, Phase.DECODING)]

    def _chunk(self, seq: Sequence) -> int:
        most = self.max_num_batched_tokens
        if self.answer_rows is not None:
            prompt_left = len(seq.request.prompt_ids) - seq.computed
            most = min(most, prompt_left if prompt_left > 0 else self.answer_rows)
        if _without_provisional(seq):
            return most
        return max(1, min(most, self.max_num_batched_tokens // self.chunk_divisor))

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
            self.publish_pages(seq)
            for cache in self.text_caches:
                cache.remember(seq.packed(seq.exact), seq.pages)
        state = seq.prefill
        done = state is not None and seq.phase is not Phase.DRAFTING and seq.final is None
        if self.approximate is not None and state is not None and seq.draft_key is not None and done:
            where = ApproximatePages(seq.pages, state.first, state.depths)
            self.approximate.insert(seq.draft_key, seq.packed(seq.computed), where)

    def publish_pages(self, seq: Sequence) -> None:
        """Exact pages alone, in the middle of a prompt: what begins in the same way starts there."""
        if self.tree is not None and seq.params.cache:
            client = seq.request.client
            new = self.tree.insert(seq.packed(seq.exact), seq.pages, client.name, client.weight)
            seq.usage.written += new * self.pool.page_size

    @staticmethod
    def _next_in_line(waiting: list[Sequence]) -> list[Sequence]:
        """Those of which one may be admitted: not while another has been passed too often, of the same client or for
        want of pages."""
        overdue = [seq for seq in waiting if seq.overtaken > MAX_OVERTAKING * len(seq.tokens)]
        if not overdue:
            return waiting
        clients = {seq.request.client for seq in overdue}
        rest = [] if any(seq.lacks_room for seq in overdue) else [s for s in waiting if s.request.client not in clients]
        return overdue + rest

    def _can_try(self, seq: Sequence) -> bool:
        """Not those that wait until a running sequence has drafted or computed what they start with, nor those whose
        provisional sequence is still to be admitted."""
        before = None if seq.provisional is None else seq.provisional.seq
        if self.prefixes.awaits_leader(seq) or (before is not None and not before.running):
            return False
        return seq.draft_key is None or not self.shared_drafts.awaited(seq, self.running)

    def _admit(self, seq: Sequence) -> bool:
        """Start a waiting sequence on whatever prefix of it is known; False where it has to wait."""
        if seq.final is not None and not self._room_for_both(seq):
            self.end_provisional(seq)
            return False
        if not self._can_try(seq) or (len(self.running) >= self.max_num_seqs and not self._preempt_for(seq, 0)):
            return False
        start = self.prefixes.find(seq, self.running)
        if start is None:
            return False
        self.pool.retain(start.pages)
        missing = self.pool.pages_for(len(seq.tokens)) - len(start.pages)
        if not self.make_room(missing + self._promised(seq)):
            self.pool.release(start.pages)  # it starts when others end; admitting now would only preempt them
            seq.lacks_room, seq.without_room_since = True, seq.without_room_since or time.perf_counter()
            return (self._unpin_for(seq, missing) or self._preempt_for(seq, missing)) and self._admit(seq)
        self.waiting.remove(seq)
        self.running.append(seq)
        seq.admitted_with, seq.without_room_since = len(seq.tokens), 0.0
        for other in self.waiting:
            passed = other.request.arrived < seq.request.arrived
            if passed and (other.lacks_room or other.request.client == seq.request.client):
                other.overtaken += len(seq.tokens)
        served = self.prefixes.begin(seq, start)
        seq.enter_next()
        if self.shared_drafts:
            self.shared_drafts.release_unneeded(self.waiting)
        if not seq.usage.preemptions:
            if self.tree is not None and seq.final is None:
                self.tree.count_read(seq.packed(seq.exact))
            seq.usage.cached_tokens, seq.usage.served = sum(served.values()), served
            seq.usage.queued_s = time.perf_counter() - seq.request.arrived
        return True

    def _preempt_for(self, seq: Sequence, pages: int) -> bool:
        """Preempt a sequence so that this one can begin, which needs so many pages, or a place in the batch (0). One in
        a step."""
        victim = None if self._preempted else victim_for_admission(seq, pages, self.running, self.pins)
        if victim is None:
            return False
        self._preempt(victim)
        return True

    def _promised(self, seq: Sequence) -> int:
        """Pages that sequences admitted before this one still need for their prompts."""
        others, prefilling, waiting = list[Sequence](), Phase.PREFILLING, Phase.WAITING
        for other in self.running:
            if other.phase is prefilling:
                others.append(other)
            if (final := other.final) is not None and final is not seq and final.phase is waiting:
                others.append(final)
        return sum(self.pool.pages_for(len(other.tokens)) - len(other.pages) for other in others)

    def _unpin_for(self, seq: Sequence, pages: int) -> bool:
        """Whether a sequence can be tried again: it has waited for long, and an idle pin went, of its own client where
        that has its share of the pool; or nothing runs, so that only pins can be in its way. A turn that has begun is
        admitted first, so that its pages are free afterwards."""
        own, mine = seq.request.client, seq.request.session
        if self.running:
            waited = time.perf_counter() - seq.without_room_since >= MAX_PINNED_WAIT_S
            owner = None if self._within_share(own, pages) else own.name
            return waited and self.pins.give_up(sparing=mine, owner=owner)
        if self.pins.give_up(sparing=mine):
            return True
        turn = next((s for s in self.waiting if s.request.session in self.pins), None)
        if turn is not None and seq.request.session not in self.pins:
            self._admit(turn)
            return False
        return self.pins.give_up_any(seq.request.session)

    def _within_share(self, client: Client, pages: int) -> bool:
        """Whether a client would have no more than its share of the pool with so many pages more."""
        weights = {seq.request.client.name: seq.request.client.weight for seq in self.sequences} | self.pins.owners
        held = pages + sum(len(seq.pages) for seq in self.running if seq.request.client == client)
        return held <= self.pool.num_pages * client.weight / sum(weights.values())

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
            victim = victim_for_growth(self.running, self.pins)
            self._preempt(victim)
            if victim is seq:
                return False
        if missing > 0:
            seq.pages.extend(self.pool.allocate(missing, after=seq.pages[-1] if seq.pages else None))
        return True

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
        most = MAX_PINNED_SHARE * self.pool.num_pages
        while count > self.pool.free and self.pins.distinct_pages > most and self.pins.give_up(sparing=None):
            if self.tree is not None:
                self.tree.evict(count - self.pool.free)
        return count <= self.pool.free

    def _preempt(self, seq: Sequence) -> None:
        """Give a sequence's pages back and let it start over later; its tokens stay, so nothing is sampled twice."""
        self._preempted.append(seq)
        if seq.final is not None:
            self.end_provisional(seq)
            return
        self.running.remove(seq)
        seq.usage.preemptions += 1
        seq.expected_cached = seq.exact
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
