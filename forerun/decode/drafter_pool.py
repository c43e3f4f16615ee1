"""The drafters of one engine: made when first needed, asked with care, told when requests end.

A drafter may be anybody's. One that raises or proposes nonsense is left out of the request it failed on, with one
warning in the log, and nobody else notices. Knows drafters and what forwards cost; not which drafts are kept.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from forerun.core import Draft, SamplingParams
from forerun.decode.control.controller import Controller
from forerun.decode.control.cost import CostCurve
from forerun.decode.draft_context import DraftContext
from forerun.decode.drafters import Drafter, DraftRequest, registered
from forerun.decode.state import DraftTask, SpeculationState
from forerun.errors import BadRequest, ForerunError, OutOfPages

log = logging.getLogger("forerun")

FREE = ("grammar", "lookup", "copy", "suffix")  # who guesses under `auto`, beside a draft model where there is one


class DrafterPool:
    def __init__(self, ctx: DraftContext, controller: Controller) -> None:
        self.ctx, self.controller = ctx, controller
        self._drafters: dict[str, Drafter] = {}
        self._failed: set[str] = set()

    def __getitem__(self, name: str) -> Drafter:
        return self._drafters[name]

    # -- who is there --------------------------------------------------------------------------------------------------

    def names(self, params: SamplingParams) -> list[str]:
        """Drafters a request asks for; a grammar always guesses for the answers it constrains."""
        asked = params.speculation.drafter
        if params.speculation.off:
            return []
        if asked != "auto":
            names = [name.strip() for name in asked.split("+")]
            for name in names:
                if name not in registered():
                    known = ", ".join(registered())
                    hint = f"use auto, off, one of {known}, or several of these joined by +"
                    raise BadRequest(f"no drafter is called {name!r}", hint)
            return names if params.grammar is None or "grammar" in names else ["grammar", *names]
        free = [name for name in FREE if name != "grammar" or params.grammar is not None]
        draft = self.ctx.draft
        return free if draft is None else [*free, "model" if draft.same_tokens else "cross"]

    def check(self, params: SamplingParams) -> None:
        """Reject a request that names a drafter that is not there or cannot work here."""
        for name in self.names(params):
            problem = registered()[name].problem(self.ctx)
            if problem is not None:
                raise problem

    def ready(self, params: SamplingParams) -> bool:
        return all(name in self._drafters for name in self.names(params))

    def dismiss(self, name: str) -> None:
        """Make it anew when it is asked for again."""
        self._drafters.pop(name, None)

    def prepare(self, params: SamplingParams) -> None:
        """Make the drafters a request names, between steps: timing one or searching its layers can take long."""
        self.check(params)
        for name in self.names(params):
            if name not in self._drafters:
                self._make(name)

    def able(self, params: SamplingParams) -> list[str]:
        """The drafters of a request that starts, without those that cannot be made."""
        names = []
        for name in self.names(params):
            if registered()[name].remembers and not params.cache:
                continue
            try:
                if name not in self._drafters:
                    self._make(name)
                names.append(name)
            except ForerunError as error:
                self.report(name, str(error))
        return names

    def _make(self, name: str) -> None:
        """One that runs a model tells what that costs; it joins only when both worked."""
        try:
            drafter = registered()[name](self.ctx)
            if not drafter.free and name not in self.controller.drafters:
                self.controller.drafters[name] = self._time(drafter)
        except ForerunError:
            raise
        except Exception as error:
            problem = f"the drafter {name!r} cannot be made: {type(error).__name__}: {error}"
            raise BadRequest(problem, "mend it, or name another") from error
        self._drafters[name] = drafter

    def _time(self, drafter: Drafter) -> CostCurve:
        """With whatever pages are free."""
        limit = min(self.limit, drafter.longest)
        while True:
            try:
                return CostCurve.within(drafter.time_round, limit)
            except OutOfPages:
                if limit <= 4:
                    raise
                limit //= 2

    @property
    def limit(self) -> int:
        """Tokens of the longest forward that can be timed."""
        pool = self.ctx.pool
        return min(self.ctx.max_context, pool.num_pages * pool.page_size)

    # -- asking --------------------------------------------------------------------------------------------------------

    def behind(self, drafter: Drafter, turn: DraftTask) -> int:
        try:
            return int(drafter.behind(turn.ask(1)))
        except Exception as error:
            self._give_up(drafter.name, turn, f"{type(error).__name__}: {error}")
            return 1 << 20

    def propose(self, drafter: Drafter, turns: list[DraftTask], asks: list[DraftRequest]) -> list[Draft]:
        """What a drafter proposes; nothing, and never again for that request, where it fails."""
        if not asks:
            return []
        try:
            drafts: list[Any] = list(drafter.propose(asks))
            problem = None if len(drafts) == len(asks) else f"{len(drafts)} drafts for {len(asks)} sequences"
        except Exception as error:
            drafts, problem = [], f"{type(error).__name__}: {error}"
        if problem is not None:
            if len(asks) > 1:  # one of them may be at fault; the others keep their drafter
                return [d for t, a in zip(turns, asks, strict=True) for d in self.propose(drafter, [t], [a])]
            self._give_up(drafter.name, turns[0], problem)
            return [Draft()]
        return [self._checked(drafter.name, t, a, d) for t, a, d in zip(turns, asks, drafts, strict=True)]

    def _checked(self, name: str, turn: DraftTask, ask: DraftRequest, draft: Any) -> Draft:
        try:
            wrong = self._wrong(ask, draft)
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        if wrong is not None:
            self._give_up(name, turn, wrong)
            return Draft()
        draft.sources = [name] * len(draft)  # whatever it calls itself
        return draft

    def _wrong(self, ask: DraftRequest, draft: Any) -> str | None:
        if not isinstance(draft, Draft):
            return f"a {type(draft).__name__} is no Draft"
        vocab = self.ctx.runner.decoder.config.vocab_size
        if draft.proposals:
            if not ask.at_random:
                return "proposals where the likeliest tokens were asked for"
            if len(draft) > ask.nodes:
                return f"{len(draft)} nodes drawn at random, {ask.nodes} were asked for"
            if any(not torch.is_tensor(q) or q.shape != (vocab,) for q in draft.proposals.values()):
                return f"a proposal that is not a distribution over {vocab} tokens"
        return draft.problem(vocab)

    def _give_up(self, name: str, turn: DraftTask, problem: str) -> None:
        turn.spec_state.names = [other for other in turn.spec_state.names if other != name]
        self.report(name, problem)

    def report(self, name: str, problem: str) -> None:
        if name not in self._failed:
            self._failed.add(name)
            log.warning("drafter %r failed and is left out of the requests it fails on: %s", name, problem)

    # -- telling -------------------------------------------------------------------------------------------------------

    def finish(self, spec_state: SpeculationState) -> None:
        for drafter in self._drafters.values():
            if drafter.remembers and not spec_state.context.params.cache:
                continue
            try:
                drafter.finish(spec_state.id, spec_state.context.tokens, spec_state.context.num_prompt)
            except Exception as error:
                self.report(drafter.name, f"{type(error).__name__}: {error}")

    def forget(self) -> None:
        """Drop what drafters remember of requests that are over."""
        for drafter in self._drafters.values():
            drafter.forget()
