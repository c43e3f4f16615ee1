"""Runs a prompt's chosen tokens through the target, in one pass where a device can, and shows check spans to a checker.

Knows neither why tokens were chosen nor what follows from a check.
"""

from __future__ import annotations

import time

import numpy as np

from forerun.core.batch import send
from forerun.models.decoder import Watch
from forerun.models.execution.runner import Runner
from forerun.prefill.checks import Checker, Scores
from forerun.prefill.depth import RaggedDepthPass, Rows
from forerun.prefill.plan import CheckSpan, Policy
from forerun.prefill.state import PrefillState


class Recomputer:
    def __init__(self, runner: Runner, policy: Policy) -> None:
        self._runner, self._policy, self._ragged_pass = runner, policy, RaggedDepthPass(runner)

    @property
    def most(self) -> int:
        """Entries to run in one go, with room for the tail; 0: any number."""
        return max(0, self._runner.max_recompute_rows - self._policy.tail)

    def run(self, state: PrefillState, entries: np.ndarray, checker: Checker | None, last: bool = False) -> int:
        """As many of these entries, in order, as start in one layer; how many they were. Later ones see what earlier
        ones have become. After the `last` ones of a round the tail may run in the same pass."""
        start, layers = time.perf_counter(), state.costs.start(entries)
        entries = entries[: int(np.argmax(layers != layers[0])) or None]
        if layers[0] or not self._at_once(state, entries, checker, last and len(entries) == len(layers)):
            self._step_by_step(state, entries, int(layers[0]), checker)
        state.depths[entries] = state.layers
        state.report.token_layers += state.costs.token_layers(entries)
        state.report.recompute_s += time.perf_counter() - start
        return len(entries)

    def _at_once(self, state: PrefillState, entries: np.ndarray, checker: Checker | None, last: bool) -> bool:
        """One pass that a device does by itself; False where it cannot."""
        tail = np.arange(state.end, len(state.tokens)) if last else np.zeros(0, dtype=np.int64)
        running = np.concatenate((entries, tail))
        rows = Rows(state.ids[running], running, state.pages, np.full(len(running), state.layers))
        picks = np.zeros(0, np.int64) if checker is None else checker.among(entries)
        recompute = self._ragged_pass.at_once(rows, picks)
        if recompute is None:
            return False
        if checker is not None:
            checker.saw(recompute)
        state.tail_ran = False
        if last:
            state.filled, state.logits = len(state.tokens) - 1, recompute.logits.clone()
        return True

    def _step_by_step(self, state: PrefillState, entries: np.ndarray, first: int, checker: Checker | None) -> None:
        """From layer `first` on. The tail is left to the engine, or once more, if it ran before."""
        x, state.filled, state.logits, state.tail_ran = None, state.end, None, False
        if first:
            assert state.x is not None
            x = state.x.index_select(0, send(entries - state.first, state.x.device))
        rows = Rows(state.ids[entries], entries, state.pages, np.full(len(entries), state.layers), x=x, first=first)
        watch: Watch | None = None if checker is None else checker.watch(entries)
        self._ragged_pass.run(rows, watch)

    def warm_up(self, base: int) -> None:
        """Let a device record passes and checks, which the first prompts would wait for; `base` as prompts will have
        it. Needs a few free pages."""
        policy, pool = self._policy, self._runner.pool
        entries = np.arange(policy.first + policy.spans * policy.span + policy.tail)
        if not self._runner.max_recompute_rows or pool.pages_for(len(entries)) > pool.free:
            return
        self._runner.prepare_recompute()
        starts = range(policy.first, policy.first + policy.spans * policy.span, policy.span)
        spans = [CheckSpan(start, policy.span, 0, 0) for start in starts]
        with pool.borrow(len(entries)) as pages:
            checker = Checker(self._runner, pages, spans, base, policy.first)
            rows = Rows(np.zeros(len(entries)), entries, pages, np.full(len(entries), len(self._runner.kv)))
            recompute = self._ragged_pass.at_once(rows, checker.among(entries))
            if recompute is not None:
                checker.saw(recompute)
                checker.scores()
            self._runner.warmed_up()

    def first_check(self, state: PrefillState) -> tuple[Scores, np.ndarray]:
        """One check span at the end of what is read so far; its scores, and the entries that were recomputed for it."""
        size, end = self._policy.span, min(state.read, state.end)
        span = CheckSpan(end - size, size, state.first, end)
        sinks = np.arange(state.first, min(self._policy.first, state.end))  # every token attends to these
        checker = Checker(self._runner, state.pages, [span], state.source.base, min(self._policy.first, state.end))
        entries = todo = np.union1d(sinks, span.entries)
        while len(todo):
            todo = todo[self.run(state, todo, checker) :]
        return checker.scores(), entries
