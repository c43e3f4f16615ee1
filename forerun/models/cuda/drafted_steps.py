"""Drafted steps that follow each other without the host: draft, tree, verification, acceptance in one recorded launch.

A step with a draft in one forward takes the device 2 ms beside a large model, and the host as long again: trees,
batches and accepted paths are Python's, and the device waits for them. Here small kernels do that between the two
forwards (drafted_steps.cu), each step begins where the one before it ended, and the host reads a step's tokens while
the next one runs. For greedy answers of a few sequences. Knows slots and tokens; no request, and not whether it pays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.core.drafted import MAX_DRAFTED_SEQUENCES, DraftedStart, rows_of
from forerun.models.cuda import nvrtc
from forerun.models.cuda.drafted_layout import (
    CHILDREN,
    MAX_ROWS,
    RESULT_SIZE,
    RING,
    Params,
    macros,
    page_table,
    source_text,
    start_state,
    state_layout,
)
from forerun.models.cuda.graphs import WAITED_CHOSEN_AT, GraphRunner
from forerun.models.cuda.launch import record
from forerun.models.cuda.most_probable import most_probable
from forerun.models.cuda.pending import PendingStep
from forerun.models.cuda.stack import KERNEL_ROWS, Stack

THREADS = 256


class _Pinned:
    """Memory of the host that the device may still read when the next content is written: buffers in turns."""

    def __init__(self, size: int) -> None:
        self._buffers = [torch.zeros(size, dtype=torch.int32).pin_memory() for _ in range(RING)]
        self._turn = 0

    def send(self, content: np.ndarray, target: Tensor) -> None:
        """Enqueue a copy of int32 numbers to the beginning of the target."""
        self._turn = (self._turn + 1) % RING
        buffer, size = self._buffers[self._turn], content.size
        buffer.numpy()[:size] = content
        nvrtc.copy_to_device(target.data_ptr(), buffer.data_ptr(), 4 * size)


class _Recorded:
    """The launches of one step, where the models' launches have so many rows."""

    def __init__(
        self, target: Stack, draft: Stack, params: Params, vocab: int, caches: int, sizes: dict[str, int], pool: Any
    ) -> None:
        code = nvrtc.compile_source(source_text(), tuple(f"-D{name}={size}" for name, size in sizes.items()))
        params.draft, params.verified = draft.packed.device.data_ptr(), target.packed.device.data_ptr()
        params.chosen = target.chosen.data_ptr()
        grids = {"lay_draft": 1, "lay_tree": 1, "accept": 1, "move_accepted": caches}
        kernels = {name: nvrtc.Kernel(code, name, grid, THREADS, 0).prepare(params) for name, grid in grids.items()}
        assert draft.logits is not None
        logits = draft.logits[:, :vocab]

        def step() -> Tensor:
            kernels["lay_draft"]()
            draft.launch()
            ranked = most_probable(logits, CHILDREN)
            params.ranked = ranked.data_ptr()
            kernels["lay_tree"]()
            target.launch()
            kernels["accept"]()
            kernels["move_accepted"]()
            return ranked

        self._kept = params, kernels
        self.graph, self._ranked = record(step, pool)


