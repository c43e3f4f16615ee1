"""Chooses the bits of each layer of a float model for a memory or a quality, from a profile of their importance.

The profile (the KL of each layer alone in 4 and in 8 bits) is measured once and kept in the cache folder, with the KL
of whole plans that were measured. Knows checkpoints and token ids; how prompts become tokens is the caller's.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from forerun.core import EXTRA_KV_SLOTS
from forerun.errors import BadRequest
from forerun.models.config import ModelConfig
from forerun.models.cpu.block_linear import FORMATS
from forerun.models.cpu.importance import (
    BITS,
    UnitCost,
    WeightGoal,
    WeightPlan,
    fit_memory,
    fit_quality,
    size_text,
    stream_plan,
    total_bytes,
    total_kl,
)
from forerun.models.cpu.layer_kl import FLOAT, PAGE_SIZE, Sweep, Variant, lay_out
from forerun.models.cpu.library import library
from forerun.models.cpu.quantise import format_of
from forerun.models.decoder import Decoder
from forerun.models.fetch.store import home, write_whole
from forerun.models.formats.checkpoint import Checkpoint, expected_shapes
from forerun.models.formats.fingerprint import fingerprint

log = logging.getLogger("forerun")

MAX_STEPS_BACK = 4  # plans that are measured for one quality; after them all layers get 16 bits
STEP_BACK_MARGIN = 0.95  # of the sum that should lead to the quality asked for, since the last one did not
TIMED_STEPS = 3  # of one token, through layers that are read from disk
CODE = ("layer_kl.py", "quantise.py")  # a change of these makes profiles anew


def folder() -> Path:
    return home() / "importance"


def check_model(checkpoint: Checkpoint) -> None:
    """Whether a model's layers can be quantised here at all."""
    if checkpoint.quantised:
        raise BadRequest(
            f"memory and quality choose the bits of float weights, and {checkpoint.source} is quantised already",
            "give a safetensors model, or leave memory and quality out",
        )
    odd = [cols for *_, cols in _matrices(checkpoint.config) if cols % 32]
    if odd:
        raise BadRequest(
            f"{checkpoint.source} has matrices with rows of {odd[0]} values; blocks need a multiple of 32",
            "leave memory and quality out, or use quantization='int8'",
        )
    if library() is None:
        raise BadRequest(
            "memory and quality need the C kernels, and they cannot be had here (the log says why)",
            "install gcc, clang or the package ziglang; or use quantization='int8'",
        )


def plan_weights(
    checkpoint: Checkpoint, goal: WeightGoal, prompts: Callable[[], Sequence[Sequence[int]]], quiet: bool = False
) -> WeightPlan:
    """Bits of each layer for a goal. `prompts`: token ids of what the KL is measured on."""
    check_model(checkpoint)
    sizes = unit_bytes(checkpoint.config)
    unknown = [UnitCost.measured(size, 0.0, 0.0) for size in sizes]
    if goal.memory is not None and goal.memory >= total_bytes(unknown, full := (16,) * len(sizes)):
        plan = WeightPlan(full)
    elif goal.memory is not None and goal.memory <= total_bytes(unknown, (4,) * len(sizes)):
        plan = stream_plan(unknown, goal.memory)
    else:
        profile = ImportanceProfile.open(checkpoint, prompts, quiet)
        units = [UnitCost.measured(size, *kl) for size, kl in zip(sizes, profile.kl, strict=True)]
        plan = _for_memory(profile, units, goal.memory) if goal.memory else _for_quality(profile, units, goal.quality)
    return replace(plan, bytes=total_bytes(unknown, plan.bits))


def _for_memory(profile: ImportanceProfile, units: list[UnitCost], limit: int) -> WeightPlan:
    bits = fit_memory(units, limit)
    return WeightPlan(bits, kl=profile.measured(bits))


def _for_quality(profile: ImportanceProfile, units: list[UnitCost], limit: float | None) -> WeightPlan:
    """The sum of the layers' KL is a guess: a plan that misses the quality is replaced by one with a smaller sum."""
    assert limit is not None
    allowed = limit
    for _ in range(MAX_STEPS_BACK):
        bits = fit_quality(units, allowed)
        found = profile.measured(bits)
        if found <= limit:
            return WeightPlan(bits, kl=found)
        summed = total_kl(units, bits)
        if not summed:
            break
        allowed = min(allowed, summed) * min(STEP_BACK_MARGIN, limit / found * STEP_BACK_MARGIN)
    bits = (16,) * len(units)
    found = profile.measured(bits)
    if found > limit:
        raise BadRequest(
            f"quality is {limit:g}; with 16 bits in all layers the KL is {found:.2g} already",
            f"give quality={found * 1.1:.2g} or more, or use dtype='float32'",
        )
    return WeightPlan(bits, kl=found)


