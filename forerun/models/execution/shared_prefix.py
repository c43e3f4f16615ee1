"""Shared-prefix attention: sequences whose tables start with the same pages attend over those pages together.

The queries of all of them are rows of one call over the shared keys, each sequence attends over its own rest, and the
two parts are joined by their log-sum-exps. K and V of the prefix are read once per layer instead of once per sequence.
The sum is cut where no kernel would cut it, so results equal the plain path's to rounding, not in every bit. Knows
pages and masks, nothing of requests, prefix trees or models.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forerun.core import TokenBatch
from forerun.core.batch import additive_mask

MIN_SHARED_KEYS = 256  # shared keys from which a joint call saves more than its extra calls cost
MAX_GROUPED_TOKENS = 16  # new tokens of a sequence in a group: a longer chunk has rows enough of its own
REST_KEY_MULTIPLE = 64  # keys of a rest come in multiples of this
MAX_SEARCHED_SEQS = 256  # sequences that are searched for groups at a time, which bounds the recursion


def prefix_order(tables: np.ndarray) -> list[int]:
    """Rows [S, P] in an order where those with the same first pages lie side by side."""
    return sorted(range(tables.shape[0]), key=lambda row: tables[row].tobytes())


def find_groups(tables: np.ndarray, usable: list[int], least: int) -> list[tuple[list[int], int]]:
    """Groups of rows that start with the same pages, and how many pages that is: at least `least`.

    Row r may share its first `usable[r]` pages. A row is in one group at most; where prefixes nest, the cut that saves
    most reads of pages wins.
    """
    families: dict[int, list[int]] = {}  # rows that share nothing need not be compared
    for row in range(tables.shape[0]):
        if usable[row] >= least:
            families.setdefault(int(tables[row, 0]), []).append(row)
    found: list[tuple[list[int], int]] = []
    for rows in families.values():
        if len(rows) > 1:
            found += _find_in_family(tables, rows, usable, least)
    return found


def _find_in_family(tables: np.ndarray, rows: list[int], usable: list[int], least: int) -> list[tuple[list[int], int]]:
    own = tables if len(rows) == tables.shape[0] else tables[rows]
    differ = (own != own[0]).any(0)
    same = int(differ.argmax()) if differ.any() else tables.shape[1]  # first pages that all have: not looked at again
    ends = own[:, same:]
    order = prefix_order(ends)
    found: list[tuple[list[int], int]] = []
    for at in range(0, len(rows), MAX_SEARCHED_SEQS):
        part = order[at : at + MAX_SEARCHED_SEQS]
        common = []
        for a, b in zip(part, part[1:], strict=False):
            most = min(usable[rows[a]], usable[rows[b]])
            common.append(min(most, same + _common(ends[a], ends[b], max(0, most - same))))
        groups = _best(common, 0, len(part), least)[1]
        found += [([rows[member] for member in part[lo:hi]], pages) for lo, hi, pages in groups]
    return found


def _common(a: np.ndarray, b: np.ndarray, most: int) -> int:
    differ = a[:most] != b[:most]
    return int(differ.argmax()) if differ.any() else most


def _best(common: list[int], lo: int, hi: int, least: int) -> tuple[int, list[tuple[int, int, int]]]:
    """Page reads saved among the ordered rows lo..hi, and by which groups (lo, hi, pages)."""
    if hi - lo < 2:
        return 0, []
    inner = common[lo : hi - 1]  # pages that neighbours share
    pages = min(inner)
    whole = len(inner) * pages if pages >= least else 0
    if whole and whole >= sum(inner) - pages:  # no cut can save more
        return whole, [(lo, hi, pages)]
    cut = lo + inner.index(pages) + 1
    left, right = _best(common, lo, cut, least), _best(common, cut, hi, least)
    if whole and whole >= left[0] + right[0]:
        return whole, [(lo, hi, pages)]
    return left[0] + right[0], left[1] + right[1]


@dataclass
class _Rests:
    """What some sequences of a group see behind the shared pages; they have equally many new tokens."""

    tokens: slice  # of the group
    slots: Tensor  # [S * keys]
    keys: int
    masks: dict[int | None, Tensor]  # per window: [S, 1, rows, keys]


@dataclass
class PrefixGroup:
    """Sequences that attend together."""

    tokens: Tensor  # [T] int64, of the batch
    slots: slice | Tensor  # of the shared keys: a slice where their pages follow each other
    masks: dict[int | None, Tensor | None]  # per window: [T * group, shared]; None: all is seen; missing: nothing is
    blind: dict[int | None, Tensor]  # per window with a mask: [T, 1, 1] tokens that see nothing of the shared keys
    rests: list[_Rests]

    def attend(self, q: Tensor, kv: tuple[Tensor, Tensor], window: int | None, scale: float) -> Tensor:
        """All queries of the batch [*, Hq, D] to the outputs of this group's tokens [T, Hq * D]."""
        kv_heads = kv[0].shape[1]
        q = q[self.tokens].view(len(self.tokens), kv_heads, -1, q.shape[-1])  # [T, Hkv, group, D]
        own = [self._rest(q[rest.tokens], rest, kv, window, scale) for rest in self.rests]
        out, lse = own[0] if len(own) == 1 else (torch.cat(part) for part in zip(*own, strict=True))
        if window in self.masks:
            before, before_lse = self._shared(q, kv, self.masks[window], scale)
            if window in self.blind:  # the kernel gives such rows zeros and a log-sum-exp that means nothing
                before_lse = before_lse.masked_fill(self.blind[window], float("-inf"))
            # weights of the two parts are their shares of the sum of exponentials
            out = torch.lerp(before.float(), out.float(), (lse - before_lse).sigmoid_()[..., None]).to(q.dtype)
        return out.reshape(len(self.tokens), -1)

    def _shared(self, q: Tensor, kv: tuple[Tensor, Tensor], mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
        tokens, kv_heads, group, dim = q.shape
        k, v = (cache[self.slots].transpose(0, 1)[None] for cache in kv)  # [1, Hkv, shared, D]
        out, lse = _flash(q.transpose(0, 1).reshape(1, kv_heads, tokens * group, dim), k, v, mask, scale)
        out = out.view(kv_heads, tokens, group, dim).transpose(0, 1)
        return out, lse.reshape(kv_heads, tokens, group).transpose(0, 1)

    @staticmethod
    def _rest(
        q: Tensor, rest: _Rests, kv: tuple[Tensor, Tensor], window: int | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Output [T, Hkv, group, D] and log-sum-exp [T, Hkv, group] over the sequences' own keys."""
        tokens, kv_heads, group, dim = q.shape
        mask = rest.masks[window]
        seqs, each = mask.shape[0], tokens // mask.shape[0]
        k, v = (c.index_select(0, rest.slots).view(seqs, rest.keys, kv_heads, dim).transpose(1, 2) for c in kv)
        q = q.view(seqs, each, kv_heads, group, dim).transpose(1, 2).reshape(seqs, kv_heads, each * group, dim)
        out, lse = _flash(q, k, v, mask, scale)
        out = out.reshape(seqs, kv_heads, each, group, dim).transpose(1, 2).reshape(tokens, kv_heads, group, dim)
        return out, lse.reshape(seqs, kv_heads, each, group).transpose(1, 2).reshape(tokens, kv_heads, group)


def _flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """torch's CPU kernel, which also gives the log-sum-exp [B, H, rows] that its public function keeps."""
    if mask is not None:
        mask = mask.to(q.dtype)[(None,) * (4 - mask.ndim)]
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask, scale=scale)
    return out, lse


def plan_groups(
    batch: TokenBatch, windows: Iterable[int | None], heads_per_kv: int
) -> tuple[list[PrefixGroup], set[int]]:
    """The groups of a batch, and the sequences that are in one. Sequences with trees or many new tokens are in none."""
    size, tables = batch.page_size, batch.block_tables.numpy()
    usable = []
    for lo, hi in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False):
        tree = batch.tree is not None and bool(batch.tree[lo:hi].any())
        few = 0 < hi - lo <= MAX_GROUPED_TOKENS and not tree
        usable.append((int(batch.kv_lens[lo:hi].min()) - 1) // size if few else 0)  # each keeps one entry of its own
    found = find_groups(tables, usable, -(-MIN_SHARED_KEYS // size))
    groups = [_plan_group(batch, rows, pages * size, windows, heads_per_kv) for rows, pages in found]
    return groups, {row for rows, _ in found for row in rows}


def _plan_group(
    batch: TokenBatch, rows: list[int], shared: int, windows: Iterable[int | None], heads_per_kv: int
) -> PrefixGroup:
    buckets: dict[tuple[int, int], list[int]] = {}  # by new tokens and keys, so that no short rest is padded to a long
    for row in rows:
        rest = batch.seq_lens[row] - shared
        keys = REST_KEY_MULTIPLE << max(0, (-(-rest // REST_KEY_MULTIPLE) - 1).bit_length())
        buckets.setdefault((batch.cu_seqlens[row + 1] - batch.cu_seqlens[row], keys), []).append(row)
    tokens: list[int] = []
    rests = []
    for (count, _), members in buckets.items():
        keys = -(-max(batch.seq_lens[row] - shared for row in members) // REST_KEY_MULTIPLE) * REST_KEY_MULTIPLE
        own = [batch.cu_seqlens[row] + i for row in members for i in range(count)]
        seen = batch.kv_lens[own].view(len(members), count)
        masks = {
            window: additive_mask(seen, shared, keys, window).repeat_interleave(heads_per_kv, 1)[:, None]
            for window in windows
        }
        behind = _entry_slots(batch.block_tables[members], shared, keys, batch.page_size).view(-1)
        rests.append(_Rests(slice(len(tokens), len(tokens) + len(own)), behind, keys, masks))
        tokens += own
    slots = _shared_slots(batch, rows[0], shared)
    group = PrefixGroup(torch.tensor(tokens), slots, {}, {}, rests)
    seen = batch.kv_lens[tokens]
    for window in windows:
        if window is None or window >= int(seen.max()):
            group.masks[window] = None
        elif int(seen.min()) - window < shared:
            group.masks[window] = additive_mask(seen, 0, shared, window).repeat_interleave(heads_per_kv, 0)
            group.blind[window] = (seen - window >= shared)[:, None, None]
    return group


def _shared_slots(batch: TokenBatch, row: int, shared: int) -> slice | Tensor:
    slots = _entry_slots(batch.block_tables[row], 0, shared, batch.page_size)
    first = int(slots[0])
    return slice(first, first + shared) if bool((slots.diff() == 1).all()) else slots


def _entry_slots(tables: Tensor, first: int, keys: int, page_size: int) -> Tensor:
    """Slots [..., keys] of entries first, first + 1, ...; past a table's end some page's, which no token sees."""
    entry = torch.arange(first, first + keys)
    page = (entry // page_size).clamp_max(tables.shape[-1] - 1)
    return tables[..., page].to(torch.int64) * page_size + entry % page_size
