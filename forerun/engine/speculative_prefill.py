"""Prompts whose K/V is drafted, as part of the engine's steps.

Between the scheduler, which gives such a sequence its pages, and the prefiller, which fills them: one unit of work for
each sequence and step, until the sequence goes on like any other. Knows neither sources nor plans.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from forerun.cache.prefix import unpack
from forerun.core import PrefillReport
from forerun.engine.scheduler import Keeper, Scheduler
from forerun.engine.sequence import Approximate, Sequence
from forerun.errors import BadProfile, ForerunError
from forerun.params import Prefill
from forerun.prefill.provisional import Provisional
from forerun.prefill.state import PrefillStage

if TYPE_CHECKING:
    from forerun.prefill.prefiller import Prefiller


class Drafting:
    """`prefiller`: None where this engine cannot draft prompts."""

    def __init__(
        self, prefiller: Prefiller | None, scheduler: Scheduler, fail: Callable[[Sequence, ForerunError], None]
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
                "open the model with profile=... (--profile), made by forerun calibrate; or allow exact prefill "
                "instead: allow_exact=True (--allow-exact)",
            )
        return self.prefiller.problem(settings, num_tokens)

    def check(self, settings: Prefill, num_tokens: int) -> None:
        problem = self.problem(settings, num_tokens)
        if problem is not None and not settings.allow_exact:
            raise problem

    def ready(self, settings: Prefill) -> bool:
        """Whether there is nothing to make for such prompts."""
        return settings.exact or self.prefiller is None or self.prefiller.has_source(settings)

    def prepare(self, settings: Prefill) -> None:
        """Make what drafts such prompts, between steps; raises where no prompt could be drafted so."""
        self.check(settings, 1)

    def open(self, seq: Sequence) -> Sequence | None:
        """Mark a new sequence whose prompt is to be drafted, or give it a guide of whom that is true, which is
        returned; where that cannot be, its usage says why."""
        settings = seq.params.prefilling
        provisional = settings.mode == "provisional"
        if settings.exact or (provisional and seq.index):  # further answers read the first one's exact prompt
            return None
        problem = self.problem(settings, len(seq.tokens))
        if problem is not None:
            seq.usage.prefill = PrefillReport(tokens=len(seq.tokens), fell_back=str(problem))
            return None
        assert self.prefiller is not None
        source = self.prefiller.source(settings)
        if isinstance(source, Keeper):
            self._enlist(source)
        drafted = Sequence(seq.request, seq.index, seq.seed) if provisional else seq
        drafted.approximate = Approximate(self.prefiller.key(settings))
        if not provisional:
            return None
        seq.guide, drafted.real, seq.provisional = drafted, seq, Provisional()
        return drafted

    def _enlist(self, keeper: Keeper) -> None:
        """From now on it hears of all exact K/V; of what the prefix tree has already, at once, the latest last."""
        tree = self.scheduler.tree
        if keeper in self.scheduler.keepers:
            return
        self.scheduler.keepers.append(keeper)
        for data, _ in reversed(tree.texts()) if tree is not None else ():
            tokens = unpack(data)
            keeper.remember(tokens, tree.match(tokens) if tree is not None else [])

    def advance(self) -> int:
        """One unit of work for each prompt that is being drafted; the tokens' worth of target work that took."""
        drafting = self.scheduler.drafting
        if not drafting:
            return 0
        budget = self.scheduler.spare_tokens
        spent = 0
        for seq in drafting:
            if spent >= budget:
                break  # in order of admission: the first is done first
            try:
                spent += self._advance(seq, budget - spent)
            except ForerunError as error:
                self._give_up(seq, error)
        return spent

    def _give_up(self, seq: Sequence, error: ForerunError) -> None:
        """A prompt cannot be drafted after all: it is computed, if that was allowed."""
        if seq.usage.prefill is not None:
            seq.usage.prefill.fell_back = str(error)
        if seq.real is not None or not seq.params.prefilling.allow_exact:
            self._fail(seq, error)
            return
        self.close(seq)
        seq.approximate = None

    def _advance(self, seq: Sequence, budget: int) -> int:
        own = seq.approximate
        assert own is not None and self.prefiller is not None
        if own.state is None:
            known = len(own.depths) if len(own.depths) > own.first else 0
            depths = own.depths if known else None
            settings, tokens = seq.params.prefilling, seq.packed(len(seq.tokens))
            own.state = self.prefiller.open(seq.id, tokens, seq.pages, own.first, settings, known, depths)
            seq.usage.prefill = own.state.report
        state, spent = own.state, 0
        if not state.finished:
            spent = self.prefiller.advance(state, budget)
        if state.finished:
            self.close(seq)
            own.drafting = False
            if state.stage is PrefillStage.EXACT and seq.real is not None:
                self.scheduler.dismiss(seq)  # the real one does that anyway
            elif state.stage is PrefillStage.EXACT:
                seq.approximate = None
            else:
                seq.computed, own.depths, seq.ready = state.filled, state.depths, state.logits
        return spent

    def close(self, seq: Sequence) -> None:
        """Forget a prompt that is done, or whose sequence loses its pages."""
        own = seq.approximate
        if seq.real is not None:
            seq.real.usage.prefill = seq.usage.prefill
        if own is not None and own.state is not None:
            assert self.prefiller is not None
            self.prefiller.close(own.state)
            own.state = None
