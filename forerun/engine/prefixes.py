"""What a waiting sequence can read when it is let in: the prefix tree, host memory and disk, an earlier draft.

Also whether somebody is about to know more of it. Moves pages; knows no queue and no budget.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from forerun.cache.approximate import ApproximateCache
from forerun.cache.pool import PagePool
from forerun.cache.prefix import PrefixTree
from forerun.cache.tiers import Tiers
from forerun.engine.sequence import Sequence, common_prefix


class Prefixes:
    def __init__(
        self, pool: PagePool, tree: PrefixTree | None, approximate: ApproximateCache | None, tiers: Tiers | None
    ) -> None:
        self.pool, self.tree, self.approximate, self.tiers = pool, tree, approximate, tiers

    def known(self, seq: Sequence) -> list[int]:
        """Pages of what is known exactly of a sequence, less than all of it: at least one token must run, or there
        would be no logits to sample from."""
        return self.tree.match(seq.packed(-1)) if self.tree is not None and seq.params.cache else []

    def in_flight(self, seq: Sequence, running: Iterable[Sequence]) -> bool:
        """Whether a running prefill is computing a prefix this one could read: then waiting is cheaper than running."""
        if self.tree is None or not seq.params.cache:
            return False
        page, own = self.pool.page_size, seq.packed(-1)  # the last token runs in any case
        leaders = [r for r in running if r.prefilling and seq.can_read(r) and r.packed(page) == own[:page]]
        if not leaders or len(own) < page:
            return False
        known = max(len(self.known(seq)) * page, self.touch(seq))
        return any(common_prefix(r.packed(len(own)), own) // page * page > known for r in leaders)

    def touch(self, seq: Sequence) -> int:
        """Entries that an earlier draft left; that marks it as used, so that others are evicted first."""
        if self.approximate is None or seq.approximate is None:
            return 0
        return self.approximate.known(seq.approximate.key, seq.packed(-1))

    def begin(self, seq: Sequence, known: list[int]) -> dict[str, int]:
        """Go on from what is known, to which the sequence holds references already, and what other tiers have after
        it. Returns its prompt tokens by where they came from."""
        served = {"pool": len(known) * self.pool.page_size}
        if self.tiers is not None and self.tree is not None and seq.params.cache:
            restored, tiers = self.tiers.restore(seq.packed(-1), known)
            known, served = [*known, *restored], served | tiers
            self.tree.insert(seq.packed(-1), known)
        seq.pages.extend(known)
        seq.computed = len(known) * self.pool.page_size
        if seq.approximate is not None:
            self._start_drafting(seq)
        return served

    def _start_drafting(self, seq: Sequence) -> None:
        """Pages for the whole prompt, with what an earlier draft of it left."""
        own = seq.approximate
        assert own is not None
        own.drafting, own.first, own.depths = True, seq.computed, np.zeros(0, dtype=np.int16)
        missing = self.pool.pages_for(len(seq.tokens)) - len(seq.pages)
        seq.pages.extend(self.pool.allocate(missing, after=seq.pages[-1] if seq.pages else None))
        if self.approximate is not None and seq.params.cache:
            own.depths = self.approximate.read(own.key, seq.packed(-1), own.first, seq.pages)
