"""Further answers to a request whose prompt was drafted: they start from the K/V of the one that has it.

Whole pages of the prompt are shared by reference, as nobody writes to them any more; what is left of it, a page at
most, each answer computes for itself. While one of them drafts, the others wait. Where all who have it end before the
others could begin, its pages are held for those, until they are needed elsewhere. Knows neither sources nor plans.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from forerun.cache.pool import PagePool
from forerun.core import PrefillReport
from forerun.engine.sequence import Sequence
from forerun.prefill.depth import DepthMap


@dataclass(frozen=True)
class DraftedPrompt:
    """K/V of the whole pages of a prompt, with at least one token after them."""

    pages: array[int]
    first: int  # entries before it are exact
    depths: np.ndarray  # [n] int16: layers of the first n entries that the target itself computed; of the rest, all
    report: PrefillReport  # of the answer it was drafted for


class Siblings:
    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._held: dict[int, DraftedPrompt] = {}  # by request, the oldest first

    def awaited(self, seq: Sequence, running: Iterable[Sequence]) -> bool:
        """Whether another answer to the same request is getting what this one could start from, and nobody has it."""
        if seq.approximate is None or not self._whole(seq) or self.find(seq, running) is not None:
            return False
        return bool(_others(seq, running))

    def find(self, seq: Sequence, running: Iterable[Sequence]) -> DraftedPrompt | None:
        """What another answer to the same request has drafted; the reader takes its references at once."""
        if seq.approximate is None or not self._whole(seq):
            return None
        other = next((o for o in _others(seq, running) if not o.prefilling and not o.drafting), None)
        return self._held.get(seq.request.id) if other is None else self._of(other)

    def begin(self, seq: Sequence, prompt: DraftedPrompt) -> dict[str, int]:
        """Go on from there; the sequence holds references to the pages already. Returns its prompt tokens by where they
        came from."""
        own, shared = seq.approximate, len(prompt.pages) * self._pool.page_size
        assert own is not None
        seq.pages.extend(prompt.pages)
        seq.computed, own.first, own.depths, own.drafting = shared, prompt.first, prompt.depths[:shared], False
        if not seq.num_generated:  # else it was preempted, and the report says how its answer began
            seq.usage.prefill = _report(prompt, len(seq.request.prompt_ids), shared)
        kept = int((own.depths < prompt.report.layers).sum())
        return {"pool": shared - kept}

    def keep(self, seq: Sequence, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> None:
        """A sequence ends: hold what the answers that wait would draft once more, where nobody else has it."""
        has_it = seq.real is None and seq.approximate is not None and not seq.prefilling and not seq.drafting
        if has_it and _others(seq, waiting) and self._whole(seq) and self.find(seq, running) is None:
            prompt = self._of(seq)
            self._pool.retain(prompt.pages)
            self._held[seq.request.id] = prompt

    def settle(self, waiting: Iterable[Sequence]) -> None:
        """Let go of what nobody waits for any more."""
        if self._held:
            asked = {seq.request.id for seq in waiting}
            for request in [request for request in self._held if request not in asked]:
                self._pool.release(self._held.pop(request).pages)

    def evict(self, count: int) -> int:
        """Let go of prompts until so many pages are free, where there are as many; who waits for one drafts it anew."""
        before = self._pool.free
        while self._held and self._pool.free - before < count:
            self._pool.release(self._held.pop(next(iter(self._held))).pages)
        return self._pool.free - before

    def clear(self) -> None:
        self.settle(())

    def _whole(self, seq: Sequence) -> int:
        """Pages of a prompt that can be shared: the last token runs in any case."""
        return (len(seq.request.prompt_ids) - 1) // self._pool.page_size

    def _of(self, seq: Sequence) -> DraftedPrompt:
        own = seq.approximate
        assert own is not None
        report = seq.usage.prefill or PrefillReport(layers=len(self._pool.kv))
        return DraftedPrompt(seq.pages[: self._whole(seq)], own.first, own.depths, report)


def _others(seq: Sequence, among: Iterable[Sequence]) -> list[Sequence]:
    """Answers to the same request on drafted K/V; those that were left to exact prefill are read as anybody's are."""
    return [o for o in among if o.request is seq.request and o is not seq and o.approximate is not None and not o.real]


def _report(prompt: DraftedPrompt, tokens: int, shared: int) -> PrefillReport:
    """The prompt as it was drafted, at the cost of what is computed after the pages that are shared."""
    layers = prompt.report.layers
    depths = np.full(tokens, layers, dtype=np.int16)
    given = prompt.depths[:shared]
    depths[: len(given)] = given
    shallow = depths < layers
    exact = int(shallow.argmax()) if shallow.any() else tokens
    end = max(exact, min(tokens, len(prompt.depths)))
    accepted = int(shallow.sum())
    return replace(
        prompt.report,
        tokens=tokens,
        exact=exact,
        drafted=end - exact,
        accepted=accepted,
        recomputed=end - exact - accepted,
        token_layers=(tokens - shared) * layers,
        cost=(tokens - shared) / max(1, tokens - prompt.first),
        depth_runs=DepthMap(depths, layers).runs(),
        read_s=0.0,
        repair_s=0.0,
        check_s=0.0,
    )
