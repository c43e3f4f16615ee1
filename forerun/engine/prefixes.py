"""What a waiting sequence can start from: the one place that admission asks.

The prefix tree, host memory and disk, an earlier draft, or the draft of another answer to the same request; and whether
it should wait because a running sequence is about to have more of it. Takes no decision about order or room.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from forerun.cache.approximate import ApproximateCache
from forerun.cache.pool import PagePool
from forerun.cache.prefix import PrefixTree
from forerun.cache.tiers import Tiers
from forerun.engine.sequence import Phase, Sequence, common_prefix
from forerun.engine.speculative_prefill import SharedDraft, SharedDrafts
from forerun.prefill.state import PrefillState


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
            self.tree.insert(seq.packed(-1), known, seq.request.client.name, seq.request.client.weight)
        seq.pages.extend(known)
        seq.computed = len(known) * self.pool.page_size
        if seq.draft_key is not None:
            self._open_draft(seq, seq.draft_key)
        return served

    def exact_pages(self, seq: Sequence) -> list[int]:
        """Pages of what is known exactly of a sequence, less than all of it: at least one token must run, or there
        would be no logits to sample from."""
        return self.tree.match(seq.packed(-1)) if self.tree is not None and seq.params.cache else []

    def awaits_leader(self, seq: Sequence) -> bool:
        """Whether the running prefill that it was found to wait for is still computing what they share."""
        if seq.leader is None:
            return False
        leader, shared = seq.leader
        computing = leader.phase in (Phase.DRAFTING, Phase.HELD, Phase.PREFILLING)
        if computing and (leader.draft_key is not None or leader.computed < shared):
            return True
        seq.leader = None
        return False

    def _in_flight(self, seq: Sequence, running: Iterable[Sequence]) -> bool:
        """Whether a running prefill is computing a prefix this one could read: then waiting is cheaper than running.
        What is exact can be read as soon as the prefill has passed it, a draft when all of it is done."""
        if self.tree is None or not seq.params.cache:
            return False
        page, own = self.pool.page_size, seq.packed(-1)  # the last token runs in any case
        prefills = (r for r in running if r.phase is not Phase.DECODING and seq.can_read(r))
        leaders = [r for r in prefills if r.packed(page) == own[:page]]
        if not leaders or len(own) < page:
            return False
        known = max(len(self.exact_pages(seq)) * page, self._touch(seq))
        for leader in leaders:
            shared = common_prefix(leader.packed(len(own)), own) // page * page
            if shared > known:
                seq.leader = leader, shared
                return True
        return False

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
