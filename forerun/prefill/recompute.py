"""Recomputing: passes of the target over some tokens of a prompt, each to its own depth, and the chosen ones in turn.

In a `RaggedDepthPass` tokens leave the batch as layers go up. A token of depth d has K/V of the target's own in layers
0 .. d; above them it keeps whatever lies in its pages; full depth is exact prefill. A `Recomputer` runs the tokens that
were chosen, in one pass where a device can, and shows check spans to a checker. Knows neither the source of the rest,
nor why a token was chosen or has its depth, nor what follows from a check.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from forerun.cache.pool import slots_of
from forerun.core import HostBatch, TokenBatch
from forerun.core.batch import send
from forerun.models.decoder import Decoder, RecomputePass, Watch
from forerun.models.execution.runner import Runner
from forerun.prefill.checks import Checker, CheckSpan, Scores

if TYPE_CHECKING:
    from forerun.prefill.plan import Policy
    from forerun.prefill.state import PrefillState


COPIED_BASE = 1  # K/V of layer 0 depends on no context: a copy of it is what the target would compute


@dataclass(eq=False)
class Rows:
    """Some tokens of one sequence, in the order of their entries, and how deep each of them goes."""

    ids: np.ndarray  # [R] int64
    entries: np.ndarray  # [R] int64, each larger than the one before
    pages: array[int]
    depths: np.ndarray  # [R]
    logits_indices: Sequence[int] = ()  # rows whose logits are wanted; they have full depth
    x: Tensor | None = None  # [R, hidden] inputs of layer `first` in the decoder's basis; None: embeddings, layer 0
    first: int = 0
    positions: np.ndarray | None = None  # [R] rotary positions, where they are not the entries
    sent: Tensor | None = None  # [R] the ids on the device, where they are there already

    def __post_init__(self) -> None:
        self.ids, self.entries = (np.ascontiguousarray(a, dtype=np.int64) for a in (self.ids, self.entries))
        self.depths = np.asarray(self.depths)
        given = self.entries if self.positions is None else self.positions
        self.positions = np.ascontiguousarray(given, dtype=np.int64)
        assert len(self.ids) == len(self.entries) == len(self.depths) == len(self.positions)
        assert len(self.entries) == 0 or (self.entries[0] >= 0 and (np.diff(self.entries) > 0).all())
        assert (self.x is None) == (self.first == 0), "inputs of a layer come with the layer's number"
        assert self.x is None or self.x.shape[0] == len(self.ids)

    def whole(self, layer: int, layers: int, keep: int | None = None) -> np.ndarray:
        """[R] which rows run this layer whole; the others of depth layer + 1 only leave their K/V."""
        whole = self.depths > layer + 1
        if keep == layer + 1:
            whole |= self.depths >= keep
        if layer + 1 == layers:
            whole[list(self.logits_indices)] = True
        return whole


@dataclass
class RecomputeOutput:
    """What a pass gives beside the K/V that it wrote."""

    logits: Tensor  # [N, V] float32, for rows.logits_indices
    x: Tensor | None = None  # [K, hidden] inputs of layer `keep`, in the decoder's basis
    kept: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # [K] the rows that reached it
    token_layers: int = 0  # (row, layer) pairs that ran whole
    taps: dict[int, Tensor] = field(default_factory=dict)  # layer -> its inputs [rows, hidden], in the decoder's basis


class RaggedDepthPass:
    """Runs rows through one runner's decoder, each as far as its depth goes.

    The last layer of a row without wanted logits is its K/V alone, as is the last one below any row's depth:
    nothing reads what would come out of it.
    """

    def __init__(self, runner: Runner, decoder: Decoder | None = None) -> None:
        """`decoder`: whose layers run in place of those of the runner's own decoder, which it shares all else with."""
        self._runner, self._layers = runner, runner.decoder.config.num_layers
        self._decoder = runner.decoder if decoder is None else decoder

    @torch.inference_mode()
    def run(
        self, rows: Rows, watch: Watch | None = None, keep: int | None = None, taps: Sequence[int] = ()
    ) -> RecomputeOutput:
        """`watch` sees in layer i the rows `rows.whole(i, layers, keep)`; `keep`: return inputs of this layer. `taps`:
        and of these, of all rows that reach them; a decoder that runs several layers at once does so between them."""
        self._check(rows, keep)
        decoder, kv, count = self._decoder, self._runner.kv, self._layers
        plan = _RowBatch(self._runner, decoder, rows)
        alive = np.flatnonzero(rows.depths >= rows.first)  # whose inputs of the current layer are in x
        x = self._inputs(rows, alive)  # [len(alive), hidden]
        result = RecomputeOutput(torch.empty(0, decoder.config.vocab_size, device=decoder.device))
        i = rows.first
        while i < count and len(alive):
            if i == keep:
                result.x, result.kept = x, alive
            if i in taps:
                result.taps[i] = x
            whole = rows.whole(i, count, keep)[alive]
            leaving = (rows.depths[alive] > i) & ~whole
            if leaving.any():  # before the others, which attend to these
                plan.use(alive[leaving], attend=False)
                decoder.write_kv(_pick(x, leaving), i, kv)
            x, alive = _pick(x, whole), alive[whole]
            end = self._together(rows, alive, i, keep, taps)
            if len(alive):
                x = decoder.run_layers(x, plan.use(alive, attend=True), kv, range(i, end), watch=watch)
            result.token_layers += len(alive) * (end - i)
            i = end
        if keep is not None and result.x is None:
            result.x, result.kept = x, alive
        if len(rows.logits_indices):
            at = send(np.searchsorted(alive, np.asarray(rows.logits_indices)), decoder.device)
            result.logits = decoder.logits(x.index_select(0, at))
        return result

    @torch.inference_mode()
    def at_once(self, rows: Rows, picks: np.ndarray) -> RecomputePass | None:
        """Rows of full depth through all layers, as a device does it that needs the host only to begin: what the picks
        among them saw, until the next such pass. None where no device does, or where not all go all the way."""
        if not 0 < len(rows.ids) <= self._runner.max_recompute_rows or rows.first or len(rows.logits_indices):
            return None
        if not (rows.depths == self._layers).all():
            return None
        batch = _RowBatch(self._runner, self._decoder, rows).batch(np.arange(len(rows.ids)), attend=True)
        return self._runner.recompute(batch, picks)

    def _together(self, rows: Rows, alive: np.ndarray, first: int, keep: int | None, taps: Sequence[int]) -> int:
        """The layer before which none of these rows leaves and no inputs are kept: up to it they run in
        one go, because every stop in between costs the host more than a small layer takes."""
        end, least = first + 1, rows.depths[alive].min(initial=self._layers)
        while end < self._layers and end != keep and end not in taps:
            if least <= end + 1 and not rows.whole(end, self._layers, keep)[alive].all():
                break
            end += 1
        return end

    def _check(self, rows: Rows, keep: int | None) -> None:
        depths = rows.depths
        assert not len(depths) or (depths.min() >= 0 and depths.max() <= self._layers), "depths beyond the layers"
        assert all(depths[r] == self._layers for r in rows.logits_indices), "logits need full depth"
        assert 0 <= rows.first < self._layers
        assert keep is None or rows.first <= keep <= self._layers

    def _inputs(self, rows: Rows, alive: np.ndarray) -> Tensor:
        decoder = self._runner.decoder
        if rows.x is None:
            there = rows.sent if len(alive) == len(rows.ids) else None
            return decoder.embed(send(rows.ids[alive], decoder.device) if there is None else there)
        return _pick(rows.x, rows.depths >= rows.first)


