"""Attention: one contract for all backends, and the reference backend on torch SDPA.

A backend turns a layer's fused q/k/v into attention output and writes K/V to the cache on the way. It knows the rules
of `TokenBatch` (slots, block tables, which token sees what) and nothing of requests, pages' owners or models. The
reference runs one sequence after the other, or those that share a long prefix together: obvious, on any device, and
what every faster backend is tested against.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.core import KV, TokenBatch
from forerun.core.batch import additive_mask
from forerun.models.config import ModelConfig
from forerun.models.execution.kv_copies import KeyRuns, KVCopies, link_copies
from forerun.models.execution.shared_prefix import PrefixGroup, plan_groups, prefix_order
from forerun.models.linear import Norm, rms_norm
from forerun.models.rope import RopeTable, rotate

if TYPE_CHECKING:
    from forerun.models.decoder import Layer


class AttentionBackend(ABC):
    """`plan` once per forward, then `store` and `attend` once per layer."""

    kernels_write = False  # whether C kernels write K/V, those in float32: they can do so for all layers at once

    def __init__(self, config: ModelConfig, device: torch.device, max_context: int) -> None:
        self.config = config
        self.device = device
        self.ropes = {rope: RopeTable(rope, config.head_dim, max_context, device) for rope in set(config.layer_ropes)}

    @abstractmethod
    def plan(self, batch: TokenBatch) -> None:
        """Work out what all layers share for this batch."""

    @abstractmethod
    def store(self, qkv: Tensor, layer: int, kv: tuple[Tensor, Tensor], norms: tuple[Norm, Norm] | None) -> Tensor:
        """Norm and rotate q and k, write k and v to their slots, return q: [T, (Hq + 2 Hkv) D] -> [T, Hq, D]."""

    @abstractmethod
    def attend(self, q: Tensor, layer: int, kv: tuple[Tensor, Tensor]) -> Tensor:
        """[T, Hq, D] -> [T, Hq * D]."""

    def run_layers(self, x: Tensor, layers: list[Layer], kv: KV, which: range) -> Tensor | None:
        """The planned batch x [T, hidden] through layers `which` at once; None where a backend cannot."""
        return None

    def narrowed(self, window: int, wide: int) -> Self:
        """One for the same caches whose layers from `wide` on see no further back than `window` entries."""
        other = copy(self)
        other.config = self.config.narrowed(window, wide)
        return other

    def for_drafts(self) -> Self:
        """One for the same caches that may round more where that is faster; itself where there is no such way."""
        return self

    def entry_weights(self, q: Tensor, layer: int, kv: tuple[Tensor, Tensor]) -> Tensor | None:
        """[entries] float32: the weights that all tokens of the planned batch, of one sequence, give each entry of it,
        summed over tokens and heads; None where that is not computed at once. `q` [T, Hq, D] rotated."""
        return None

    def prepare_prompts(self, kv: tuple[Tensor, Tensor], most: int, least: int = 0) -> None:  # noqa: B027 (on a GPU)
        """Have libraries build in this thread what whole prompts of at most so many tokens will run in a layer `kv`;
        `least`: where shorter ones run otherwise."""

    def forget(self) -> None:  # noqa: B027 (most keep nothing)
        """Drop copies of K/V, after what is not a number has been in the cache."""

    def write(
        self, k: Tensor, v: Tensor, layer: int, kv: tuple[Tensor, Tensor], positions: Tensor, slots: Tensor
    ) -> None:
        """K (not rotated yet) and V [T, Hkv, D] that came from elsewhere, to slots [T]; needs no plan."""
        rope = self.ropes[self.config.layer_ropes[layer]]
        kv[0].index_copy_(0, slots, rotate(k, *rope.at(positions)).to(kv[0].dtype))
        kv[1].index_copy_(0, slots, v.to(kv[1].dtype))

    def write_rows(
        self,
        made: Tensor,
        layer: int,
        kv: tuple[Tensor, Tensor],
        positions: Tensor,
        slots: Tensor,
        k_norm: Norm | None = None,
    ) -> None:
        """The same of K and V side by side, [T, 2 Hkv D], K with a norm where one is given."""
        k, v = made.unflatten(-1, (2 * self.config.num_kv_heads, self.config.head_dim)).chunk(2, 1)
        self.write(k if k_norm is None else rms_norm(k, k_norm), v, layer, kv, positions, slots)


MAX_TILE_TOKENS = 128  # new tokens that attend in one call, so that a long prefill does not compute all it may not see
# new tokens and keys from which query heads stay separate: slower, with a smaller mask
MIN_SEPARATE_TOKENS, MIN_SEPARATE_KEYS = 128, 4096
# Multiples that rows of a call come in, and the most rows of one. Torch's kernel takes 32 at a time below 192.
ROW_LIMITS = ((4, 184), (8, 184), (16, 184), (16, 16), (32, 32))


@functools.cache
def row_limits(head_dim: int) -> tuple[int, int]:
    """The multiple and the most rows of a call with which a row has the same bits wherever it stands in whatever call.

    Matrix libraries choose kernels by the number of rows, some of them for the last few rows only, each with its own
    order of summation, and which ones depends on the CPU: AMD's need multiples of 4, Intel's with AVX512 of 8 where
    heads are 128 wide, those with AVX2 calls of 16. So it is tried, in less than a tenth of a second.
    """
    draw, counts = torch.Generator().manual_seed(head_dim), (128, 512, 1024)
    q, k, v = (torch.randn(1, 1, n, head_dim, generator=draw) for n in (ROW_LIMITS[0][1], counts[-1], counts[-1]))

    def attend(first: int, rows: int, keys: int) -> Tensor:
        mask = torch.zeros(rows, keys)
        return F.scaled_dot_product_attention(q[:, :, first : first + rows], k[:, :, :keys], v[:, :, :keys], mask)

    def holds(multiple: int, most: int) -> bool:
        calls = {min(most, rows // multiple * multiple) for rows in (multiple, 16, 24, 40, 64, 96, most)}
        for keys in counts:
            found = {rows: attend(0, rows, keys) for rows in calls if rows}
            for row in range(0, 64):  # each as the first of a call of its own
                alone = attend(row, multiple, keys)[:, :, 0]
                if any(not torch.equal(alone, own[:, :, row]) for rows, own in found.items() if row < rows):
                    return False
        return True

    return next((limits for limits in ROW_LIMITS if holds(*limits)), ROW_LIMITS[-1])


def block_keys(context: int, same_bits: bool = True) -> int:
    """Keys to attend over for a context: the kernel's blocks of 512, the last one of 128 where that is enough.

    Without `same_bits` just a little more than the context, which is less work and rounds differently in each batch.
    """
    if not same_bits:
        return -(-context // 64) * 64
    rest = context % 512
    return context - rest + (0 if rest == 0 else 128 if rest <= 128 else 512)


@dataclass
class _Tile:
    """Some new tokens of one sequence, and the keys they attend over."""

    tokens: slice  # of the batch
    keys: KeyRuns
    masks: dict[int | None, Tensor]  # per window: additive mask [rows, keys]
    separate: bool  # a row is a token of one head; otherwise the heads that share a KV head are rows too

    @property
    def single(self) -> bool:
        return self.tokens.stop - self.tokens.start == 1 and not self.separate


class SdpaAttention(AttentionBackend):
    """The reference: torch's scaled_dot_product_attention per sequence, on views of the cache where pages are one run.

    With `same_bits` a token's result is the same bits in any batch, chunk or draft. The matrix kernels underneath
    choose the order of their sums by the shapes they are given, so shapes are kept to a few: keys come in blocks of 512
    (a last one may be 128), rows as this CPU needs them (`row_limits`). Eight-bit weights need this: a
    difference in the last bit can flip a rounding and grow from layer to layer.

    With `share_prefix` the K/V of pages that several sequences start with are read from the pool once per layer, where
    they would be read once per sequence. With `same_bits` sequences still attend one by one, over a copy of which only
    their own rest changes: the same calls on the same numbers, so the same bits. Without it, on a CPU, they attend over
    the shared pages in one call (`PrefixGroup`), which is faster and rounds differently.
    """

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device,
        max_context: int,
        same_bits: bool = True,
        share_prefix: bool = True,
    ) -> None:
        super().__init__(config, device, max_context)
        self.same_bits, self.share_prefix = same_bits, share_prefix
        self._copies = KVCopies()
        self._windows = set(config.windows)
        self._row_multiple, self._tile_tokens = 1, MAX_TILE_TOKENS
        if same_bits and device.type == "cpu":
            self._row_multiple, most = row_limits(config.head_dim)
            self._tile_tokens = max(1, most // (config.num_heads // config.num_kv_heads))

    def narrowed(self, window: int, wide: int) -> Self:
        other = super().narrowed(window, wide)
        other._copies, other._windows = KVCopies(), set(other.config.windows)
        return other

    def plan(self, batch: TokenBatch) -> None:
        self._rotations = {rope: table.at(batch.positions) for rope, table in self.ropes.items()}
        self._slots: slice | Tensor = batch.slot_mapping
        if batch.run_start is not None:
            self._slots = slice(batch.run_start, batch.run_start + batch.num_tokens)
        self._groups: list[PrefixGroup] = []
        # by entries that a single token sees, and keys: branches of one prompt mostly see equally much
        self._single_masks: dict[tuple[int, int], dict[int | None, Tensor]] = {}
        grouped: set[int] = set()
        order = list(range(batch.num_seqs))
        if self.share_prefix and batch.num_seqs > 1:
            order = prefix_order(batch.block_tables.cpu().numpy())
            if not self.same_bits and self.device.type == "cpu":
                group = self.config.num_heads // self.config.num_kv_heads
                self._groups, grouped = plan_groups(batch, self._windows, group)
        tiles = [tile for s in order if s not in grouped for tile in self._sequence(batch, s)]
        self._most = max((tile.keys.count for tile in tiles), default=0)
        self._singles = [tile for tile in tiles if tile.single]
        self._tiles = [tile for tile in tiles if not tile.single]
        self._single_tokens = torch.tensor([tile.tokens.start for tile in self._singles], device=self.device)
        if self.share_prefix:
            link_copies(tile.keys for tile in self._singles + self._tiles)

    def _sequence(self, batch: TokenBatch, s: int) -> list[_Tile]:
        lo, hi = batch.cu_seqlens[s], batch.cu_seqlens[s + 1]
        if batch.tree is not None and batch.tree_start is not None and bool(batch.tree[lo:hi].any()):
            start = batch.tree_start[s]
            return [self._tile(batch, s, run, start, path) for run, path in _paths(batch.tree, lo, hi)]
        tiles = [slice(at, min(at + self._tile_tokens, hi)) for at in range(lo, hi, self._tile_tokens)]
        return [self._tile(batch, s, tokens, int(batch.kv_lens[tokens].max()), []) for tokens in tiles]

    def _tile(self, batch: TokenBatch, s: int, tokens: slice, start: int, path: list[int]) -> _Tile:
        """Tokens that see entries before `start`, and then more and more of the entries on `path` behind it."""
        context = start + len(path)
        keys, count = block_keys(context, self.same_bits), tokens.stop - tokens.start
        seen = batch.kv_lens[tokens].to(torch.int64)
        if path:
            assert batch.tree is not None
            seen = seen + batch.tree[tokens].sum(-1)
        separate = count >= MIN_SEPARATE_TOKENS and keys > MIN_SEPARATE_KEYS
        sees = (int(seen[0]), keys) if count == 1 else None
        masks = (self._single_masks.get(sees) if sees else None) or self._masks(seen, keys, separate)
        if sees:
            self._single_masks[sees] = masks
        runs = _key_slots(batch.block_tables[s], start, path, keys, batch.page_size)
        return _Tile(tokens, KeyRuns(runs, keys, context), masks, separate)

    def _masks(self, seen: Tensor, keys: int, separate: bool) -> dict[int | None, Tensor]:
        masks = {}
        for window in self._windows:
            mask = additive_mask(seen, 0, keys, window)  # [count, keys]
            if not separate:
                mask = mask.repeat_interleave(self.config.num_heads // self.config.num_kv_heads, 0)
            masks[window] = F.pad(mask, (0, 0, 0, -mask.shape[0] % self._row_multiple))
        return masks

    def store(self, qkv: Tensor, layer: int, kv: tuple[Tensor, Tensor], norms: tuple[Norm, Norm] | None) -> Tensor:
        c = self.config
        heads = qkv.view(qkv.shape[0], -1, c.head_dim)  # [T, Hq + 2 Hkv, D]
        qk, v = heads[:, : c.num_heads + c.num_kv_heads], heads[:, c.num_heads + c.num_kv_heads :]
        if norms is not None:
            q, k = qk[:, : c.num_heads], qk[:, c.num_heads :]
            qk = torch.cat((rms_norm(q, norms[0]), rms_norm(k, norms[1])), dim=1)
        qk = rotate(qk, *self._rotations[c.layer_ropes[layer]])
        k = qk[:, c.num_heads :]
        if isinstance(self._slots, slice):
            kv[0][self._slots] = k
            kv[1][self._slots] = v
        else:
            kv[0].index_copy_(0, self._slots, k)
            kv[1].index_copy_(0, self._slots, v)
        return qk[:, : c.num_heads]

    def attend(self, q: Tensor, layer: int, kv: tuple[Tensor, Tensor]) -> Tensor:
        window = self.config.windows[layer]
        if q.shape[0] == 1:
            return self._attend_singles(q, window, kv)
        if len(self._tiles) == 1 and not self._groups and not self._singles:
            return self._attend_tile(q, self._tiles[0], self._tiles[0].masks[window], kv)
        out = q.new_empty(q.shape[0], q.shape[1] * q.shape[2])
        for group in self._groups:
            out[group.tokens] = group.attend(q, kv, window, self.config.scale)
        if self._singles:
            out[self._single_tokens] = self._attend_singles(q[self._single_tokens], window, kv)
        for tile in self._tiles:
            out[tile.tokens] = self._attend_tile(q[tile.tokens], tile, tile.masks[window], kv)
        return out

    def forget(self) -> None:
        self._copies.forget()

    def _attend_singles(self, q: Tensor, window: int | None, kv: tuple[Tensor, Tensor]) -> Tensor:
        """Tokens that are alone in their tiles, in the order of these [N, Hq, D]: what all need is done once."""
        count, heads, dim = q.shape
        kv_heads = kv[0].shape[1]
        group, rows = heads // kv_heads, self._singles[0].masks[window].shape[0]
        # the query heads that share a KV head become rows of one head, so that its K and V are read once
        q = F.pad(q.reshape(count, kv_heads, group, dim), (0, 0, 0, rows - group))  # [N, Hkv, rows, D]
        outs = []
        for own, tile in zip(q.split(1), self._singles, strict=True):
            k, v = self._copies.read(tile.keys, kv, self._most)  # [1, Hkv, keys, D]
            mask = tile.masks[window]
            mask = mask if mask.dtype == q.dtype else mask.to(q.dtype)
            outs.append(F.scaled_dot_product_attention(own, k, v, attn_mask=mask, scale=self.config.scale))
        out = outs[0] if count == 1 else torch.cat(outs)
        return out[:, :, :group].reshape(count, -1)

    def _attend_tile(self, q: Tensor, tile: _Tile, mask: Tensor, kv: tuple[Tensor, Tensor]) -> Tensor:
        k, v = self._copies.read(tile.keys, kv, self._most)  # [1, Hkv, keys, D]
        mask = mask if mask.dtype == q.dtype else mask.to(q.dtype)
        count, heads, dim = q.shape
        if tile.separate:
            q = F.pad(q.transpose(0, 1)[None], (0, 0, 0, mask.shape[0] - count))  # [1, Hq, rows, D]
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.config.scale, enable_gqa=True)
            return out[0, :, :count].transpose(0, 1).reshape(count, -1)  # [count, Hq * D]
        group = heads // k.shape[1]
        q = q.view(count, -1, group, dim).transpose(0, 1).reshape(1, -1, count * group, dim)
        q = F.pad(q, (0, 0, 0, mask.shape[0] - count * group))  # [1, Hkv, rows, D]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.config.scale)
        out = out[0, :, : count * group].reshape(-1, count, group, dim)
        return out.transpose(0, 1).reshape(count, -1)


def _paths(tree: Tensor, lo: int, hi: int) -> Iterator[tuple[slice, list[int]]]:
    """Runs of tokens, each of which sees what the one before it sees and itself: a branch of the tree at a time."""
    start, path = lo, tree[lo].nonzero().squeeze(-1).tolist()
    for t in range(lo + 1, hi):
        own = tree[t].nonzero().squeeze(-1).tolist()
        if own[:-1] != path and own != path:
            yield slice(start, t), path
            start = t
        path = own
    yield slice(start, hi), path


def _key_slots(table: Tensor, start: int, path: list[int], keys: int, page_size: int) -> list[slice]:
    """Slots of the entries before `start`, of those on a path behind it, and as many more as the block needs.

    In the order of the path, not of the entries: a token on a side branch gets the bits it will get as an answer.
    """
    straight = path == list(range(len(path)))
    length = start + len(path) if straight else start
    pages = table[: -(-length // page_size)].tolist()
    cuts = [i for i in range(1, len(pages)) if pages[i] != pages[i - 1] + 1]
    runs = [
        slice(pages[lo] * page_size, (pages[hi - 1] + 1) * page_size)
        for lo, hi in zip([0, *cuts], [*cuts, len(pages)], strict=True)
    ]
    extra = keys - len(pages) * page_size
    if straight:
        runs[-1] = slice(runs[-1].start, runs[-1].stop + extra)  # whatever lies there
        return runs
    runs[-1] = slice(runs[-1].start, runs[-1].stop - (len(pages) * page_size - start))
    entries = [start + node for node in path]
    slots = [int(table[e // page_size]) * page_size + e % page_size for e in entries]
    return [*runs, *(slice(slot, slot + 1) for slot in slots), slice(0, keys - start - len(path))]
