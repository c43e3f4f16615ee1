"""How the kernels are launched: programmatic dependent launch, and the scratch memory that outlives a launch.

With programmatic dependent launch a kernel starts while the one before it still runs, fetches what does not depend on
it (weights), and waits for it at `gdc_wait`. Every kernel here lets its dependents start at once, and every program
waits before it touches an activation, so that a kernel's end implies the end of all before it. Knows no kernel.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton


@cache
def _pdl_supported() -> bool:
    """Hopper and later can; the interpreter has no launches to overlap."""
    if triton.knobs.runtime.interpret or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability()[0] >= 9


class Pdl:
    """Whether kernels overlap. On wherever the device can; the sweep turns it off to measure what it gains."""

    enabled = True

    @classmethod
    def active(cls) -> bool:
        return cls.enabled and _pdl_supported()


def options(num_warps: int, num_stages: int = 1) -> dict[str, Any]:
    """Launch keywords common to all kernels. PDL is both a constant of the kernel and an attribute of its launch."""
    if Pdl.active():
        return {"num_warps": num_warps, "num_stages": num_stages, "PDL": True, "launch_pdl": True}
    return {"num_warps": num_warps, "num_stages": num_stages, "PDL": False}


def cdiv(x: int, y: int) -> int:
    """x / y rounded up. Triton's own, made for kernels as well, takes the host as long as a tenth of a launch."""
    return (x + y - 1) // y


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n; 0 for 0. Triton's own is as slow as its cdiv."""
    return 1 << (n - 1).bit_length() if n > 0 else 0


@cache
def scratch(name: str, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeroed memory that lives as long as the process, so that captured graphs may keep its address.

    One per name and size: kernels of one stream use it in turn, and leave counters at zero.
    """
    return torch.zeros(size, dtype=dtype, device=device)
