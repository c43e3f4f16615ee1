"""From hidden states of a source to K and V of the target: a shared projection to low rank, a small nonlinear step, and
one matrix to all layers at once.

A token's features are its hidden states at some layers, each divided by its own root mean square, and perhaps its
embedding in the target, which is free and holds what a narrower source lacks. K comes out before rotation, so that a
map does not depend on the position. `Maps` are the weights as calibration saves them; `FastMaps` are the same, ready to
run beside a decoder; `KVWriter` writes what they give into a prompt's pages, above the layers that the target runs
itself. None of them knows which model computed the hidden states.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field, fields

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.cache.pool import slots_of
from forerun.core.batch import send
from forerun.errors import BadProfile
from forerun.models.decoder import Decoder
from forerun.models.execution.float8_mlp import float8_projection
from forerun.models.execution.runner import Runner
from forerun.models.linear import Linear, Precision, Rotation
from forerun.prefill.choosers import TailAttention
from forerun.prefill.recompute import RaggedDepthPass, Rows
from forerun.prefill.state import PrefillState

EPS = 1e-6


@dataclass
class Maps:
    """`taps`: inputs of these layers of the source, num_layers for the last one's output. `target_embedding`:
    the target's embedding of the token comes after them."""

    taps: tuple[int, ...]
    base: int  # target layers below it are not mapped
    down: Tensor  # [rank, inputs]
    down_bias: Tensor  # [rank]
    mix_in: Tensor  # [inner, rank]
    mix_out: Tensor  # [rank, inner]
    up: Tensor  # [mapped layers * 2 * kv_size, rank]: K, then V, layer by layer
    up_bias: Tensor  # [mapped layers * 2 * kv_size]
    target_embedding: bool = field(default=False, kw_only=True)

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    @property
    def macs(self) -> int:
        """Multiply-adds for one token."""
        return sum(t.numel() for t in (self.down, self.mix_in, self.mix_out, self.up))

    def tensors(self) -> dict[str, Tensor]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.type == "Tensor"}

    def __call__(self, features: Tensor) -> Tensor:
        """[..., inputs] -> [..., mapped layers * 2 * kv_size]; differentiable."""
        z = F.linear(features, self.down, self.down_bias)
        z = z + F.linear(F.silu(F.linear(z, self.mix_in)), self.mix_out)
        return F.linear(z, self.up, self.up_bias)

    def to(self, device: torch.device, dtype: torch.dtype) -> Maps:
        return self.with_tensors({name: t.to(device, dtype) for name, t in self.tensors().items()})

    def with_tensors(self, tensors: dict[str, Tensor]) -> Maps:
        """Maps of the same shape with other weights."""
        other = copy(self)
        vars(other).update(tensors)
        return other


def unit(x: Tensor) -> Tensor:
    """Rows divided by their root mean square, which a rotation of the residual stream does not change."""
    return F.rms_norm(x, (x.shape[-1],), None, EPS)


def features_of(hidden: list[Tensor]) -> Tensor:
    """[T, width] each -> [T, inputs]."""
    return torch.cat([unit(x) for x in hidden], 1)


def _fused_features(dtype: torch.dtype, widths: list[int], device: torch.device) -> Callable[[list[Tensor]], Tensor]:
    """`features_of` in one launch in place of one for each part, if the kernel takes their shapes."""
    from forerun.models.cuda.float8 import fits, unit_features

    empty = [torch.empty(0, width, dtype=dtype, device=device) for width in widths]
    if not fits(empty):
        return features_of
    unit_features(empty, EPS, dtype)  # compiled now, so that no prompt waits for it
    return lambda hidden: unit_features(hidden, EPS, dtype) if fits(hidden) else features_of(hidden)


