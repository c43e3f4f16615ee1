"""What one forward runs: tokens of any sequences, on the host (`HostBatch`) and on a device (`TokenBatch`), and how
arrays get from one to the other.

A large copy from ordinary memory waits for all that was enqueued before it. One from pinned memory never does: torch
keeps that memory until it has been read. On a CPU nothing is copied. Invariants are checked where an object is made,
lengths are derived. `KV` is the cache as all parts of the engine see it. Knows no model and no device policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

PINNED_FROM_BYTES = 1 << 16  # bytes from which CUDA waits; less it copies aside, which is quicker than pinning
ALIGNED_BYTES = 16  # bytes: kernels are compiled for tensors that start at multiples of it
WORD_BYTES = 8  # bytes of the numbers that buffers consist of
KV = list[tuple[Tensor, Tensor]]  # per layer (K, V), each [num_slots, Hkv, D]; K is stored rotated

EXTRA_KV_SLOTS = 512  # that a cache has beyond its pages, because attention reads keys in whole blocks


class KVShape(Protocol):
    """What a page of K/V depends on; a model's config has it."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def kv_size(self) -> int: ...


@dataclass
class TokenBatch:
    """Any tokens of any sequences, flattened: one forward runs them all.

    A token has a rotary position, a slot its K/V is written to, and a rule for what it sees. Slots are numbers in the
    page pool (page * page_size + offset); entry e of a sequence lies in slot block_tables[row, e // page_size] *
    page_size + e % page_size. Token t sees entry e of its own sequence when `e < kv_lens[t]`, or, in a draft tree, when
    `tree[t, e - tree_start[row]]` is set. Tokens of one sequence are contiguous, sequences in row order.
    """

    tokens: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64, rotary positions
    slot_mapping: torch.Tensor  # [T] int64, where each token's K/V goes
    kv_lens: torch.Tensor  # [T] int32, entries of its sequence that a token sees, itself included
    block_tables: torch.Tensor  # [S, P] int32, page ids of each sequence, padded with 0
    cu_seqlens: list[int]  # [S + 1] first token of each sequence, then T
    seq_lens: list[int]  # [S] entries of each sequence that any token here may see
    page_size: int
    logits_indices: torch.Tensor  # [N] int64, tokens whose logits are wanted
    tree: torch.Tensor | None = None  # [T, W] bool
    tree_start: list[int] | None = None  # [S] entry that column 0 of `tree` stands for
    run_start: int | None = None  # first slot, where the slots of all tokens are known to follow each other
    host: HostBatch | None = None  # what it was made from, for planning without waiting for the device

    def __post_init__(self) -> None:
        assert self.cu_seqlens[-1] == self.tokens.numel() == self.positions.numel() == self.slot_mapping.numel()
        assert len(self.seq_lens) == len(self.cu_seqlens) - 1 == self.block_tables.shape[0]
        assert (self.tree is None) == (self.tree_start is None)

    @property
    def num_tokens(self) -> int:
        return self.tokens.numel()

    @property
    def num_seqs(self) -> int:
        return len(self.seq_lens)


