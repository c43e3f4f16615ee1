"""A pass of many rows of one sequence through all layers, recorded: for recomputing chosen tokens of a prompt.

Rows leave their K/V, so in the last layer they only write it; the last row goes on to its logits. Of a few others, the
picks, the inputs and queries of all layers but the last are kept. One recording for each of some numbers of rows; rows
without a token see nothing and write nothing. Knows slots and pages; not why rows are run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.core import KV, HostBatch, TokenBatch
from forerun.models.cuda.attention import PagedAttention
from forerun.models.cuda.launch import record
from forerun.models.cuda.packing import lay_pages
from forerun.models.cuda.paged import QueryPlan
from forerun.models.decoder import Decoder, RecomputePass
from forerun.models.execution.batch_split import MAX_DECODE_TOKENS

# rows of a recording: idle ones cost as much as others
RECORDED_ROWS = (*range(128, 1024, 64), *range(1024, 2049, 128))
NUM_BOUNDS = 4  # numbers: where rows begin and end, the last of them, and one that keeps what follows aligned
MAX_PICKS = 64  # rows of a pass whose inputs and queries are kept


@dataclass(frozen=True)
class _Recording:
    graph: torch.cuda.CUDAGraph
    left: RecomputePass  # of MAX_PICKS rows


class RecomputeRunner:
    """One decoder's passes on one plane of K/V. All of them share their input and their memory."""

    most = RECORDED_ROWS[-1]

    def __init__(self, decoder: Decoder, kv: KV, max_context: int, page_size: int, pool: Any) -> None:
        self._decoder, self._kv, self._page_size, self._pool = decoder, kv, page_size, pool
        self._max_pages = -(-max_context // page_size)
        size = 4 * self.most + NUM_BOUNDS + MAX_PICKS + self._max_pages
        self._staging = torch.zeros(size, dtype=torch.int32).pin_memory()
        self._host = self._staging.numpy()
        self._inputs = torch.zeros(size, dtype=torch.int32, device=decoder.device)
        # where a single row begins and ends, and its cell: held, since recordings keep addresses only
        self._single = torch.tensor([0, 1, 0], dtype=torch.int32, device=decoder.device)
        self._sent = torch.cuda.Event()
        self._recordings: dict[int, _Recording] = {}

    def run(self, batch: HostBatch, picks: np.ndarray) -> RecomputePass | None:
        """None for batches that no recording fits. What it returns is overwritten by the next pass."""
        count = len(batch.tokens)
        fits = (
            MAX_DECODE_TOKENS < count <= self.most
            and len(batch.pages) == 1
            and batch.bits is None
            and len(self._kv) > 1
        )
        if not fits or len(picks) > MAX_PICKS or batch.seq_lens[0] > self._max_pages * self._page_size:
            return None
        rows = next(size for size in RECORDED_ROWS if size >= count)
        if rows not in self._recordings:
            self._recordings[rows] = self._record(rows)
        self._send(batch, picks, rows)
        recording = self._recordings[rows]
        recording.graph.replay()
        left = recording.left
        return RecomputePass(left.x[:, : len(picks)], left.q[:, : len(picks)], left.logits)

    def prepare(self) -> None:
        """Record all sizes now, so that no prompt waits for it."""
        for rows in RECORDED_ROWS:
            if rows <= self._max_pages * self._page_size and rows not in self._recordings:
                self._recordings[rows] = self._record(rows)

    def _send(self, batch: HostBatch, picks: np.ndarray, rows: int) -> None:
        """As `_record` reads it: four numbers for each row, where the rows begin and end, the last of them, the picks,
        the pages."""
        self._sent.synchronize()  # what was laid out for the pass before has been read
        host, count = self._host, len(batch.tokens)
        parts = host[: 4 * rows].reshape(4, rows)
        parts[:, count:] = _IDLE
        parts[:, :count] = batch.tokens, batch.positions, batch.slot_mapping, batch.kv_lens
        host[4 * rows : 4 * rows + NUM_BOUNDS] = 0, count, count - 1, 0
        tail = 4 * rows + NUM_BOUNDS + MAX_PICKS
        host[tail - MAX_PICKS : tail] = 0
        host[tail - MAX_PICKS : tail - MAX_PICKS + len(picks)] = picks
        used = tail + lay_pages(batch, host[tail:], 1, self._max_pages)
        self._inputs[:used].copy_(self._staging[:used], non_blocking=True)
        self._sent.record()

    def _record(self, rows: int) -> _Recording:
        decoder, kv, inputs = self._decoder, self._kv, self._inputs
        attention, context = decoder.attention, self._max_pages * self._page_size
        assert isinstance(attention, PagedAttention)
        parts, bounds = inputs[: 4 * rows].view(4, rows), inputs[4 * rows : 4 * rows + NUM_BOUNDS]
        starts, asked = bounds[:2], bounds[2:3]
        tail = 4 * rows + NUM_BOUNDS + MAX_PICKS
        picks, pages = inputs[tail - MAX_PICKS : tail], inputs[tail : tail + self._max_pages]
        plan, last = QueryPlan(starts, starts[:1], rows, 0, rows, context), decoder.config.num_layers - 1
        single = self._single
        single_plan = QueryPlan(single[:2], single[2:], 1, 1, 0, context)

        def use(parts: Tensor, plan: QueryPlan) -> TokenBatch:
            tokens, positions, slot_mapping, kv_lens = parts
            where, count = (pages[None], [0, parts.shape[1]], [context], self._page_size), single[:0]
            batch = TokenBatch(tokens, positions, slot_mapping, kv_lens, *where, count)
            attention.use(batch, plan)
            return batch

        def run() -> RecomputePass:
            kept: list[tuple[Tensor, Tensor]] = []

            def watch(layer: int, x: Tensor, q: Tensor | None, a: Tensor | None) -> None:
                if q is not None:
                    kept.append((x.index_select(0, picks), q.index_select(0, picks)))

            batch = use(parts, plan)
            x = decoder.run_layers(decoder.embed(batch.tokens), batch, kv, range(last), watch=watch)
            decoder.write_kv(x, last, kv)
            batch = use(parts.index_select(1, asked), single_plan)
            out = decoder.run_layers(x.index_select(0, asked), batch, kv, range(last, last + 1))
            return RecomputePass(
                torch.stack([x for x, _ in kept]), torch.stack([q for _, q in kept]), decoder.logits(out)
            )

        inputs.zero_()
        parts.copy_(torch.from_numpy(np.repeat(_IDLE, rows, 1)))
        return _Recording(*record(run, self._pool))


_IDLE = np.array([[0], [0], [-1], [0]], dtype=np.int32)  # token, position, slot, entries seen by a row without a token