class FastMaps:
    """Maps in a decoder's precision. `bases`: of each part of the inputs, in order, how wide it is and the (perhaps
    rotated) basis it comes in. `float8`: many rows may be projected in float8, where the device can."""

    def __init__(
        self,
        maps: Maps,
        precision: Precision,
        bases: list[tuple[int, Rotation | None]],
        device: torch.device,
        float8: bool = False,
    ) -> None:
        widths = [width for width, _ in bases]
        parts = maps.down.float().split(widths, 1)
        rotated = (part if b is None else b.apply(part.contiguous()) for part, (_, b) in zip(parts, bases, strict=True))
        down = torch.cat(list(rotated), 1)
        dtype = precision.dtype

        def linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
            held = weight.float() if precision.linear.packs else weight.to(dtype)
            return precision.linear(held.to(device), None if bias is None else bias.to(device, dtype))

        self._down = linear(down, maps.down_bias)
        self._mix_in, self._mix_out = linear(maps.mix_in), linear(maps.mix_out)
        self._up = linear(maps.up, maps.up_bias)
        fused = device.type == "cuda" and dtype == torch.bfloat16
        self._features = _fused_features(dtype, widths, device) if fused else None
        self._float8_down = float8_projection(self._down, widths, EPS) if float8 else None

    @property
    def nbytes(self) -> int:
        held = sum(linear.nbytes for linear in (self._down, self._mix_in, self._mix_out, self._up))
        return held if self._float8_down is None else held + self._float8_down.nbytes

    def __call__(self, hidden: list[Tensor]) -> Tensor:
        """Hidden states, [T, hidden] each -> [T, mapped layers * 2 * kv_size]."""
        float8 = self._float8_down
        if float8 is not None and float8.takes(hidden):
            z = float8(hidden)
        else:
            z = self._down.joined(hidden, EPS) if self._features is None else self._down(self._features(hidden))
        z = self._mix_out(F.silu(self._mix_in(z)), add=z)
        return self._up(z)


CPU_MAP_ROWS = 64  # mapped at once on a CPU: the features of all taps stay in its caches, twice as fast
_HINT = "calibrate for these models: forerun calibrate --target ... --out PROFILE"


def precision_of(decoder: Decoder) -> Precision:
    """What the decoder's own matrices are held in, for matrices that run beside them."""
    own = decoder.layers[0].qkv
    return Precision("as the decoder", own.beside or type(own), decoder.dtype)


def tail_attention_for(state: PrefillState, chooser: str, runner: Runner) -> TailAttention | None:
    """Collects the tail's attention while it is read, if that is what tokens are chosen by."""
    wanted = state.report.chooser == chooser
    return TailAttention(runner, state.pages, state.end, len(state.tokens)) if wanted else None


class ReadChunk:
    """Entries lo .. hi of a prompt that a model reads now: first .. end of them get mapped K/V, and the queries of
    tail .. hi are collected."""

    def __init__(self, state: PrefillState, count: int, need: int, taps: tuple[int, ...]) -> None:
        """`need`: entries before it have their K/V already."""
        self.lo, self.hi = state.read, min(state.read + count, len(state.tokens))
        self.first, self.end, self.tail = max(self.lo, need), min(self.hi, state.end), max(self.lo, state.end)
        self.hidden: dict[int, Tensor] = {}  # tap -> [end - first, hidden]
        self._taps, self._tail_attention = taps, state.tail_attention

    def watch(self, layer: int, x: Tensor, q: Tensor | None, _: Tensor | None) -> None:
        if self.first < self.end and layer in self._taps:
            self.hidden[layer] = x[self.first - self.lo : self.end - self.lo]
        if q is not None and self._tail_attention is not None and self.tail < self.hi:
            self._tail_attention.add(layer, q[self.tail - self.lo :], self.tail)