@dataclass
class HostBatch:
    """A batch still on the host, as lists and numpy arrays; the rules are those of `TokenBatch`."""

    tokens: np.ndarray  # [T] int64
    positions: np.ndarray  # [T] int64
    slot_mapping: np.ndarray  # [T] int64
    kv_lens: np.ndarray  # [T] int32
    cu_seqlens: list[int]  # [S + 1]
    seq_lens: list[int]  # [S]
    pages: list[np.ndarray]  # [S] page ids of each sequence
    page_size: int
    logits_indices: list[int]  # [N]
    bits: list[int] | None = None  # [T] bit j: the token sees entry tree_start + j, beside those before `kv_lens`
    tree_start: list[int] | None = None  # [S]
    prompt: bool = False  # all tokens are of prompts: on CUDA other kernels than an answer's, with bits of their own

    def singles(self, first: int, end: int) -> HostBatch:
        """Some of the sequences of a batch in which each has one token."""
        count = len(self.tokens[first:end])
        return self._select(slice(first, end), list(range(count + 1)), range(first, first + count), list(range(count)))

    def only_wanted(self) -> HostBatch:
        """The tokens whose logits are wanted and their sequences, as if the others had run before. Of no tree."""
        rows = np.array(self.logits_indices, dtype=np.int64)
        seqs = np.searchsorted(np.array(self.cu_seqlens), rows, side="right") - 1  # [N] of each row, in order
        kept, counts = np.unique(seqs, return_counts=True)
        return self._select(rows, [0, *np.cumsum(counts).tolist()], kept.tolist(), list(range(len(rows))))

    def _select(
        self, rows: slice | np.ndarray, cu_seqlens: list[int], seqs: Sequence[int], logits_indices: list[int]
    ) -> HostBatch:
        """These rows, of these sequences."""
        own = {name: getattr(self, name)[rows] for name in ("tokens", "positions", "slot_mapping", "kv_lens")}
        own |= {name: [getattr(self, name)[s] for s in seqs] for name in ("seq_lens", "pages")}
        return replace(self, **own, cu_seqlens=cu_seqlens, logits_indices=logits_indices)

    def padded(self, rows: int) -> HostBatch:
        """With at least so many rows: those that are missing form a sequence that sees and writes nothing."""
        count, missing = len(self.tokens), rows - len(self.tokens)
        if missing <= 0:
            return self
        none = np.zeros(missing, dtype=np.int64)
        return replace(
            self,
            tokens=np.concatenate((self.tokens, none)),
            positions=np.concatenate((self.positions, none)),
            slot_mapping=np.concatenate((self.slot_mapping, none - 1)),
            kv_lens=np.concatenate((self.kv_lens, none.astype(np.int32))),
            cu_seqlens=[*self.cu_seqlens, count + missing],
            seq_lens=[*self.seq_lens, 0],
            pages=[*self.pages, np.zeros(1, dtype=np.int32)],
        )

    def to(self, device: torch.device) -> TokenBatch:
        """Copies that do not wait for what the device still does; on a CPU its tensors are the arrays themselves."""
        block_tables = self.pages[0][None] if len(self.pages) == 1 else _padded_rows(self.pages)
        together = len(self.tokens) == 1 or bool((np.diff(self.slot_mapping) == 1).all())
        wanted = np.array(self.logits_indices, dtype=np.int64)
        arrays = (self.tokens, self.positions, self.slot_mapping, self.kv_lens, block_tables, wanted)
        sent = send_together(arrays, device) if device.type == "cuda" else [torch.from_numpy(a) for a in arrays]
        return TokenBatch(
            tokens=sent[0],
            positions=sent[1],
            slot_mapping=sent[2],
            kv_lens=sent[3],
            block_tables=sent[4],
            cu_seqlens=self.cu_seqlens,
            seq_lens=self.seq_lens,
            page_size=self.page_size,
            logits_indices=sent[5],
            tree=None if self.bits is None else _unpack(self.bits).to(device, non_blocking=True),
            tree_start=self.tree_start,
            run_start=int(self.slot_mapping[0]) if together else None,
            host=self,
        )


def _padded_rows(rows: list[np.ndarray]) -> np.ndarray:
    """Rows of different lengths with zeros behind them."""
    table = np.zeros((len(rows), max(len(row) for row in rows)), dtype=np.int32)
    for i, row in enumerate(rows):
        table[i, : len(row)] = row
    return table


def _unpack(bits: list[int]) -> torch.Tensor:
    """Sets of entries as rows of booleans: [T, W]."""
    width = max(1, max(b.bit_length() for b in bits))
    size = -(-width // 8)
    packed = np.frombuffer(b"".join(b.to_bytes(size, "little") for b in bits), dtype=np.uint8)
    rows = np.unpackbits(packed.reshape(len(bits), size), axis=1, count=width, bitorder="little")
    return torch.from_numpy(rows.view(bool))


def send(values: np.ndarray, device: torch.device) -> Tensor:
    """An array as a tensor; on a CPU they share their memory."""
    held = torch.from_numpy(values)
    if device.type == "cuda" and held.nbytes >= PINNED_FROM_BYTES:
        held = held.pin_memory()
    return held.to(device, non_blocking=True)


def send_together(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Arrays of int64 and int32 in one copy: parts of one buffer, contiguous and aligned."""
    starts, size = [], 0
    for array in arrays:
        starts.append(size)
        size += -(-array.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES
    pinned = device.type == "cuda" and size >= PINNED_FROM_BYTES
    staged = torch.empty(size // WORD_BYTES, dtype=torch.int64, pin_memory=pinned)
    words = staged.numpy()
    host = {np.dtype(np.int64): words, np.dtype(np.int32): words.view(np.int32)}
    for array, start in zip(arrays, starts, strict=True):
        host[array.dtype][start // array.itemsize :][: array.size] = array.reshape(-1)
    sent = staged.to(device, non_blocking=True)
    held = {np.dtype(np.int64): sent, np.dtype(np.int32): sent.view(torch.int32)}
    views = []
    for array, start in zip(arrays, starts, strict=True):
        flat = held[array.dtype].narrow(0, start // array.itemsize, array.size)
        views.append(flat if array.ndim == 1 else flat.view(array.shape))
    return views


def additive_mask(seen: Tensor, first: int, keys: int, window: int | None) -> Tensor:
    """[..., keys] over entries first, first + 1, ... for tokens that see `seen` [...] entries, themselves last."""
    entry = torch.arange(first, first + keys, device=seen.device)
    visible = entry < seen[..., None]
    if window is not None:
        visible &= entry >= seen[..., None] - window
    return torch.zeros(visible.shape, device=seen.device).masked_fill_(~visible, float("-inf"))