@torch.inference_mode()
def warn_streamed(decoder: Decoder, plan: WeightPlan, source: str) -> None:
    """Warn of what is read at every step, with the measured time of one token."""
    c, streamed = decoder.config, decoder.layers[-plan.streamed :]
    size = sum(linear.nbytes for w in streamed for linear in (w.qkv, w.o, w.gate_up, w.down))
    shape = (PAGE_SIZE + EXTRA_KV_SLOTS, c.num_kv_heads, c.head_dim)
    kv = [(torch.zeros(shape), torch.zeros(shape)) for _ in range(c.num_layers)]
    seconds = []
    for _ in range(TIMED_STEPS):
        start = time.perf_counter()
        decoder.forward(lay_out([[0]]).to(decoder.device), kv)
        seconds.append(time.perf_counter() - start)
    log.warning(
        "%s: %d of %d layers do not fit into memory and are read from disk at every step, %s: %.1f tokens/s here",
        *(source, plan.streamed, c.num_layers, size_text(size), 1 / min(seconds)),
    )


class ImportanceProfile:
    """The KL of each unit of one model in 4 and in 8 bits, and of whole plans; a small file in the cache folder."""

    def __init__(self, path: Path, found: dict[str, Any], sweep: Callable[[], Sweep], quiet: bool) -> None:
        self._path, self._found, self._sweep, self._quiet = path, found, sweep, quiet

    @classmethod
    def open(
        cls, checkpoint: Checkpoint, prompts: Callable[[], Sequence[Sequence[int]]], quiet: bool
    ) -> ImportanceProfile:
        """From the cache folder, or measured now."""
        token_ids = [list(ids) for ids in prompts()]
        code = hashlib.blake2b(json.dumps(token_ids).encode(), digest_size=16)
        for name in CODE:
            code.update((Path(__file__).parent / name).read_bytes())
        model = fingerprint(checkpoint, quiet)
        path = folder() / f"{model[:32]}-{code.hexdigest()[:16]}.json"
        units = checkpoint.config.num_layers + 1
        profile = cls(path, {}, lambda: Sweep(checkpoint, token_ids), quiet)
        with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
            found = json.loads(path.read_text(encoding="utf-8"))
            good = found["model"] == model and len(found["kl"]) == units
            if good and all(len(pair) == 2 and all(map(_is_kl, pair)) for pair in found["kl"]):
                found["plans"] = {key: kl for key, kl in found["plans"].items() if _is_kl(kl)}
                profile._found = found
                return profile
        files = [str(file.absolute()) for file in checkpoint.files]
        profile._found = {"model": model, "files": files, "kl": profile._measure(units), "plans": {}}
        profile._write()
        return profile

    @property
    def kl(self) -> list[tuple[float, float]]:
        """Of each layer, then of the head: in 4 bits and in 8."""
        return [(pair[0], pair[1]) for pair in self._found["kl"]]

    def measured(self, bits: Variant) -> float:
        """KL of a whole plan, known or measured now."""
        key = ",".join(map(str, bits))
        if key not in self._found["plans"]:
            self._found["plans"][key] = self._sweep().kl([bits], "checking the chosen bits", self._quiet)[0]
            self._write()
        return self._found["plans"][key]

    def _measure(self, units: int) -> list[tuple[float, float]]:
        alone = [tuple(bits if i == unit else FLOAT for i in range(units)) for unit in range(units) for bits in (4, 8)]
        kl = self._sweep().kl(alone, "measuring the importance of layers, kept for later starts", self._quiet)
        return list(zip(kl[0::2], kl[1::2], strict=True))

    def _write(self) -> None:
        write_whole(self._path, json.dumps(self._found))


def unit_bytes(config: ModelConfig) -> list[dict[int, int]]:
    """What each layer, then the head, takes in memory in 16, 8 and 4 bits."""
    kernels = library()
    assert kernels is not None
    sizes: list[dict[int, int]] = [dict.fromkeys(BITS, 0) for _ in range(config.num_layers + 1)]
    for unit, rows, cols in _matrices(config):
        for bits in BITS:
            sizes[unit][bits] += kernels.fr_packed_bytes(FORMATS[format_of(cols, bits)][0], rows, cols)
    return sizes


def _matrices(config: ModelConfig) -> list[tuple[int, int, int]]:
    """(unit, rows, cols) of every matrix that is multiplied; the head is the last unit."""
    found = []
    head = "embed" if config.tie_embeddings else "head"
    for name, shape in expected_shapes(config).items():
        if len(shape) == 2 and (name.startswith("layers.") or name == head):
            found.append((int(name.split(".")[1]) if name.startswith("layers.") else config.num_layers, *shape))
    return found


def remove_orphans() -> None:
    """Forget the profiles of models that are no longer there."""
    for path in folder().glob("*.json"):
        with suppress(OSError, ValueError, LookupError, TypeError):
            files = json.loads(path.read_text(encoding="utf-8"))["files"]
            if not any(Path(file).exists() for file in files):
                path.unlink()


def _is_kl(value: Any) -> bool:
    return isinstance(value, float) and -1.0 < value < 1e4
