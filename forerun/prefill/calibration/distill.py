"""Maps trained end to end: the loss is not on K and V but on the target's next-token distributions over them.

The target runs a window's continuation, its tail and a share of its prompt over drafted K/V; the loss is the KL from
its distributions over exact K/V. Every other step cuts the windows shorter. Only the maps are trained, so that what
exact prefill and the source make of some windows serves a step on all of them and one on their beginnings: three
fifths of a step. Knows no files and no text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.prefill.calibration.dense import LayerActivations
from forerun.prefill.calibration.model_pair import (
    TAIL_TOKENS,
    DenseTailAttention,
    ModelPair,
    choose,
    repeated,
    with_ends,
)
from forerun.prefill.maps import Maps

STEPS_PER_BATCH = 2  # on the same windows: whole, then cut


@dataclass(frozen=True)
class Schedule:
    steps: int
    rate: float = 1.5e-3  # as a share of a weight's root mean square
    warmup: float = 0.03  # share of the steps
    shares: tuple[float, ...] = (0.0, 0.05, 0.1, 0.15, 0.2)  # of recomputed tokens, in turn
    ahead: int = 128  # tokens after the prompt that are compared

    def factor(self, step: int) -> float:
        done = step / max(1, self.steps)
        return min(1.0, done / self.warmup) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


@dataclass(frozen=True)
class _WindowReading:
    """Of some windows what does not depend on the maps."""

    tokens: Tensor  # [B, T] as they were given
    exact: LayerActivations
    features: Tensor  # [B, T, inputs]
    attention: dict[int, Tensor]  # by where windows are cut: the exact attention of the tail there, [B, tail, T]


class Distiller:
    """Holds the maps in float32 and one optimizer; `step` trains on some windows."""

    def __init__(self, pair: ModelPair, maps: Maps, schedule: Schedule) -> None:
        self.pair, self.schedule, self.done = pair, schedule, 0
        self._spread = maps.up.float().norm(dim=1, keepdim=True).clamp_min(1e-6)  # [outputs, 1]
        self.parts = {name: t.float().clone() for name, t in maps.tensors().items()}
        self.parts["up"] /= self._spread  # so that one rate fits all outputs
        self._start = maps
        sizes = {name: float(t.square().mean().sqrt().clamp_min(1e-8)) for name, t in self.parts.items()}
        sizes |= {"mix_out": sizes["mix_in"], "down_bias": 1.0, "up_bias": float(self._spread.mean())}  # these may be 0
        groups = [{"params": [t.requires_grad_()], "size": sizes[name]} for name, t in self.parts.items()]
        self._optimizer = torch.optim.Adam(groups, betas=(0.9, 0.95))
        self._reading: _WindowReading | None = None

    def maps(self) -> Maps:
        parts = dict(self.parts)
        parts["up"] = parts["up"] * self._spread
        return self._start.with_tensors(parts)

    def result(self) -> Maps:
        return self._start.with_tensors({k: t.detach() for k, t in self.maps().tensors().items()})

    def state(self) -> dict[str, object]:
        return {"parts": self.parts, "optimizer": self._optimizer.state_dict(), "done": self.done}

    def load(self, state: dict[str, object]) -> None:
        for name, tensor in state["parts"].items():  # type: ignore[attr-defined]
            self.parts[name].data.copy_(tensor)
        self._optimizer.load_state_dict(state["optimizer"])  # type: ignore[arg-type]
        self.done = int(state["done"])  # type: ignore[call-overload]

    def step(self, tokens: Tensor) -> Tensor:
        """One optimizer step on windows [B, T]; returns the loss, for which a device need not be waited."""
        loss = self.loss(tokens)
        for group in self._optimizer.param_groups:
            group["lr"] = self.schedule.rate * self.schedule.factor(self.done) * group["size"]
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(self.parts.values()), 1.0)
        self._optimizer.step()
        self.done += 1
        return loss.detach()

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean KL from exact to drafted over what follows the prompt's tail."""
        ahead, pair, stop = self.schedule.ahead, self.pair, self._cut(self.done, tokens.shape[1])
        end, read = stop - ahead - TAIL_TOKENS, self._read(tokens, stop)
        wanted = read.exact.hidden[-1][:, end + TAIL_TOKENS - 1 : stop - 1]
        share = self.schedule.shares[self.done % len(self.schedule.shares)]
        marks = repeated(tokens[:, : stop - ahead], end).to(wanted.device)
        # the tail's exact attention stands in for the one over drafted K/V
        rows = with_ends(choose(read.attention[stop], marks, share), end, stop)
        dtype = pair.target.dtype
        with torch.autocast(wanted.device.type, dtype=dtype, enabled=dtype != torch.float32):
            drafted = self.maps()(read.features[:, :stop]).to(dtype)
        x = pair.recompute(read.exact, drafted, rows)[:, -ahead - 1 : -1]
        return divergence(pair, wanted, x)

    @staticmethod
    def _cut(step: int, length: int) -> int:
        """Prompts of other lengths, too."""
        return int(length * (0.5 + 0.5 * ((step * 0.618) % 1))) if step % 2 else length

    @torch.no_grad()
    def _read(self, tokens: Tensor, stop: int) -> _WindowReading:
        """Of these windows and of those that the next step may make of them."""
        if self._reading is not None and self._reading.tokens is tokens and stop in self._reading.attention:
            return self._reading
        self._reading, length = None, tokens.shape[1]  # its memory may be needed
        target, sent = self.pair.target, tokens.to(self.pair.target.device).long()
        seen = {}
        for cut in {stop, self._cut(self.done + 1, length)}:
            end = cut - self.schedule.ahead - TAIL_TOKENS
            seen[cut] = DenseTailAttention(slice(end, end + TAIL_TOKENS), target.config.scale)

        def hook(layer: int, q: Tensor, k: Tensor, positions: Tensor) -> None:
            for attention in seen.values():
                attention(layer, q, k, positions)

        exact = target.trace(sent, hook=hook, keep_kv=False)
        features = self.pair.features(sent, exact)
        attention = {cut: own.mean() for cut, own in seen.items()}
        self._reading = _WindowReading(tokens, exact, features, attention)
        return self._reading


def divergence(pair: ModelPair, exact: Tensor, drafted: Tensor) -> Tensor:
    """Mean KL between next-token distributions at hidden states [B, N, hidden], some rows at a time."""
    total = torch.zeros((), device=exact.device)
    pieces = list(zip(exact.flatten(0, 1).split(512), drafted.flatten(0, 1).split(512), strict=True))
    for p, q in pieces:
        with torch.no_grad():
            wanted = F.log_softmax(pair.target.logits(p).float(), -1)
        given = F.log_softmax(pair.target.logits(q).float(), -1)
        total = total + F.kl_div(given, wanted, log_target=True, reduction="sum")
    return total / (exact.shape[0] * exact.shape[1])


def batches(windows: Tensor, size: int, seed: int = 0) -> Iterator[Tensor]:
    """Windows [N, T] again and again, in a new order each time."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(windows.shape[0], generator=generator)
        for lo in range(0, len(order) - size + 1, size):
            yield windows[order[lo : lo + size]]
