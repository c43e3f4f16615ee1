"""Whether a quantised file is computed in its own blocks or as int8 on this CPU: measured once, kept with the library.

Blocks keep the file's weights and need less memory, int8 rounds weights again; by KL to float32 blocks are ahead
(docs/results.md). So they are taken unless int8 is clearly faster both for one row and for several. Knows no model.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache

import torch

from forerun.models.cpu.block_linear import Q8Linear, set_threads
from forerun.models.cpu.library import build_key, library
from forerun.models.fetch.store import home, write_whole
from forerun.models.linear import PackedInt8

TIMED_SIZE = 1536  # rows and columns of the matrix: of a small model, and too large for a core's own cache
TIMED_ROWS = (1, 8)
MAX_RATIO = 1.25  # of int8's time, above which int8 is taken; below it blocks' smaller memory decides
TIMED_REPEATS = 7


def blocks_are_worth_it() -> bool:
    """Timed for 8-bit weights, held in both ways: 4-bit blocks are half as long, so it holds for them all the more."""
    if library() is None:
        return False
    no_int8 = "fbgemm" not in torch.backends.quantized.supported_engines  # as on ARM
    return no_int8 or min(_ratios(torch.get_num_threads())) <= MAX_RATIO


@cache
def _ratios(threads: int) -> tuple[float, ...]:
    """Time of blocks against int8 for each of TIMED_ROWS, from the cache folder or measured now."""
    path = home() / "kernels" / f"{build_key()}-{threads}.json"
    with suppress(OSError, ValueError, TypeError, KeyError):
        known = tuple(float(ratio) for ratio in json.loads(path.read_text(encoding="utf-8"))["blocks_to_int8"])
        if len(known) == len(TIMED_ROWS) and all(0 < ratio < 1e6 for ratio in known):
            return known
    found = _measure(threads)
    write_whole(path, json.dumps({"blocks_to_int8": found}))
    return found


def _measure(threads: int) -> tuple[float, ...]:
    weight = torch.randn(TIMED_SIZE, TIMED_SIZE, generator=torch.Generator().manual_seed(0))
    set_threads(threads)
    blocks, int8 = Q8Linear(weight), PackedInt8(weight)
    ratios = []
    for rows in TIMED_ROWS:
        x = torch.randn(rows, TIMED_SIZE)
        times = [(_seconds(lambda x=x: blocks(x)), _seconds(lambda x=x: int8(x))) for _ in range(TIMED_REPEATS)]  # type: ignore[misc]
        ratios.append(min(a for a, _ in times) / min(b for _, b in times))
    return tuple(ratios)


def _seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
