"""Memory of drafted steps as drafted_steps.cu reads it: sizes, parameters, and what a first step starts from.

Host-side only; needs no Triton.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from forerun.core.drafted import MAX_DRAFTED_SEQUENCES, DraftedStart
from forerun.models.cuda.packing import MAX_STEPS

CHILDREN = 4  # ranked tokens of a position, that may become children of a node
RING = 4  # steps whose results are kept for the host: two are on their way at most
MAX_ROWS = 16  # of one sequence, in either model's launch
RESULT_SIZE = 3 + MAX_ROWS  # tokens that came, nodes, depth; these tokens


class Params(ctypes.Structure):
    """`Params` in drafted_steps.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("state", "draft", "verified", "pages", "ranked", "chosen", "results")),
        ("caches", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("pieces", "mask", "draft_chosen_at", "chosen_at")),
        ("least", ctypes.c_float),
    ]


def state_layout() -> np.dtype:
    """`State` in drafted_steps.cu."""
    each, many = [(name, np.int32) for name in ("length", "unread")], (np.int32, (MAX_ROWS,))
    sequence = [
        *each, ("recent", *many), *((name, np.int32) for name in ("depth", "first", "nodes")),
        *((name, *many) for name in ("tokens", "parents", "depths")), ("moves", np.int32),
        ("source", *many), ("target", *many),
    ]  # fmt: skip
    head = [(name, np.int32) for name in ("seqs", "rows", "depth", "nodes", "step")]
    return np.dtype([*head, ("each", np.dtype(sequence, align=True), (MAX_DRAFTED_SEQUENCES,))], align=True)


def source_text() -> str:
    folder = Path(__file__).parent
    return "\n".join((folder / name).read_text() for name in ("stack_batch.cu", "drafted_steps.cu"))


def macros(rows: int, page_size: int, max_pages: int, held: int) -> dict[str, int]:
    """Sizes that the source is compiled for; `held`: pieces of K/V that a thread holds while it moves them."""
    sizes = {"TOKENS": rows, "STEPS": MAX_STEPS, "ROWS": MAX_ROWS, "MOST": MAX_DRAFTED_SEQUENCES, "RING": RING}
    return {**sizes, "CHILDREN": CHILDREN, "PAGE": page_size, "MOST_PAGES": max_pages, "HELD": held}


def start_state(starts: Sequence[DraftedStart], rows: int, depth: int, nodes: int) -> np.ndarray:
    """`State` before the first step, as int32 numbers."""
    state = np.zeros((), dtype=state_layout())
    state["seqs"], state["rows"], state["depth"], state["nodes"] = len(starts), rows, depth, nodes
    for each, start in zip(state["each"], starts, strict=False):
        if not 1 <= len(start.unread) < rows:
            raise ValueError(f"{len(start.unread)} tokens are not read, 1 to {rows - 1} are possible")
        each["length"], each["unread"] = start.length, len(start.unread)
        each["recent"][: len(start.unread)] = start.unread
    return state.reshape(1).view(np.int32)


def page_table(pages: Sequence[Sequence[int]], most: int) -> np.ndarray:
    """[S, 1 + most] int32: how many pages each sequence has, then these; as int32 numbers one after the other."""
    table = np.zeros((len(pages), 1 + most), dtype=np.int32)
    for row, own in zip(table, pages, strict=True):
        row[0] = count = min(len(own), most)
        row[1 : 1 + count] = own[:count]
    return table.ravel()
