"""Batches on their way to the device: laid out as `Batch` in stack_base.cu reads them, and sorted into graphs' buckets.

One copy brings all of a step to the device. Host-side only, apart from the buffer it is copied to; needs no Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from forerun.core import HostBatch
from forerun.models.execution.batch_split import MAX_LAUNCH_ROWS

MASK_BITS = 64
MAX_STEPS = 16  # of one launch
STAGING_BUFFERS = 16  # batches on their way to the device at once, at most: parts of two steps
# rows of sequences with one token each, or of one sequence
DECODE_ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 96, 128, 160, 192, 224, 256)
MAX_DECODE_ROWS = DECODE_ROW_BUCKETS[-1]  # of sequences with one token each
CONTEXT_BUCKETS = (1024, 4096, 16384, 1 << 30)  # entries of the longest sequence: lanes are launched for so many
MIXED_ROW_BUCKETS = (4, 8, 16, 32, 48, 64)  # rows of several sequences with several tokens
SEQ_BUCKETS = (4, 16, 64)
TOKEN_BUCKETS = (4, 16, 64)  # of a sequence among several


def _up(count: int, sizes: tuple[int, ...]) -> int:
    return next(size for size in sizes if size >= count)


@dataclass(frozen=True)
class Bucket:
    """What a graph is captured for: at most so many of each."""

    rows: int
    seqs: int
    few: int  # tokens of a sequence
    tree: bool
    shared: bool = False  # pages that sequences share are read for all of them at once
    context: int = CONTEXT_BUCKETS[-1]  # entries of a sequence

    @classmethod
    def of(cls, batch: HostBatch, shared: bool = False) -> Bucket | None:
        """The smallest bucket that holds a batch; fewer kinds where sequences differ, as each costs a capture."""
        rows, seqs, tree = len(batch.tokens), len(batch.pages), batch.bits is not None
        if rows > MAX_DECODE_ROWS or (rows > MAX_LAUNCH_ROWS and rows > seqs):
            return None
        few = max(end - start for start, end in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False))
        if few == 1:
            rows = _up(rows, DECODE_ROW_BUCKETS)
            return cls(rows, rows, 1, tree, shared, _up(max(batch.seq_lens), CONTEXT_BUCKETS))
        if seqs == 1:
            return cls(_up(rows, DECODE_ROW_BUCKETS), 1, _up(rows, DECODE_ROW_BUCKETS), tree)
        rows = _up(rows, MIXED_ROW_BUCKETS)
        return cls(rows, min(rows, _up(seqs, SEQ_BUCKETS)), min(rows, _up(few, TOKEN_BUCKETS)), tree, shared)


def layout(rows: int) -> np.dtype:
    """`Batch` in stack_base.cu for so many rows: the same fields in the same order, aligned as C aligns them."""
    per_row = ("tokens", "positions", "slot_mapping", "kv_lens", "room")
    return np.dtype(
        [
            *((name, np.int32) for name in ("rows", "seqs", "page_stride", "steps", "out", "chosen_at")),
            ("bits", np.uint64, (rows,)),
            *((name, np.int32, (rows,)) for name in per_row),
            ("cu_seqlens", np.int32, (rows + 1,)),
            ("least", np.float32, (MAX_STEPS,)),
        ],
        align=True,
    )


def masks_of(batch: HostBatch) -> tuple[bool, list[int] | None]:
    """(whether 64 bits are enough, what each token sees from entry `kv_lens` of its sequence on; None: nothing)."""
    if batch.bits is None or batch.tree_start is None:
        return True, None
    masks: list[int] = []
    for s, start in enumerate(batch.tree_start):
        for t in range(batch.cu_seqlens[s], batch.cu_seqlens[s + 1]):
            bits, ahead = batch.bits[t], start - int(batch.kv_lens[t])
            masks.append(bits << ahead if ahead >= 0 else bits >> -ahead)
    return all(mask < 1 << MASK_BITS for mask in masks), masks


def lay_pages(batch: HostBatch, tables: np.ndarray, stride: int, most: int) -> int:
    """Write page b of sequence s to tables[b * stride + s]; returns the longest's pages. Pages from `most` on, which
    no token can see, are left out."""
    widest = min(most, max(len(pages) for pages in batch.pages))
    if stride == 1:
        tables[:widest] = batch.pages[0][:widest]
        return widest
    rows = tables[: widest * stride].reshape(widest, stride)
    for s, pages in enumerate(batch.pages):
        rows[: len(pages), s] = pages[:widest]
    return widest


class _Staging:
    """One buffer on the host."""

    def __init__(self, kind: np.dtype, size: int, pinned: bool) -> None:
        self.memory = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
        self.address, host = self.memory.data_ptr(), self.memory.numpy()
        fields = host[: kind.itemsize].view(kind)
        self.field = {name: fields[name][0] if fields[name].ndim > 1 else fields[name] for name in kind.names or ()}
        self.tables = host[kind.itemsize :].view(np.int32)


class Packed:
    """Buffers on the host, filled in turns, since some may still be read when the next batch is laid out, and their
    copy on the device: a `Batch`, then the pages, page by page of all sequences."""

    def __init__(self, kind: np.dtype, most_pages: int, max_context: int, page_size: int, device: torch.device) -> None:
        size = kind.itemsize + 4 * most_pages
        self._staging = [_Staging(kind, size, device.type == "cuda") for _ in range(STAGING_BUFFERS)]
        self._turn = 0
        self.device = torch.zeros(size, dtype=torch.uint8, device=device)
        self.head = kind.itemsize
        assert kind.fields is not None
        offset = kind.fields["tokens"][1]
        self.tokens = self.device[offset : offset + 4 * len(self.field["tokens"])].view(torch.int32)
        self.max_context, self.page_size = max_context, page_size

    @property
    def field(self) -> dict[str, np.ndarray]:
        """Of the buffer that was filled last."""
        return self._staging[self._turn].field

    @property
    def host_address(self) -> int:
        return self._staging[self._turn].address

    def fill(
        self,
        batch: HostBatch,
        masks: list[int] | None,
        steps: int,
        least: Sequence[float] = (),
        out: int = 0,
        chosen_at: int = 0,
    ) -> int:
        """Lay a batch out; returns how many bytes of the buffer it takes. `out`, `chosen_at`: where the tokens chosen
        go, on the host and on the device."""
        self._turn = (self._turn + 1) % STAGING_BUFFERS
        field, count, seqs = self.field, len(batch.tokens), len(batch.pages)
        field["rows"][0], field["seqs"][0], field["page_stride"][0], field["steps"][0] = count, seqs, seqs, steps
        field["out"][0], field["chosen_at"][0] = out, chosen_at
        field["bits"][:count] = 0 if masks is None else np.array(masks, dtype=np.uint64)
        field["tokens"][:count] = batch.tokens
        field["positions"][:count] = batch.positions
        field["slot_mapping"][:count] = batch.slot_mapping
        field["kv_lens"][:count] = batch.kv_lens
        field["cu_seqlens"][: seqs + 1] = batch.cu_seqlens
        widest = lay_pages(batch, self._staging[self._turn].tables, seqs, -(-self.max_context // self.page_size))
        if steps > 1:
            room = [min(len(pages) * self.page_size, self.max_context) for pages in batch.pages]
            field["room"][:seqs] = room
            field["least"][:] = 0
            field["least"][: len(least)] = least
        return self.head + 4 * widest * seqs
