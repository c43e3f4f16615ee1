"""Prompts with bits that depend on nothing but the prompt: whatever runs beside them, and however they are cut.

A row's sums must not depend on the number of rows. cuBLAS sums along K in one order, 16 numbers at a time, unless it
splits K, which it does where rows are few and K is long. `invariant_rows` finds from how many rows on it does not;
fewer are padded with rows that see and write nothing. Attention runs in tiles of one shape over blocks of keys that
start at entry 0 (`prompt_shape`), and the head of a recording has MAX_HEAD_ROWS rows. Forwards of up to 2,048 rows are
recorded: launching them one by one takes the host longer than the device. Knows no request.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.core import KV, HostBatch, TokenBatch
from forerun.models.cuda.attention import PagedAttention
from forerun.models.cuda.launch import record
from forerun.models.cuda.packing import lay_pages
from forerun.models.cuda.paged import QueryPlan
from forerun.models.decoder import Decoder, Output, Taps

PROBED_ROWS = (128, 160, 192, 224, 256, 288, 320, 352, 384, 448, 512, 640, 768, 1000, 1024, 1500)
REFERENCE_ROWS = 2048
MAX_HEAD_ROWS = 64  # of a recording: whatever the number of sequences, as one may want them all
RECORDED_ROWS = (512, 1024, 2048)  # and the fewest that are invariant
RECORDED_SEQS = (1, 64)


@torch.inference_mode()
def invariant_rows(decoder: Decoder) -> int:
    """The fewest rows of PROBED_ROWS from which on all products of a layer give a row the same bits."""
    layer = decoder.layers[0]
    products: list[tuple[int, Callable[[Tensor], Tensor]]] = [
        (layer.qkv.in_features, lambda x: layer.qkv(x)),
        (layer.o.in_features, lambda x: layer.o(x, add=residual[: len(x)])),
        (layer.gate_up.in_features, lambda x: layer.gate_up.gated(x, decoder.config.activation)),
        (layer.down.in_features, lambda x: layer.down(x, add=residual[: len(x)])),
    ]
    draw = torch.Generator(decoder.device).manual_seed(1)

    def random(width: int) -> Tensor:
        x = torch.empty(REFERENCE_ROWS, width, dtype=decoder.dtype, device=decoder.device)
        return x.normal_(generator=draw)

    residual = random(decoder.config.hidden_size)
    fewest = PROBED_ROWS[0]
    for width, product in products:
        x = random(width)
        whole = product(x)
        differ = [rows for rows in PROBED_ROWS if not torch.equal(product(x[:rows]), whole[:rows])]
        if not differ:
            continue
        if differ[-1] == PROBED_ROWS[-1]:
            warnings.warn("cuBLAS sums in an order that depends on the rows of a prompt", RuntimeWarning, stacklevel=2)
            continue
        fewest = max(fewest, next(rows for rows in PROBED_ROWS if rows > differ[-1]))
    return fewest


class PromptRunner:
    """Recorded forwards of prompts. `run` returns None for batches that none fits. `taps`: what they leave besides."""

    def __init__(
        self, decoder: Decoder, kv: KV, max_context: int, page_size: int, pool: Any, taps: Taps | None = None
    ) -> None:
        self._taps = taps
        self._decoder, self._kv, self._page_size, self._pool = decoder, kv, page_size, pool
        self.min_rows = invariant_rows(decoder)
        self._max_pages = -(-max_context // page_size)
        self._rows = (self.min_rows, *(rows for rows in RECORDED_ROWS if rows > self.min_rows))
        size = 4 * self._rows[-1] + RECORDED_SEQS[-1] + 4 + MAX_HEAD_ROWS + self._max_pages * RECORDED_SEQS[-1]
        self._staging = torch.zeros(size, dtype=torch.int32).pin_memory()
        self._host = self._staging.numpy()
        self._inputs = torch.zeros(size, dtype=torch.int32, device=decoder.device)
        self._sent = torch.cuda.Event()
        self._recordings: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        shape = (self._rows[-1], decoder.config.hidden_size)
        self._states = {
            depth: torch.zeros(shape, dtype=decoder.dtype, device=decoder.device)
            for depth in sorted(taps.hidden if taps else ())
        }

    def run(self, batch: HostBatch) -> Output | None:
        """The logits are overwritten by the next run."""
        rows = next((rows for rows in self._rows if rows >= len(batch.tokens)), None)
        seqs = next((seqs for seqs in RECORDED_SEQS if seqs >= len(batch.pages)), None)
        wanted, longest = len(batch.logits_indices), max(batch.seq_lens)
        if rows is None or seqs is None or wanted > MAX_HEAD_ROWS or longest > self._max_pages * self._page_size:
            return None
        if (rows, seqs) not in self._recordings:
            self._recordings[rows, seqs] = self._record(rows, seqs)
        self._send(batch, rows, seqs)
        graph, logits = self._recordings[rows, seqs]
        graph.replay()
        return Output(logits[:wanted], hidden={d: state[: len(batch.tokens)] for d, state in self._states.items()})

    def prepare(self) -> None:
        """Record all, so that no prompt waits for it."""
        longest = self._max_pages * self._page_size
        for rows in self._rows:
            for seqs in RECORDED_SEQS:
                if rows == self._rows[0] or rows <= longest * seqs:
                    self._recordings[rows, seqs] = self._record(rows, seqs)

    def _places(self, rows: int, seqs: int) -> tuple[int, int, int]:
        """Where sequences' first tokens, the wanted rows and the pages lie."""
        wanted = 4 * rows + -(-(seqs + 1) // 4) * 4
        return 4 * rows, wanted, wanted + MAX_HEAD_ROWS

    def _send(self, batch: HostBatch, rows: int, seqs: int) -> None:
        self._sent.synchronize()  # what was laid out for the run before has been read
        host, count = self._host, len(batch.tokens)
        starts, wanted, pages = self._places(rows, seqs)
        parts = host[: 4 * rows].reshape(4, rows)
        parts[:, count:] = _IDLE
        parts[:, :count] = batch.tokens, batch.positions, batch.slot_mapping, batch.kv_lens
        host[starts:wanted] = count
        host[starts : starts + len(batch.cu_seqlens)] = batch.cu_seqlens
        host[wanted:pages] = 0
        host[wanted : wanted + len(batch.logits_indices)] = batch.logits_indices
        used = pages + lay_pages(batch, host[pages:], seqs, self._max_pages) * seqs
        self._inputs[:used].copy_(self._staging[:used], non_blocking=True)
        self._sent.record()

    def _record(self, rows: int, seqs: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        decoder, kv, inputs = self._decoder, self._kv, self._inputs
        attention, context = decoder.attention, self._max_pages * self._page_size
        assert isinstance(attention, PagedAttention)
        starts, wanted, pages = self._places(rows, seqs)
        tokens, positions, slot_mapping, kv_lens = inputs[: 4 * rows].view(4, rows)
        cu_seqlens = inputs[starts : starts + seqs + 1]
        batch = TokenBatch(
            *(tokens, positions, slot_mapping, kv_lens),
            inputs[pages : pages + self._max_pages * seqs].view(self._max_pages, seqs).T,
            [0] * seqs + [rows],
            [context] * seqs,
            self._page_size,
            inputs[wanted : wanted + MAX_HEAD_ROWS],
        )
        plan = QueryPlan(cu_seqlens, cu_seqlens[:-1], rows, 0, rows, context)

        def run() -> Tensor:
            attention.use(batch, plan, prompt=True)
            layers, left = range(decoder.config.num_layers), Output(tokens)
            x = decoder.run_layers(decoder.embed(tokens), batch, kv, layers, self._taps, left)
            for depth, state in left.hidden.items():
                self._states[depth][:rows].copy_(state)
            return decoder.logits(x.index_select(0, batch.logits_indices))

        inputs.zero_()
        inputs[: 4 * rows].view(4, rows).copy_(torch.from_numpy(np.repeat(_IDLE, rows, 1)))
        return record(run, self._pool)


_IDLE = np.array([[0], [0], [-1], [0]], dtype=np.int32)  # token, position, slot, entries seen by a row without a token
