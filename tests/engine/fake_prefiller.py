"""A prefiller for engine tests: writes K/V of known quality in a few units of work, without maps or profiles."""

from __future__ import annotations

from typing import Any

import torch

from forerun.core import PrefillReport
from forerun.decode.draft_context import DraftContext
from forerun.errors import BadRequest, ForerunError
from forerun.models.execution.runner import Span
from forerun.params import Prefill
from forerun.prefill.state import PrefillStage, PrefillState
from forerun_research.studies.prefill_score import EveryPromptPays

TAIL = 8
UNIT = 24  # tokens a unit of work drafts


class FakePrefiller:
    """`bad`: how far drafted K/V is from the truth. `exact_from`: give up and leave it to exact prefill once so many
    tokens are drafted. `fails_at`: raise then. `ahead`: run the tail, too, as a device does in its own pass."""

    text_index = None
    name = "fake"
    kl: float | None = None  # that is expected of its drafts

    def __init__(
        self,
        ctx: DraftContext,
        bad: float = 0.0,
        exact_from: int | None = None,
        fails_at: int | None = None,
        ahead: bool = False,
    ) -> None:
        self.ahead, self.forecast = ahead, EveryPromptPays()
        self.runner, self.bad, self.exact_from, self.fails_at = ctx.runner, bad, exact_from, fails_at
        self.open_states: dict[int, PrefillState] = {}
        self.opened: list[PrefillState] = []
        self.generator = torch.Generator().manual_seed(1)

    def max_shown(self, report: PrefillReport, limit: int) -> int:
        return limit

    def expected_kl(self, report: PrefillReport) -> float | None:
        return self.kl

    def problem(self, settings: Prefill, num_tokens: int) -> ForerunError | None:
        if settings.source == "impossible":
            return BadRequest("the source of prefill is 'impossible'", "use another")
        return None

    def has_source(self, settings: Prefill) -> bool:
        return True

    def source(self, settings: Prefill) -> object:
        return self

    def agreement(self, source: str) -> float:
        return 1.0

    def key(self, settings: Prefill) -> str:
        return f"fake {settings.source}"

    def open(self, state: PrefillState) -> PrefillState:
        state.keep_tail(TAIL)
        state.read = max(state.first, state.known)
        if len(state.tokens) - state.first < 2 * TAIL:
            state.stage, state.report.fell_back = PrefillStage.EXACT, "too short"
        state.opened = True
        self.open_states[state.id] = state
        self.opened.append(state)
        return state

    def advance(self, state: PrefillState, budget: int) -> int:
        assert not state.finished and budget >= 1 and state.id in self.open_states
        count = min(UNIT, budget, state.end - state.read)
        if count:
            self._write(state, count)
        done = state.read - state.first
        if self.fails_at is not None and done >= self.fails_at:
            raise BadRequest("the source failed", "use another")
        if self.exact_from is not None and done >= self.exact_from:
            state.stage, state.report.fell_back = PrefillStage.EXACT, "checks failed"
        elif state.read >= state.end:
            state.stage = PrefillStage.DONE
            state.report.drafted = state.end - state.first
            if self.ahead:
                tail = state.ids[state.end :].tolist()
                out = self.runner.forward([Span(tail, state.end, state.pages, range(len(tail) - 1, len(tail)))])
                state.filled, state.logits = len(state.tokens) - 1, out.logits.clone()
        return max(1, count)

    def _write(self, state: PrefillState, count: int) -> None:
        """The true K/V, then noise on it."""
        lo, hi, size = state.read, state.read + count, self.runner.pool.page_size
        self.runner.forward([Span(state.ids[lo:hi].tolist(), lo, state.pages, ())])
        if self.bad:
            slots = torch.tensor([state.pages[e // size] * size + e % size for e in range(lo, hi)])
            for layer in self.runner.kv:
                for cache in layer:
                    cache[slots] += self.bad * torch.randn(cache[slots].shape, generator=self.generator)
        state.read = hi
        state.depths[lo:hi] = 1

    def close(self, state: PrefillState) -> None:
        del self.open_states[state.id]
        state.close()


def fake(**values: Any) -> Any:
    """What an engine takes as `prefiller`."""
    return lambda ctx: FakePrefiller(ctx, **values)
