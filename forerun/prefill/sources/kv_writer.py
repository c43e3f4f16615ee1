"""Shared by sources with fitted maps: the target's own lower layers, and mapped K/V above them, on a prompt's pages.

Knows the target and the maps; not which model computed the hidden states.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from forerun.core.batch import send
from forerun.errors import BadProfile
from forerun.models.decoder import Decoder
from forerun.models.execution.runner import Runner
from forerun.models.linear import Precision
from forerun.prefill.attention_scores import TailAttention, slots_of
from forerun.prefill.depth import RaggedDepthPass, Rows
from forerun.prefill.maps import FastMaps, Maps
from forerun.prefill.profile import Profile
from forerun.prefill.state import PrefillState

CPU_MAP_ROWS = 64  # mapped at once on a CPU: the features of all taps stay in its caches, twice as fast
_HINT = "calibrate for these models: forerun calibrate --target ... --out PROFILE"


def require_profile(profile: Profile | None, kind: str) -> Profile:
    """The profile; raises unless it is one for this source."""
    if profile is None:
        raise BadProfile(f"the source {kind!r} needs a profile", "name one: prefill_profile=... (--prefill-profile)")
    if profile.kind != kind:
        raise BadProfile(
            f"the profile is one for the source {profile.kind!r}, not for {kind!r}", f"use source={profile.kind}"
        )
    return profile


def precision_of(decoder: Decoder) -> Precision:
    """What the decoder's own matrices are held in, for matrices that run beside them."""
    return Precision("as the decoder", type(decoder.layers[0].qkv), decoder.dtype)


def tail_attention_for(state: PrefillState, chooser: str, runner: Runner) -> TailAttention | None:
    """Collects the tail's attention while it is read, if that is what tokens are chosen by."""
    if state.report.chooser != chooser:
        return None
    return TailAttention(runner, state.pages, state.end, len(state.tokens))


def reduced_scores(tail_attention: TailAttention | None) -> np.ndarray | None:
    """[tokens], once all of the tail is read."""
    return tail_attention.reduce() if tail_attention is not None and tail_attention.complete else None


class ReadChunk:
    """Entries lo .. hi of a prompt that a model reads now: first .. end of them get mapped K/V, and the queries of
    tail .. hi are collected."""

    def __init__(
        self, state: PrefillState, count: int, need: int, taps: tuple[int, ...], tail_attention: TailAttention | None
    ) -> None:
        """`need`: entries before it have their K/V already."""
        self.lo, self.hi = state.read, min(state.read + count, len(state.tokens))
        self.first, self.end, self.tail = max(self.lo, need), min(self.hi, state.end), max(self.lo, state.end)
        self.hidden: dict[int, Tensor] = {}  # tap -> [end - first, hidden]
        self._taps, self._tail_attention = taps, tail_attention

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
        sent = state.sent(self._decoder.device)[first:end]
        return Rows(
            state.ids[first:end], np.arange(first, end), state.pages, np.full(end - first, self.base), sent=sent
        )

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
