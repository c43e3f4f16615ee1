"""Prompts whose K/V is drafted, as part of the engine's steps.

`SpeculativePrefill` stands between the scheduler, which gives such a sequence its pages, and the prefiller, which fills
them: one unit of work for each sequence and step, until the sequence continues like any other. `SharedDrafts` lets the
other answers to the same request start from the prompt that one of them has drafted. `Prefixes` is what any sequence
can start from, exact or drafted: the one place that admission asks. None of them knows sources or plans.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from forerun.cache.approximate import ApproximateCache
from forerun.cache.pool import PagePool
from forerun.cache.prefix import PrefixTree, unpack
from forerun.cache.tiers import Tiers
from forerun.core import PrefillReport
from forerun.engine.provisional import MAX_PROVISIONAL_TOKENS, ProvisionalAnswer
from forerun.engine.sequence import Phase, Sequence, common_prefix
from forerun.errors import BadProfile, ForerunError
from forerun.params import Prefill
from forerun.prefill.state import PrefillStage, PrefillState

if TYPE_CHECKING:
    from forerun.engine.scheduler import Scheduler
    from forerun.prefill.prefiller import Prefiller
    from forerun.prefill.sources.chunk_index import ChunkIndex

MIN_MET_SHARE = (
    0.5  # of the tokens that are not known exactly: more must have been met before for `auto` to take `chunk`
)


class SpeculativePrefill:
    """`prefiller`: None where this engine cannot draft prompts."""

    def __init__(
        self, prefiller: Prefiller | None, scheduler: Scheduler, fail: Callable[[Sequence, Exception], None]
    ) -> None:
        """`fail` ends a sequence whose prompt cannot be drafted after all."""
        self.prefiller, self.scheduler, self._fail = prefiller, scheduler, fail

    def problem(self, settings: Prefill, num_tokens: int) -> ForerunError | None:
        """Why a prompt cannot be drafted as asked, if that is so."""
        if settings.exact:
            return None
        if self.prefiller is None:
            return BadProfile(
                f"prefill {settings.mode!r} needs a profile of this model, and there is none",
                "open the model with prefill_profile=... (--prefill-profile), made by forerun calibrate; or allow "
                "exact prefill instead: allow_exact=True (--allow-exact)",
            )
        return self.prefiller.problem(settings, num_tokens)

    def check(self, settings: Prefill, num_tokens: int) -> None:
        problem = self.problem(settings, num_tokens)
        if problem is not None and not settings.allow_exact:
            raise problem

    def ready(self, settings: Prefill) -> bool:
        """Whether there is nothing to make for such prompts."""
        return settings.exact or self.prefiller is None or self.prefiller.has_source(settings)

    def open(self, seq: Sequence) -> Sequence | None:
        """Mark a new sequence whose prompt is to be drafted, or return a provisional sequence of which that is true;
        where it cannot be, the report in its usage has the reason."""
        settings = self._with_source(seq)
        provisional = settings.mode == "provisional"
        if settings.exact or (provisional and seq.index):  # further answers read the first one's exact prompt
            return None
        problem = self.problem(settings, len(seq.tokens))
        if problem is not None:
            seq.usage.prefill = PrefillReport(tokens=len(seq.tokens), fell_back=str(problem))
            return None
        assert self.prefiller is not None
        source = self.prefiller.source(settings)
        agreement = self.prefiller.agreement(source.name)
        if provisional and (why := self.prefiller.forecast.why_not_provisional(source.name, agreement)):
            seq.usage.prefill = PrefillReport(tokens=len(seq.tokens), source=source.name, fell_back=why)
            return None
        if source.text_index is not None:
            self._register(source.text_index)
        drafted = Sequence(seq.request, seq.index, seq.seed) if provisional else seq
        drafted.draft_key, drafted.prefill_settings = self.prefiller.key(settings), settings
        if not provisional:
            return None
        limit = self.prefiller.forecast.max_shown(source.name, agreement)
        drafted.final, seq.provisional = seq, ProvisionalAnswer(seq=drafted, max_tokens=limit)
        return drafted

    def _with_source(self, seq: Sequence) -> Prefill:
        """What was asked for; of source `auto` with `chunk` named where most of what is not known was met before."""
        settings = seq.params.prefill
        tree, tiers = self.scheduler.tree, self.scheduler.prefixes.tiers
        measured = settings.budget is not None or settings.quality is not None  # by the profile's curve
        if self.prefiller is None or settings.exact or settings.source != "auto" or measured or not seq.params.cache:
            return settings
        if tree is None or not (tree.num_pages or tiers is not None):  # there is nothing that was met before
            return settings
        chunk = replace(settings, source="chunk")
        index = self.prefiller.source(chunk).text_index
        if index is None or self.prefiller.problem(chunk, len(seq.tokens)) is not None:
            return settings
        self._register(index)
        tokens = seq.packed(-1)
        first = len(self.scheduler.prefixes.exact_pages(seq)) * self.scheduler.pool.page_size
        met = sum(match.count for match in index.find(tokens, first, len(tokens)))
        return chunk if met > MIN_MET_SHARE * (len(tokens) - first) else settings

    def _register(self, cache: ChunkIndex) -> None:
        """From now on it is given all exact K/V; what tiers and the prefix tree hold already, at once, the latest
        last."""
        tree, tiers = self.scheduler.tree, self.scheduler.prefixes.tiers
        if cache in self.scheduler.text_caches:
            return
        self.scheduler.text_caches.append(cache)
        cache.tiers = tiers
        for data in tiers.texts.read() if tiers is not None and tiers.texts is not None else ():
            cache.remember_stored(data)
        for data, _ in reversed(tree.texts()) if tree is not None else ():
            tokens = unpack(data)
            cache.remember(tokens, tree.match(tokens) if tree is not None else [])

    def advance(self) -> int:
        """One unit of work for each prompt that is being drafted; the tokens' worth of target work that took."""
        budget = self.scheduler.spare_tokens
        spent = 0
        for seq in self.scheduler.drafting:
            if spent >= budget:
                break  # in order of admission: the first is done first
            try:
                spent += self._advance(seq, budget - spent)
            except Exception as error:
                self._give_up(seq, error)
        return spent

    def _advance(self, seq: Sequence, budget: int) -> int:
        state, spent = seq.prefill, 0
        assert state is not None and self.prefiller is not None
        if not state.opened:
            seq.usage.prefill = state.report
            self.prefiller.open(state)
        if not state.finished:
            spent = self.prefiller.advance(state, budget)
        if state.finished:
            self.close(seq)
            if state.stage is PrefillStage.DONE:
                seq.computed = state.filled
                if seq.final is not None and (answer := seq.final.provisional) is not None:
                    answer.kl = self.prefiller.expected_kl(state.report)
                    if not (answer.kl and seq.sampling_context.plain):  # else doubts about each token decide
                        answer.max_tokens = self.prefiller.max_shown(state.report, answer.max_tokens)
                    else:
                        answer.max_tokens = MAX_PROVISIONAL_TOKENS
            elif seq.final is not None:
                self.scheduler.end_provisional(seq)  # the final sequence computes it anyway
                return spent
            else:
                seq.draft_key = seq.prefill = None
            seq.enter_next()
        return spent

    def _give_up(self, seq: Sequence, error: Exception) -> None:
        """A prompt cannot be drafted after all: it is computed, if that was allowed."""
        if seq.usage.prefill is not None:
            seq.usage.prefill.fell_back = str(error)
        if seq.final is not None or not seq.params.prefill.allow_exact or not isinstance(error, ForerunError):
            self._fail(seq, error)
            return
        self.close(seq)
        seq.draft_key = seq.prefill = None
        seq.enter_next()

    def observe_first_token(self, seq: Sequence) -> None:
        """What a prompt took that ran alone teaches whether drafting pays."""
        running = (*self.scheduler.running, *self.scheduler.waiting)
        tokens, usage = len(seq.request.prompt_ids) - seq.usage.cached_tokens, seq.usage
        if self.prefiller is None or tokens < 1 or seq.index or usage.preemptions:
            return
        if seq.provisional is not None or any(other.request is not seq.request for other in running):
            return
        seconds, report, forecast = usage.ttft_s - usage.queued_s, usage.prefill, self.prefiller.forecast
        if report is None or report.fell_back:
            forecast.observe_exact(tokens, seconds - (0.0 if report is None else report.drafting_s))
        elif report.drafted:
            forecast.observe_drafted(report.source, tokens, report.cost, seconds)

    def record_provisional(self, seq: Sequence) -> None:
        """Of a final sequence: which of the tokens that were shown stood."""
        report, answer = seq.usage.prefill, seq.provisional
        if self.prefiller is not None and report is not None and answer is not None and answer.tokens:
            agreement = self.prefiller.agreement(report.source)
            self.prefiller.forecast.record_provisional(report.source, agreement, len(answer.tokens), answer.confirmed)

    def close(self, seq: Sequence) -> None:
        """The prompt is done, or its sequence loses its pages."""
        if seq.final is not None:
            seq.final.usage.prefill = seq.usage.prefill
        if seq.prefill is not None and seq.prefill.opened:
            assert self.prefiller is not None
            self.prefiller.close(seq.prefill)