class DraftedSteps:
    """`can_run` says whether there can be any. `mask`: the token that stands for those to come; `vocab`: tokens that
    may be drafted; `least`: probability of a path below which nothing is added to a tree."""

    def __init__(self, target: GraphRunner, draft: GraphRunner, mask: int, vocab: int, least: float) -> None:
        self._target, self._draft, self._mask, self._vocab, self._least = target, draft, mask, vocab, least
        self._max_pages, device, kind = min(target.max_pages, draft.max_pages), target.decoder.device, state_layout()
        self._state = torch.zeros(kind.itemsize // 4, dtype=torch.int32, device=device)
        self._pages = torch.zeros(MAX_DRAFTED_SEQUENCES * (1 + self._max_pages), dtype=torch.int32, device=device)
        self._state_out, self._pages_out = _Pinned(len(self._state)), _Pinned(len(self._pages))
        self._results = torch.zeros(RING, MAX_DRAFTED_SEQUENCES, RESULT_SIZE, dtype=torch.int32).pin_memory()
        caches = [cache.data_ptr() for layer in target.kv for cache in layer]
        self._caches = torch.tensor(caches, dtype=torch.int64, device=device)
        self._recorded: dict[int, _Recorded] = {}  # by rows of the models' launches
        self._rows, self._sequences, self._step = 0, 0, 0

    @staticmethod
    def can_run(target: GraphRunner, draft: GraphRunner) -> bool:
        """Whether both models run as one launch that looks tokens up by itself, without hidden states being read, and
        the target gives a row the same bits whatever is drafted beside it."""
        if target.taps is not None or draft.taps is not None or target.batch_invariant is False:
            return False
        slot = target.kv[0][0][0].nbytes
        stacks = [each.launch_stack(rows) for each in (target, draft) for rows in KERNEL_ROWS]
        whole = slot % 16 == 0 and slot // 16 <= THREADS
        return whole and all(stack is not None and stack.looks_up for stack in stacks)

    def prepare(self) -> None:
        """Compile and record now what the first steps would."""
        for rows in KERNEL_ROWS:
            self._record(rows)

    def begin(self, starts: Sequence[DraftedStart], depth: int, nodes: int) -> None:
        """What the first step starts from; nothing is on its way. `depth`: positions that a step drafts; `nodes` of a
        tree: at most."""
        if not 1 <= len(starts) <= MAX_DRAFTED_SEQUENCES:
            raise ValueError(f"{len(starts)} sequences, 1 to {MAX_DRAFTED_SEQUENCES} are possible")
        each = rows_of(len(starts))
        rows = next(rows for rows in KERNEL_ROWS if rows >= len(starts) * each)
        self._record(rows)
        self._send_start(starts, each, depth, nodes)
        self._rows, self._sequences, self._step = rows, len(starts), 0

    def _send_start(self, starts: Sequence[DraftedStart], rows: int, depth: int, nodes: int) -> None:
        self._state_out.send(start_state(starts, rows, depth, nodes), self._state)
        self.send_pages([start.pages for start in starts])

    def send_pages(self, pages: Sequence[Sequence[int]]) -> None:
        """The pages of each sequence, for the steps that are launched from now on."""
        self._pages_out.send(page_table(pages, self._max_pages), self._pages)

    def launch(self) -> PendingStep:
        """Enqueue a step; at most two may be on their way."""
        self._recorded[self._rows].graph.replay()
        results = self._results[self._step % RING, : self._sequences].numpy()
        self._step += 1
        done = torch.cuda.Event()
        done.record()
        return PendingStep(done, results)

    def _record(self, rows: int) -> None:
        if rows in self._recorded:
            return
        self._send_start([DraftedStart(1, [0], [])], rows_of(1), 1, 1)  # what is recorded runs: its K/V goes nowhere
        target, draft = (each.launch_stack(rows) for each in (self._target, self._draft))
        slot = self._target.kv[0][0][0].nbytes // 16
        params = Params(
            state=self._state.data_ptr(), pages=self._pages.data_ptr(), results=self._results.data_ptr(),
            caches=self._caches.data_ptr(), pieces=slot, mask=self._mask,
            draft_chosen_at=WAITED_CHOSEN_AT, chosen_at=WAITED_CHOSEN_AT, least=self._least,
        )  # fmt: skip
        sizes = macros(rows, self._target.page_size, self._max_pages, -(-MAX_ROWS // (THREADS // slot)))
        assert target is not None and draft is not None
        pool, caches = self._target.graph_memory, len(self._caches)
        self._recorded[rows] = _Recorded(target, draft, params, self._vocab, caches, sizes, pool)
