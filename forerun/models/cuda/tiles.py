"""How the paged kernels cut their work: the shape of a tile, and into how many lanes the keys are dealt.

Where sequences have few new tokens, tiles and lanes depend on the model only, since bits are promised there. One
sequence with many gets smaller tiles and as many lanes as fill the chip, from numbers that a captured graph keeps: the
rows it has room for, the heads, the longest context. Host-side only, knows no kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from forerun.models.cuda.launch import cdiv, next_power_of_2
from forerun.models.cuda.prefixes import BLOCK_KEYS, TILE_PAIRS


@dataclass(frozen=True)
class Shape:
    """Rows (token, head pairs) and keys of a tile, and into how many lanes the keys of many new tokens are dealt."""

    rows: int
    keys: int
    warps: int
    stages: int
    lanes: int = 1  # a power of two; of sequences with few new tokens `lanes_for` says it


# of sequences with few new tokens, whose keys are always cut into lanes
DECODE_SHAPE = Shape(TILE_PAIRS, BLOCK_KEYS, 4, 2)
# The fastest of sweeps on one H200 (docs/log.md): of rows that fill the chip, of those of one sequence that do not, and
# of heads wider than 128, whose tiles would not fit into shared memory otherwise.
PREFILL_SHAPE = Shape(128, 128, 8, 2)
SHORT_PREFILL_SHAPE = Shape(64, 64, 4, 3)
WIDE_HEAD_SHAPE = Shape(64, 64, 4, 2)

TARGET_PROGRAMS = 960  # about as many are best: of 944 rows 4 lanes, of 1,800 rows 2 or 4
MAX_LANES = 16  # partial softmaxes are written and read again, D + 2 numbers a lane for each token and head
MIN_LANE_BLOCKS = 4  # of a lane, in the longest context: fewer are not worth what the lane leaves


def lanes_for(kv_heads: int) -> int:
    """Lanes that fill the chip with one sequence of few new tokens: about 128 programs over all KV heads."""
    return max(8, min(64, next_power_of_2(128 // kv_heads)))


@lru_cache(maxsize=1024)
def many_shape(rows: int, heads: int, kv_heads: int, dim: int, seqs: int, max_context: int) -> Shape:
    """Of sequences with many new tokens, at most `rows` each. Only a lone sequence is cut: it needs no cell table."""
    few, full = (SHORT_PREFILL_SHAPE, PREFILL_SHAPE) if dim <= 128 else (WIDE_HEAD_SHAPE, WIDE_HEAD_SHAPE)
    programs = cdiv(rows * (heads // kv_heads), few.rows) * kv_heads
    lanes = 2 ** max(0, round(math.log2(TARGET_PROGRAMS / programs)))
    if seqs > 1 or lanes == 1:
        return full
    worth = max(1, cdiv(max_context, few.keys) // MIN_LANE_BLOCKS)  # lanes with blocks enough
    return replace(few, lanes=min(lanes, MAX_LANES, 1 << worth.bit_length() - 1))
