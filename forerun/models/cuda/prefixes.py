"""Which sequences of a batch attend over shared pages together, laid out as the kernel in shared.py reads it.

A tile holds (token, head) pairs of one group of sequences; keys that tiles of single sequences would read again and
again are read once per tile of the group. What that saves is known beforehand, and only batches where it pays are
grouped. Host-side only, reads no page and needs no Triton.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from forerun.core import HostBatch
from forerun.models.config import ModelConfig
from forerun.models.execution.batch_split import MAX_DECODE_TOKENS
from forerun.models.execution.shared_prefix import MIN_SHARED_KEYS, find_groups

BLOCK_KEYS = 64  # shared keys come in whole blocks, so that blocks are cut where they would be cut without sharing
TILE_PAIRS = 32  # pairs of a tile, of a single sequence as of a group
GROUP_TILES = 2  # tiles of a group that one program runs over each block it loads
TILE_FIELDS = 5  # of a tile: first member, members, first pair, row of the tables, shared blocks

# Bytes of K and V that a layer must be spared for the extra launch to pay: against captured graphs, against single
# launches whose gaps hide some of it, and against the launch of the whole decoder, which has no launches at all.
MIN_GRAPH_SAVING_BYTES, MIN_LAUNCH_SAVING_BYTES, MIN_STACK_SAVING_BYTES = 24 << 20, 96 << 20, 96 << 20


@dataclass(frozen=True)
class Groups:
    tiles: np.ndarray  # [N, TILE_FIELDS] int32
    members: np.ndarray  # [M, 2] int32: token of the batch, and its place among tokens whose keys are cut
    blocks: np.ndarray  # [S] int32: blocks of a sequence that its group's tiles run; 0: it is in no group
    spared: int  # bytes of a layer's K and V that are not read again

    def lay(self, out: np.ndarray, seqs: int, rows: int) -> None:
        """Blocks, members and tiles one after the other, in zeroed int32 memory for so many sequences and rows."""
        out[: len(self.blocks)] = self.blocks
        out[seqs : seqs + self.members.size] = self.members.ravel()
        first = seqs + 2 * rows
        out[first : first + self.tiles.size] = self.tiles.ravel()


def most_tiles(rows: int, heads_per_kv: int) -> int:
    """Programs per KV head and lane that any groups of so many tokens need; a group has two tokens at least."""
    return -(-rows * heads_per_kv // (TILE_PAIRS * GROUP_TILES)) + rows // 2


def plan_shared(batch: HostBatch, config: ModelConfig, least: int) -> Groups | None:
    """The groups of a batch, or None where they would spare a layer fewer than `least` bytes."""
    key_bytes = 4 * config.kv_size  # K and V, two bytes a number
    if all(config.windows):
        return None
    if len(batch.pages) < 2 or sum(batch.seq_lens) * key_bytes < least:
        return None
    counts = [end - start for start, end in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False)]
    firsts = Counter(int(pages[0]) for pages in batch.pages)
    usable = [
        int(batch.kv_lens[start : start + count].min()) // batch.page_size
        if 0 < count <= MAX_DECODE_TOKENS and firsts[int(pages[0])] > 1
        else 0
        for start, count, pages in zip(batch.cu_seqlens, counts, batch.pages, strict=False)
    ]
    rows = [row for row, pages in enumerate(usable) if pages * batch.page_size >= MIN_SHARED_KEYS]
    if len(rows) < 2:
        return None
    tables = np.zeros((len(rows), max(usable[row] for row in rows)), dtype=np.int32)
    for at, row in enumerate(rows):
        tables[at, : usable[row]] = batch.pages[row][: usable[row]]
    found = find_groups(tables, [usable[row] for row in rows], -(-MIN_SHARED_KEYS // batch.page_size))
    groups = [(sorted(rows[at] for at in part), pages * batch.page_size // BLOCK_KEYS) for part, pages in found]
    return _lay_out(groups, batch.cu_seqlens, counts, config.num_heads // config.num_kv_heads, key_bytes, least)


def _lay_out(
    groups: list[tuple[list[int], int]],
    cu_seqlens: list[int],
    counts: list[int],
    heads_per_kv: int,
    key_bytes: int,
    least: int,
) -> Groups | None:
    cells = np.cumsum([0, *(count if count <= MAX_DECODE_TOKENS else 0 for count in counts)])
    blocks = np.zeros(len(counts), dtype=np.int32)
    members: list[tuple[int, int]] = []
    tiles: list[tuple[int, int, int, int, int]] = []
    spared = 0
    for rows, shared in groups:
        first = len(members)
        members += [(cu_seqlens[row] + i, int(cells[row]) + i) for row in rows for i in range(counts[row])]
        size = len(members) - first
        cuts = range(0, size * heads_per_kv, TILE_PAIRS * GROUP_TILES)
        tiles += [(first, size, cut, rows[0], shared) for cut in cuts]
        blocks[rows] = shared
        alone = sum(-(-counts[row] * heads_per_kv // TILE_PAIRS) for row in rows)
        spared += (alone - len(cuts)) * shared * BLOCK_KEYS * key_bytes
    if not tiles or spared < least:
        return None
    return Groups(np.array(tiles, dtype=np.int32), np.array(members, dtype=np.int32), blocks, spared)
