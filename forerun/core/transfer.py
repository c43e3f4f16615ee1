"""From the host to a device, without waiting for what the device still does.

A large copy from ordinary memory waits for all that was enqueued before it. One from pinned memory never does: torch
keeps that memory until it has been read. On a CPU nothing is copied. Knows no batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

LARGE = 1 << 16  # bytes from which CUDA waits; less it copies aside, which is quicker than pinning
ALIGNED = 16  # bytes: kernels are compiled for tensors that start at multiples of it
WORD = 8  # bytes of the numbers that buffers consist of


def send(values: np.ndarray, device: torch.device) -> Tensor:
    """An array as a tensor; on a CPU they share their memory."""
    held = torch.from_numpy(values)
    if device.type == "cuda" and held.nbytes >= LARGE:
        held = held.pin_memory()
    return held.to(device, non_blocking=True)


def send_together(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Arrays of int64 and int32 in one copy: parts of one buffer, contiguous and aligned."""
    starts, size = [], 0
    for array in arrays:
        starts.append(size)
        size += -(-array.nbytes // ALIGNED) * ALIGNED
    staged = torch.empty(size // WORD, dtype=torch.int64, pin_memory=device.type == "cuda" and size >= LARGE)
    words = staged.numpy()
    host = {np.dtype(np.int64): words, np.dtype(np.int32): words.view(np.int32)}
    for array, start in zip(arrays, starts, strict=True):
        host[array.dtype][start // array.itemsize :][: array.size] = array.reshape(-1)
    sent = staged.to(device, non_blocking=True)
    held = {np.dtype(np.int64): sent, np.dtype(np.int32): sent.view(torch.int32)}
    views = []
    for array, start in zip(arrays, starts, strict=True):
        flat = held[array.dtype].narrow(0, start // array.itemsize, array.size)
        views.append(flat if array.ndim == 1 else flat.view(array.shape))
    return views
