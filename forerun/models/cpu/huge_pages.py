"""Weights in memory pages of 2 MiB: decoding reads all of them at every step, and small pages made that slower.

A thread of lower priority copies ranges of memory, a piece at a time, into huge pages and moves each copy to the place
of its original, where readers find the same bytes before and after. Two cores read 25 GB/s from pages of 4 KiB and 32
from huge ones (one core 20 and 30); the 1.5B decodes in 35 ms a token instead of 41. Linux only; elsewhere, and where
memory is short, everything stays as it is. Knows addresses, no model.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
from torch import Tensor

log = logging.getLogger("forerun")

HUGE_PAGE_BYTES = 2 << 20
PIECE_BYTES = 32 << 20  # copied at a time: what is held twice
MAX_SHARE_OF_AVAILABLE = 0.25  # a mapped file is shared with other processes, a copy is not
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_PROT_READ_WRITE, _MAP_PRIVATE_ANONYMOUS = 3, 0x22
_MADV_HUGEPAGE = 14
_MREMAP_MAYMOVE_FIXED = 3
# Of the thread, beside two busy ones on two cores: a gigabyte is moved in 5 s and steps take a fifth longer meanwhile;
# at 0 in 4 s and they take up to twice as long, at 19 in more than 15 s
_NICENESS = 5


def unavailable(size: int) -> str:
    """Why so many bytes stay in small pages; empty where they need not."""
    if not sys.platform.startswith("linux"):
        return "only Linux moves pages"
    try:
        if "[never]" in SETTING.read_text():
            return f"{SETTING} is never"
    except OSError:
        return f"there is no {SETTING}"
    available = psutil.virtual_memory().available
    if size > MAX_SHARE_OF_AVAILABLE * available:
        return f"{size / 1e9:.1f} GB are more than a quarter of the {available / 1e9:.1f} GB that are available"
    return ""


def move_in_background(tensors: Sequence[Tensor]) -> threading.Thread | None:
    """Move tensors that are written no more; they stay alive until it is done. None: they stay where they are."""
    size = sum(tensor.nbytes for tensor in tensors)
    if why := unavailable(size):
        log.info("weights stay in small pages: %s", why)
        return None
    thread = threading.Thread(target=_move_all, args=(list(tensors),), name="huge-pages", daemon=True)
    thread.start()
    return thread


def _move_all(tensors: Sequence[Tensor]) -> None:
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
    moved = 0
    try:
        for tensor in tensors:
            moved += move(tensor.data_ptr(), tensor.nbytes)
    except OSError as error:
        log.info("weights stay in small pages after %.0f MB: %s", moved / 1e6, error)


def move(address: int, size: int) -> int:
    """Put the whole huge pages within a range of memory into such; returns how many bytes they are."""
    libc = _libc()
    start, end = _round_up(address), (address + size) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    for at in range(start, end, PIECE_BYTES):
        length = min(PIECE_BYTES, end - at)
        reserved = libc.mmap(None, length + HUGE_PAGE_BYTES, _PROT_READ_WRITE, _MAP_PRIVATE_ANONYMOUS, -1, 0)
        if reserved == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), "no memory for a piece")
        copy = _round_up(reserved)
        after = reserved + length + HUGE_PAGE_BYTES - (copy + length)
        libc.madvise(copy, length, _MADV_HUGEPAGE)
        ctypes.memmove(copy, at, length)
        failed = libc.mremap(copy, length, length, _MREMAP_MAYMOVE_FIXED, at) != at
        error = ctypes.get_errno()
        for rest, left in ((reserved, copy - reserved), (copy + length, after), (copy, length if failed else 0)):
            if left:
                libc.munmap(rest, left)
        if failed:
            raise OSError(error, "a piece cannot be moved")
    return max(0, end - start)


def _round_up(address: int) -> int:
    return -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.argtypes, libc.mmap.restype = [pointer, size, number, number, number, ctypes.c_long], pointer
    libc.mremap.argtypes, libc.mremap.restype = [pointer, size, size, number, pointer], pointer
    libc.munmap.argtypes, libc.madvise.argtypes = [pointer, size], [pointer, size, number]
    return libc
