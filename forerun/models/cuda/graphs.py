"""Captured forwards: the whole model as one launch, for the batch shapes that decoding and verification repeat.

A graph keeps addresses and grids, so it is captured per bucket (sequences, tokens per sequence) on buffers of its own;
a step packs its batch into one pinned buffer, copies it, replays, and reads the greedy tokens. Other batches run as
usual. Up to 16 rows run as one launch of `Stack` where it fits the decoder, others kernel by kernel. Knows no
request.
"""

from __future__ import annotations

import warnings

import torch

from forerun.core import HostBatch, TokenBatch
from forerun.models.attention import KV
from forerun.models.cuda.attention import PagedAttention
from forerun.models.cuda.nvrtc import CompileError
from forerun.models.cuda.paged import QueryPlan
from forerun.models.cuda.stack import MAX_ROWS, Stack, fits
from forerun.models.decoder import Decoder, Output

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)


class _Graph:
    """One captured shape: `seqs` sequences of up to `few` tokens, `seqs * few` rows."""

    def __init__(
        self, decoder: Decoder, kv: KV, stack: Stack | None, seqs: int, few: int, max_pages: int, page_size: int
    ) -> None:
        self.seqs, self.few, rows = seqs, few, seqs * few
        self.stack = stack if rows <= MAX_ROWS else None
        self.rows = rows
        head = 4 * rows + seqs + 1  # tokens, positions, slots, seen, cu_q; then the tables, page by page
        size = head + max_pages * seqs
        self.staging = torch.zeros(size, dtype=torch.int32).pin_memory()
        self.host = self.staging.numpy()
        self.inputs = torch.zeros(size, dtype=torch.int32, device=decoder.device)
        parts = self.inputs[: 4 * rows].view(4, rows)
        self.head = head
        self.batch = TokenBatch(
            tokens=parts[0],
            positions=parts[1],
            slots=parts[2],
            seen=parts[3],
            tables=self.inputs[head:].view(max_pages, seqs).T,  # [S, P], the pages in use are a prefix of memory
            starts=[0, *range(few, rows + 1, few)],
            contexts=[max_pages * page_size] * seqs,
            page_size=page_size,
            want=torch.arange(rows, device=decoder.device),
        )
        self.plan = QueryPlan(self.inputs[4 * rows : head], few, 0, max_pages * page_size)
        self.greedy = torch.zeros(rows, dtype=torch.int64).pin_memory()
        self._fill_idle()
        self.inputs.copy_(self.staging)
        self._capture(decoder, kv)

    def _fill_idle(self) -> None:
        """Rows without a token keep nothing and see nothing."""
        rows = self.rows
        self.host[: 4 * rows] = 0
        self.host[2 * rows : 3 * rows] = -1
        self.host[4 * rows : self.head] = 0

    def _forward(self, decoder: Decoder, kv: KV) -> None:
        if self.stack is not None:
            b, x = self.batch, decoder.embed(self.batch.tokens)
            self.logits = torch.empty(self.rows, decoder.config.vocab_size, device=decoder.device)
            chosen = torch.empty(self.rows, dtype=torch.int64, device=decoder.device)
            self.stack.run(x, b.positions, b.slots, b.seen, self.plan.cu_q, b.tables, self.logits, chosen)
            self.greedy.copy_(chosen, non_blocking=True)
            return
        attention = decoder.attention
        assert isinstance(attention, PagedAttention)
        attention.use(self.batch, self.plan)
        x = decoder.run_layers(decoder.embed(self.batch.tokens), self.batch, kv, range(decoder.config.num_layers))
        self.logits = decoder.logits(x)
        self.greedy.copy_(self.logits.argmax(-1), non_blocking=True)

    @torch.inference_mode()
    def _capture(self, decoder: Decoder, kv: KV) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # compile and allocate before recording
                self._forward(decoder, kv)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._forward(decoder, kv)

    def replay(self, batch: HostBatch) -> None:
        count, rows, host = len(batch.tokens), self.rows, self.host
        self._fill_idle()
        host[:count] = batch.tokens
        host[rows : rows + count] = batch.entries
        host[2 * rows : 2 * rows + count] = batch.slots
        host[3 * rows : 3 * rows + count] = batch.entries + 1
        host[4 * rows : 4 * rows + len(batch.starts)] = batch.starts
        host[4 * rows + len(batch.starts) : self.head] = batch.starts[-1]  # empty sequences
        widest = max(len(pages) for pages in batch.pages)
        tables = host[self.head : self.head + widest * self.seqs].reshape(widest, self.seqs)
        for s, pages in enumerate(batch.pages):
            tables[: len(pages), s] = pages
        used = self.head + widest * self.seqs
        self.inputs[:used].copy_(self.staging[:used], non_blocking=True)
        self.graph.replay()


def _stack(decoder: Decoder, kv: KV, page_size: int) -> Stack | None:
    """The decoder as one launch, where it fits and can be compiled (a driver older than the compiler refuses it)."""
    if not fits(decoder, page_size):
        return None
    try:
        return Stack(decoder, kv, page_size)
    except CompileError as error:
        warnings.warn(f"decoding kernel by kernel, slower: {error}", RuntimeWarning, stacklevel=2)
        return None


class GraphRunner:
    """Chooses and captures graphs. `run` returns None for batches that no graph fits."""

    def __init__(self, decoder: Decoder, kv: KV, max_context: int, page_size: int) -> None:
        self.decoder, self.kv, self.page_size = decoder, kv, page_size
        self.max_pages = -(-max_context // page_size)
        self.stack = _stack(decoder, kv, page_size)
        self._graphs: dict[tuple[int, int], _Graph] = {}

    def run(self, batch: HostBatch) -> Output | None:
        shape = self._bucket(batch)
        if shape is None:
            return None
        if shape not in self._graphs:
            self._graphs[shape] = _Graph(self.decoder, self.kv, self.stack, *shape, self.max_pages, self.page_size)
        graph = self._graphs[shape]
        graph.replay(batch)
        torch.cuda.current_stream().synchronize()
        if batch.want == list(range(len(batch.tokens))):
            want: slice | list[int] = slice(len(batch.tokens))
        else:
            want = batch.want
        return Output(logits=graph.logits[want], greedy=graph.greedy[want])

    @staticmethod
    def _bucket(batch: HostBatch) -> tuple[int, int] | None:
        """(sequences, tokens each): pure decoding, or several tokens of one sequence."""
        seqs, tokens = len(batch.pages), len(batch.tokens)
        if tokens > BUCKETS[-1] or (seqs > 1 and tokens > seqs):
            return None
        size = next(b for b in BUCKETS if b >= tokens)
        return (1, size) if seqs == 1 else (size, 1)