class _RowBatch:
    """Which of the rows the attention backend is set up for; it is set up anew only where they change."""

    def __init__(self, runner: Runner, decoder: Decoder, rows: Rows) -> None:
        self._runner, self._decoder, self._rows = runner, decoder, rows
        size = runner.pool.page_size
        self._pages = np.array(rows.pages, dtype=np.int32)  # a copy: the list may grow while a plan is kept
        if len(rows.entries) and rows.entries[-1] - rows.entries[0] == len(rows.entries) - 1:  # one after the other
            self._slots = slots_of(rows.pages, int(rows.entries[0]), int(rows.entries[-1]) + 1, size)
        else:
            self._slots = self._pages[rows.entries // size].astype(np.int64) * size + rows.entries % size
        self._planned = np.zeros(0, dtype=np.int64)
        self._batch: TokenBatch | None = None

    def use(self, index: np.ndarray, attend: bool) -> TokenBatch:
        """A batch of these rows, planned; without `attend` it may be good for writing K/V only."""
        if self._batch is None or not np.array_equal(self._planned, index):
            # rows that only write are gone afterwards, so no later call asks for the same ones to attend
            self._batch, self._planned = self.batch(index, attend).to(self._decoder.device), index
            self._decoder.attention.plan(self._batch)
        return self._batch

    def batch(self, index: np.ndarray, attend: bool) -> HostBatch:
        rows, size = self._rows, self._runner.pool.page_size
        assert rows.positions is not None
        # rows that only write K/V do not attend: one entry seen is the least to plan, masks of a long context are not
        own = slice(None) if len(index) == len(rows.ids) else index  # all of them need no copies
        seen = (rows.entries[own] + 1).astype(np.int32) if attend else np.ones(len(index), dtype=np.int32)
        context = int(seen[-1])
        return HostBatch(
            tokens=rows.ids[own],
            positions=rows.positions[own],
            slot_mapping=self._slots[own],
            kv_lens=seen,
            cu_seqlens=[0, len(index)],
            seq_lens=[context],
            pages=[self._pages[: -(-context // size)]],
            page_size=size,
            logits_indices=[],
        )


def _pick(x: Tensor, mask: np.ndarray) -> Tensor:
    """The rows of x that a mask names; x itself where that is all of them."""
    if mask.all():
        return x
    return x.index_select(0, send(np.flatnonzero(mask), x.device))


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
            self._step_by_step(state, entries, int(layers[0]), checker, last and len(entries) == len(layers))
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

    def _step_by_step(
        self, state: PrefillState, entries: np.ndarray, first: int, checker: Checker | None, last: bool
    ) -> None:
        """From layer `first` on, the tail with the `last` ones. Where more is to be seen of the tail than what follows
        it, it is left to the engine, or runs once more, if it ran before."""
        x, state.filled, state.logits, state.tail_ran = None, state.end, None, False
        running, wanted = entries, range(0)
        if last and self._ends_with_tail(state, first):
            running = np.concatenate((entries, np.arange(state.end, len(state.tokens))))
            wanted = range(len(running) - 1, len(running))
        watch: Watch | None = None if checker is None else checker.watch(running)
        if first:
            assert state.x is not None
            x = state.x.index_select(0, send(running - state.first, state.x.device))
        depths = np.full(len(running), state.layers)
        rows = Rows(state.ids[running], running, state.pages, depths, wanted, x=x, first=first)
        logits = self._ragged_pass.run(rows, watch).logits
        if len(wanted):
            state.filled, state.logits, state.tail_ran = len(state.tokens) - 1, logits, True
            state.spent += state.costs.tail * (1.0 - first / state.layers)
            state.report.token_layers += int(state.costs.tail) * (state.layers - first)

    def _ends_with_tail(self, state: PrefillState, first: int) -> bool:
        """Whether the tail can run from layer `first` on, no rounds are compared by it and no drafter or other engine
        runs it itself."""
        kept = 0 if state.x is None else state.x.shape[0]
        there = not first or state.first + kept == len(state.tokens)
        wanted = self._policy.runs_tail and self._runner.features is None
        return there and wanted and state.tail_logits is None

    def warm_up(self, base: int, copied: int) -> None:
        """Let a device record passes and checks, which the first prompts would wait for; `base` as prompts will have
        it, `copied`: check spans of prompts whose K/V is copied. Needs a few free pages."""
        policy, pool = self._policy, self._runner.pool
        entries = np.arange(policy.first + max(policy.spans, copied) * policy.span + policy.tail)
        if not self._runner.max_recompute_rows or pool.pages_for(len(entries)) > pool.free:
            return
        self._runner.prepare_recompute()
        starts = range(policy.first, policy.first + max(policy.spans, copied) * policy.span, policy.span)
        spans = [CheckSpan(start, policy.span, 0, 0) for start in starts]
        with pool.borrow(len(entries)) as pages:
            for count, layer, whole in ((policy.spans, base, True), (copied, COPIED_BASE, False)):
                checker = Checker(self._runner, pages, spans[:count], layer, policy.first, whole)
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
