"""A restart, then the same long prompt: its K/V read from the disk tier, beside computing it.

Both are the first question of an engine that was just opened, after a short one for warmth. The process stays: what is
measured is the tier, not how long a model takes to load.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from forerun.errors import ForerunError
from forerun.llm import LLM
from forerun.params import SamplingParams

GOAL = 5.0
ONE = SamplingParams(max_tokens=1, speculation="off")


def run(opened: Callable[..., AbstractContextManager[LLM]], ids: list[int]) -> dict[str, Any]:
    """`opened`: opens the model with these options of `LLM`."""
    with tempfile.TemporaryDirectory(prefix="forerun-restart-") as folder:
        options = {"disk": folder, "max_model_len": len(ids) + 2, "kv_cache_tokens": len(ids) + 256}
        computed, _ = _ask(opened, ids, options)
        restored, figures = _ask(opened, ids, options)
    if restored.served["disk"] < len(ids) // 2:
        raise ForerunError(
            f"only {restored.served['disk']} of {len(ids)} tokens came from disk", "look at the log: why is it off?"
        )
    ratio = computed.ttft_s / restored.ttft_s
    return {
        "prompt_tokens": len(ids),
        "disk_tokens": restored.served["disk"],
        "disk_bytes": figures["disk"]["bytes"],
        "seconds": {"computed": round(computed.ttft_s, 4), "from_disk": round(restored.ttft_s, 4)},
        "ratio": round(ratio, 2),
        "goal": {"ratio": GOAL, "reached": ratio >= GOAL},
    }


def _ask(opened: Callable[..., AbstractContextManager[LLM]], ids: list[int], options: dict[str, Any]) -> Any:
    with opened(**options) as llm:
        llm.generate(ids[: max(1, len(ids) // 8)][::-1], ONE)
        usage = llm.generate(ids, ONE)[0].usage
        return usage, llm.stats().tiers
