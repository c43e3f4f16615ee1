"""Which integer arithmetic a test of eight-bit weights runs with: chosen at collection, named in the test's id.

Weights limited for 16-bit sums compute the same on every CPU. Unlimited ones need VNNI's 32-bit sums, so their tests
exist only on CPUs that have it.
"""

from __future__ import annotations

import pytest
import torch

HAS_VNNI = torch.cpu._is_vnni_supported()
VNNI_ANSWERS = [pytest.param(False, id="16-bit-sums")] + [pytest.param(True, id="vnni")] * HAS_VNNI


def pretend(monkeypatch: pytest.MonkeyPatch, vnni: bool) -> None:
    """Let weights be packed as on a CPU with or without VNNI."""
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: vnni)