class KVWriter:
    """Writes K/V of layers `base` and above for hidden states of a `source` decoder at the maps' taps; `float8`: many
    rows are mapped in float8, where the device can."""

    def __init__(self, target: Runner, source: Decoder, maps: Maps, float8: bool = False) -> None:
        _check(maps, source, target.decoder)
        self.base, self.taps = maps.base, maps.taps
        self.ragged_pass = RaggedDepthPass(target)
        self.cost = maps.macs / target.decoder.config.macs  # of a token, in tokens of the target's prefill
        self._runner, self._decoder = target, target.decoder
        self._together = _groups(target.decoder, self.base)
        self._embeds = maps.target_embedding
        parts = [source] * len(maps.taps) + [target.decoder] * self._embeds
        bases = [(decoder.config.hidden_size, decoder.basis) for decoder in parts]
        self._maps = FastMaps(maps, precision_of(source), bases, source.device, float8)

    def rows(self, state: PrefillState, first: int, end: int) -> Rows:
        """These entries through the target's layers below `base`."""
        sent, depths = state.sent(self._decoder.device)[first:end], np.full(end - first, self.base)
        return Rows(state.ids[first:end], np.arange(first, end), state.pages, depths, sent=sent)

    @torch.inference_mode()
    def write(self, state: PrefillState, hidden: list[Tensor], first: int, end: int) -> None:
        """Mapped K/V for entries first .. end, from their hidden states [end - first, hidden] at each tap."""
        step = end - first if self._decoder.device.type == "cuda" else CPU_MAP_ROWS
        for lo in range(first, end, step):
            hi = min(lo + step, end)
            features = [x[lo - first : hi - first] for x in hidden]
            if self._embeds:
                ids = state.sent(self._decoder.device)[lo:hi]
                features.append(self._decoder.embed(ids).to(features[0].dtype))
            self._write_slots(state, self._maps(features), lo, hi)
        state.depths[first:end] = np.maximum(state.depths[first:end], self.base)

    def _write_slots(self, state: PrefillState, mapped: Tensor, first: int, end: int) -> None:
        """As `AttentionBackend.write` does for one layer, but for all of them at once."""
        c, device = self._decoder.config, self._decoder.device
        mapped = mapped.to(device).view(end - first, -1, 2, c.num_kv_heads, c.head_dim)  # [T, layers, 2, Hkv, D]
        slots = send(slots_of(state.pages, first, end, self._runner.pool.page_size), device)
        self._runner.all_layers_kv.write(mapped, first, slots, self._together)


def _groups(decoder: Decoder, base: int) -> list[range]:
    """Layers from `base` on whose K torch rotates in one go: on a GPU runs of equal angles, for fewer launches; on a
    CPU one at a time, which stays in the caches."""
    layers, c = range(base, decoder.config.num_layers), decoder.config
    if decoder.device.type != "cuda":
        return [range(i, i + 1) for i in layers]
    edges = [i for i in layers if i == base or c.layer_ropes[i] != c.layer_ropes[i - 1]]
    return [range(lo, hi) for lo, hi in zip(edges, [*edges[1:], layers.stop], strict=True)]


def _check(maps: Maps, source: Decoder, target: Decoder) -> None:
    """Raise unless the shapes fit; whether the maps belong to these models is checked by fingerprint elsewhere."""
    layers = target.config.num_layers
    if not 0 <= maps.base < layers:
        raise BadProfile(f"the profile maps layers from {maps.base} on, the target has {layers}", _HINT)
    deepest = maps.base if source is target else source.config.num_layers
    if not maps.taps or not all(0 <= tap <= deepest for tap in maps.taps):
        raise BadProfile(f"the profile reads layers {list(maps.taps)}, allowed is from 0 to {deepest}", _HINT)
    wide, high = len(maps.taps) * source.config.hidden_size, (layers - maps.base) * 2 * target.config.kv_size
    wide += target.config.hidden_size * maps.target_embedding
    if maps.down.shape[1] != wide or maps.up.shape[0] != high:
        raise BadProfile(
            f"the profile maps {maps.down.shape[1]} values to {maps.up.shape[0]}, these models need {wide} to {high}",
            _HINT,
        )
