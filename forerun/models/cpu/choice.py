"""Whether a quantised file is computed in its own blocks or as int8 on this CPU: measured once, kept with the library.

Blocks keep the file's weights and need less memory, int8 rounds weights again; by KL to float32 blocks are ahead
(docs/results.md). So they are taken unless int8 is clearly faster both for one row and for several. What is timed is
one thread's arithmetic: threads wait for each other at the end of a product, and beside another program the slowest of
them decides, so that a first start on a busy machine would choose for all later ones (docs/log.md). Knows no model.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache

import torch
from torch import Tensor

from forerun.models.cpu.block_linear import Q8Linear, set_threads
from forerun.models.cpu.library import build_key, library
from forerun.models.fetch.store import home, write_whole
from forerun.models.linear import Linear, PackedInt8

TIMED_SIZE = 1536  # rows and columns of the matrix: of a small model, and too large for a core's own cache
TIMED_ROWS = (1, 8)
MAX_RATIO = 1.25  # of int8's time, above which int8 is taken; below it blocks' smaller memory decides
TIMED_REPEATS = 7


def blocks_are_worth_it() -> bool:
    """Timed for 8-bit weights, held in both ways: 4-bit blocks are half as long, so it holds for them all the more."""
    if library() is None:
        return False
    no_int8 = "fbgemm" not in torch.backends.quantized.supported_engines  # as on ARM
    return no_int8 or min(_ratios()) <= MAX_RATIO


@cache
def _ratios() -> tuple[float, ...]:
    """Time of blocks against int8 for each of TIMED_ROWS, from the cache folder or measured now."""
    path = home() / "kernels" / f"{build_key()}-1.json"
    with suppress(OSError, ValueError, TypeError, KeyError):
        known = tuple(float(ratio) for ratio in json.loads(path.read_text(encoding="utf-8"))["blocks_to_int8"])
        if len(known) == len(TIMED_ROWS) and all(0 < ratio < 1e6 for ratio in known):
            return known
    found = _measure()
    write_whole(path, json.dumps({"blocks_to_int8": found}))
    return found


def _measure() -> tuple[float, ...]:
    weight = torch.randn(TIMED_SIZE, TIMED_SIZE, generator=torch.Generator().manual_seed(0))
    blocks, int8, threads = Q8Linear(weight), PackedInt8(weight), torch.get_num_threads()
    _use_threads(1)
    try:
        return tuple(_ratio(blocks, int8, torch.randn(rows, TIMED_SIZE)) for rows in TIMED_ROWS)
    finally:
        _use_threads(threads)


def _use_threads(count: int) -> None:
    """In both libraries."""
    torch.set_num_threads(count)
    set_threads(count)


def _ratio(blocks: Linear, int8: Linear, x: Tensor) -> float:
    times = [(_seconds(lambda: blocks(x)), _seconds(lambda: int8(x))) for _ in range(TIMED_REPEATS)]
    return min(a for a, _ in times) / min(b for _, b in times)


def _seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
