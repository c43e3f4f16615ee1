"""How many bits each layer gets: 16, 8 or 4, so that weights fit a memory, or the logits stay within a KL divergence.

Given what each unit (every layer, then the head) costs in KL when it alone has few bits, and its bytes, steps down are
taken in the order of KL per byte saved. What does not fit in 4 bits is read from disk at every step. Knows numbers,
no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forerun.errors import BadRequest

BITS = (16, 8, 4)
STREAM_BUFFERS = 2  # layers that are in memory at once while they are streamed: one is computed, the next is read


@dataclass(frozen=True)
class WeightGoal:
    """What the bits of layers are chosen for: bytes of all matrices, or a KL divergence in nats."""

    memory: int | None = None
    quality: float | None = None


@dataclass(frozen=True)
class UnitCost:
    """One layer, or the head: bytes by bits, and the KL of the logits when it alone has so few."""

    bytes: dict[int, int]
    kl: dict[int, float]

    @classmethod
    def measured(cls, bytes: dict[int, int], kl4: float, kl8: float) -> UnitCost:
        """More bits are never worse: where it was measured so, it was noise."""
        kl8 = max(0.0, kl8)
        return cls(bytes, {16: 0.0, 8: kl8, 4: max(kl4, kl8)})


@dataclass(frozen=True)
class WeightPlan:
    """Bits of each layer, then of the head; the last `streamed` layers are read from disk at every step."""

    bits: tuple[int, ...]
    streamed: int = 0
    kl: float | None = None  # measured for all of it together; None: it was not
    bytes: int = 0  # of all matrices

    def streams(self, name: str) -> bool:
        """Whether the matrix of this canonical name is read from disk at every step."""
        return name.startswith("layers.") and int(name.split(".")[1]) >= len(self.bits) - 1 - self.streamed

    @property
    def text(self) -> str:
        """Names it in keys and files."""
        return ",".join(map(str, self.bits)) + (f" streamed {self.streamed}" if self.streamed else "")

    @property
    def summary(self) -> str:
        """`layers: 12 in 4 bits, 18 in 8; head in 8; 812.3M, KL 0.012`."""
        layers = self.bits[:-1]
        counts = ", ".join(f"{layers.count(b)} in {b}" for b in sorted(BITS) if b in layers)
        kl = "" if self.kl is None else f", KL {self.kl:.2g}"
        return f"layers: {counts} bits; head in {self.bits[-1]}; {size_text(self.bytes)}{kl}"


def size_text(count: int) -> str:
    """Bytes as `--memory` takes them, rounded up, so that what a message names can be given."""
    shift, name = next((unit for unit in ((30, "G"), (20, "M"), (10, "K")) if count >> unit[0]), (0, ""))
    return f"{-(-count * 100 >> shift) / 100:g}{name}"


def total_bytes(units: Sequence[UnitCost], bits: Sequence[int]) -> int:
    return sum(unit.bytes[b] for unit, b in zip(units, bits, strict=True))


def total_kl(units: Sequence[UnitCost], bits: Sequence[int]) -> float:
    """Assumes that the KL of several units together is the sum of each alone."""
    return sum(unit.kl[b] for unit, b in zip(units, bits, strict=True))


def fit_memory(units: Sequence[UnitCost], limit: int) -> tuple[int, ...]:
    """Bits with the least KL found within `limit` bytes, which must hold all units in 4 bits."""
    bits = [BITS[0]] * len(units)
    for unit, lower in _steps_down(units):
        if total_bytes(units, bits) <= limit:
            break
        bits[unit] = lower
    while True:  # the last step may have saved more than was needed: what else fits goes up again
        free = limit - total_bytes(units, bits)
        fits = [
            ((cost.kl[now] - cost.kl[higher]) / (cost.bytes[higher] - cost.bytes[now]), i, higher)
            for i, (cost, now) in enumerate(zip(units, bits, strict=True))
            for higher in BITS
            if higher > now and cost.bytes[higher] - cost.bytes[now] <= free
        ]
        if not fits:
            return tuple(bits)
        _, i, bits[i] = max(fits)


def fit_quality(units: Sequence[UnitCost], limit: float) -> tuple[int, ...]:
    """Bits with the fewest bytes found whose KL adds up to `limit` at most."""
    bits = [BITS[0]] * len(units)
    for unit, lower in _steps_down(units):
        stepped = [*bits[:unit], lower, *bits[unit + 1 :]]
        if total_kl(units, stepped) <= limit:
            bits = stepped
    return tuple(bits)


def stream_plan(units: Sequence[UnitCost], limit: int) -> WeightPlan:
    """All in 4 bits, and as many of the last layers as have to be are read from disk at every step."""
    sizes = [unit.bytes[4] for unit in units]
    *layers, head = sizes
    bits = (4,) * len(units)
    if sum(sizes) <= limit:
        return WeightPlan(bits)
    least = head + STREAM_BUFFERS * max(layers)
    if limit < least:
        raise BadRequest(
            f"memory is {size_text(limit)}; with 4 bits and all layers read from disk at every step this model needs "
            f"{size_text(least)}, and {size_text(sum(sizes))} with all of them in memory",
            f"give memory={size_text(least)} or more, or take a smaller model",
        )
    resident = 0
    while least + sum(layers[: resident + 1]) <= limit:
        resident += 1
    return WeightPlan(bits, len(layers) - resident)


def _steps_down(units: Sequence[UnitCost]) -> list[tuple[int, int]]:
    """(unit, bits it steps down to), cheapest KL per byte saved first; a unit's own steps stay in order."""
    steps = []
    for i, unit in enumerate(units):
        per_byte = 0.0
        for higher, lower in zip(BITS, BITS[1:], strict=False):
            cost = (unit.kl[lower] - unit.kl[higher]) / max(1, unit.bytes[higher] - unit.bytes[lower])
            per_byte = max(per_byte, cost)
            steps.append((per_byte, -lower, i))
    return [(i, -lower) for _, lower, i in sorted(steps)]