@dataclass(frozen=True)
class SharedDraft:
    """K/V of the whole pages of a drafted prompt, with at least one token after them."""

    pages: array[int]
    first: int  # entries before it are exact
    depths: np.ndarray  # [n] int16: layers of the first n entries that the target itself computed; of the rest, all
    report: PrefillReport  # of the answer it was drafted for


class SharedDrafts:
    """Drafted prompts of requests with several answers.

    Whole pages of the prompt are shared by reference, as they are not written to any more; what is left of it, a page
    at most, each answer computes for itself. While one of them drafts, the others wait. Where all that have it end
    before the others could begin, its pages are held for those, until they are needed elsewhere.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._held: dict[int, SharedDraft] = {}  # by request, the oldest first

    def __len__(self) -> int:
        return len(self._held)

    def awaited(self, seq: Sequence, running: Iterable[Sequence]) -> bool:
        """Whether another answer to the same request is drafting what this one could start from, and none has it."""
        if not self._whole_pages(seq) or self.find(seq, running) is not None:
            return False
        return bool(_siblings(seq, running))

    def find(self, seq: Sequence, running: Iterable[Sequence]) -> SharedDraft | None:
        """What another answer to the same request has drafted; the reader retains its pages at once."""
        if not self._whole_pages(seq):
            return None
        other = next((o for o in _siblings(seq, running) if o.phase is Phase.DECODING), None)
        return self._held.get(seq.request.id) if other is None else self._of(other)

    def begin(self, seq: Sequence, draft: SharedDraft) -> dict[str, int]:
        """Start from there; the sequence holds references to the pages already. Returns its prompt tokens by where they
        came from."""
        shared = len(draft.pages) * self._pool.page_size
        seq.pages.extend(draft.pages)
        seq.computed = shared
        tokens, layers = seq.packed(len(seq.request.prompt_ids)), draft.report.layers
        end = min(len(tokens), len(draft.depths))
        state = PrefillState(seq.id, tokens, seq.pages, draft.first, end, seq.params.prefill, layers, PrefillStage.DONE)
        state.depths[shared:] = layers  # what comes after the pages that are shared, it computes itself
        state.depths[:shared], seq.prefill = draft.depths[:shared], state
        if not seq.num_generated:  # else it was preempted, and the report is of how its answer began
            state.report = replace(
                draft.report,
                tokens=len(tokens),
                token_layers=(len(tokens) - shared) * layers,
                cost=(len(tokens) - shared) / max(1, len(tokens) - draft.first),
                read_s=0.0,
                recompute_s=0.0,
                check_s=0.0,
            )
            state.describe()
            seq.usage.prefill = state.report
        return {"pool": shared - int((state.depths < layers).sum())}

    def hold(self, seq: Sequence, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> None:
        """A sequence is about to end: hold what the answers that wait would draft once more, where no other has it."""
        has_it = seq.final is None and seq.draft_key is not None and seq.phase is Phase.DECODING
        if has_it and _siblings(seq, waiting) and self._whole_pages(seq) and self.find(seq, running) is None:
            draft = self._of(seq)
            self._pool.retain(draft.pages)
            self._held[seq.request.id] = draft

    def release_unneeded(self, waiting: Iterable[Sequence]) -> None:
        """Release what no waiting sequence could start from."""
        needed = {seq.request.id for seq in waiting}
        for request in [request for request in self._held if request not in needed]:
            self._pool.release(self._held.pop(request).pages)

    def evict(self, count: int) -> int:
        """Release prompts until so many pages are free, where there are as many; they are drafted anew."""
        before = self._pool.free
        while self._held and self._pool.free - before < count:
            self._pool.release(self._held.pop(next(iter(self._held))).pages)
        return self._pool.free - before

    def clear(self) -> None:
        self.release_unneeded(())

    def _whole_pages(self, seq: Sequence) -> int:
        """Pages of a prompt that can be shared: the last token runs in any case."""
        return (len(seq.request.prompt_ids) - 1) // self._pool.page_size

    def _of(self, seq: Sequence) -> SharedDraft:
        state = seq.prefill
        assert state is not None
        report = seq.usage.prefill or PrefillReport(layers=state.layers)
        return SharedDraft(seq.pages[: self._whole_pages(seq)], state.first, state.depths, report)


def _siblings(seq: Sequence, among: Iterable[Sequence]) -> list[Sequence]:
    """Other answers to the same request on drafted K/V; those that fell back to exact prefill are read as any are."""
    mine = (o for o in among if o.request is seq.request and o is not seq)
    return [o for o in mine if o.draft_key is not None and o.final is None]


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
        page, decoding = self.pool.page_size, Phase.DECODING
        if len(seq.tokens) <= page:  # the last token runs in any case
            return False
        start = seq.tokens[:page]
        leaders = [r for r in running if r.phase is not decoding and r.tokens[:page] == start and seq.can_read(r)]
        if not leaders:
            return False
        own = seq.packed(-1)
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
        state = PrefillState(seq.id, tokens, seq.pages, seq.computed, len(tokens), seq.prefill_settings, layers)
        if self.approximate is not None and seq.params.cache:
            state.add_known(self.approximate.read(key, seq.packed(-1), state.first, seq.pages))
        seq.prefill = state
