"""Which arithmetic a test of eight-bit weights or of bits runs with: chosen at collection, named in the test's id.

Weights limited for 16-bit sums compute the same on every CPU. Unlimited ones need VNNI's 32-bit sums, so their tests
exist only on CPUs that have it.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

HAS_VNNI = torch.cpu._is_vnni_supported()
VNNI_ANSWERS = [pytest.param(False, id="16-bit-sums")] + [pytest.param(True, id="vnni")] * HAS_VNNI


def pretend(monkeypatch: pytest.MonkeyPatch, vnni: bool) -> None:
    """Let weights be packed as on a CPU with or without VNNI."""
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: vnni)


# What a matrix library may choose kernels by; it looks once in a process. None: what this CPU has.
INSTRUCTIONS = [None, "AVX2", "AVX512"]


def run_with(instructions: str | None, program: str) -> None:
    """Run a program in a process whose matrix library keeps to these; it fails where the program does."""
    chosen = {} if instructions is None else {"MKL_ENABLE_INSTRUCTIONS": instructions}
    if instructions == "AVX2":
        chosen["ATEN_CPU_CAPABILITY"] = "avx2"
    subprocess.run([sys.executable, "-c", program], env=os.environ | chosen, check=True)
