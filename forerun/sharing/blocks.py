"""Blocks of several workers on one live cache: what each worker sees, at which positions, and the attention over it.

The definition, after the layout of Hogwild! Inference. There is one prompt of P tokens and one block of tokens per
worker. In a step every worker may append tokens to its block, all at once. Worker w then sees

    prompt | block w+1 | block w+2 | ... | block w-1 | block w          (worker numbers modulo n)

with rotary positions 0, 1, 2, ... along that line, the other blocks with all their tokens, those of this very step too,
and its own block up to the token that attends. A token runs once, in the view its own worker has in that step: its K
(before rotation) and its V are those of this one pass in every view and ever after. Only positions differ from view to
view, and they move as blocks grow. Sliding windows count along the same line.

K is kept rotated for one place: entry j of any block as if it followed the prompt, at P + j. Scores depend on
differences of positions alone, so not keys are turned for each view but queries, once for every block: all workers read
the same cache, each entry once in a step. A block alone follows the prompt in its only view: that is an ordinary
sequence, and it runs as one. Knows no requests, no sampling, no text and no owner of pages.
"""

from __future__ import annotations

import itertools
from array import array
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from forerun.cache.pool import slots_of
from forerun.models.attention import AttentionBackend
from forerun.models.decoder import Output
from forerun.models.execution.runner import Runner, Span
from forerun.models.linear import Norm, rms_norm
from forerun.models.rope import rotate

TILE_TOKENS = 64  # new tokens that attend at once: the scores of all tokens of long blocks would be large


@dataclass
class WorkerBlock:
    """Tokens in a row: entry j lies at entry `first + j` of `pages`; `length` of them have K/V."""

    pages: array[int]
    first: int = 0
    length: int = 0

    def slots(self, lo: int, hi: int, page_size: int) -> np.ndarray:
        return slots_of(self.pages, self.first + lo, self.first + hi, page_size)  # [hi - lo]


def view_starts(prompt: int, lengths: list[int], worker: int) -> list[int]:
    """Position of each block's first token in a worker's view."""
    n, at = len(lengths), prompt
    starts = [0] * n
    for other in (*range(worker + 1, n), *range(worker + 1)):
        starts[other] = at
        at += lengths[other]
    return starts


@dataclass
class Views:
    """The new tokens of one step, T of all workers, over B stretches of cache: the prompt, then blocks."""

    tokens: Tensor  # [T]
    slots: Tensor  # [T] where K and V go
    stored: Tensor  # [T] positions that K is rotated to
    queries: Tensor  # [B, T] positions that queries are rotated to for a stretch
    keys: list[slice | Tensor]  # [B] slots of a stretch
    key_positions: Tensor  # [E] what the K of all entries, stretch after stretch, was rotated to
    lengths: list[int]  # [B] entries of a stretch; E together


class BlockAttention(AttentionBackend):
    """Attention of all workers' new tokens over one cache; the batches it plans are `Views`."""

    def __init__(self, base: AttentionBackend) -> None:
        self.config, self.device, self.ropes = base.config, base.device, base.ropes  # tables are large: one for both

    def plan(self, views: Views) -> None:  # type: ignore[override]
        self._views = views
        stretches, count = views.queries.shape
        self._turns = {}
        for rope, table in self.ropes.items():
            cos, sin = table.at(views.queries.flatten())
            self._turns[rope] = (cos.view(stretches, count, 1, -1), sin.view(stretches, count, 1, -1))
        self._stored = {rope: table.at(views.stored) for rope, table in self.ropes.items()}
        owner = torch.repeat_interleave(torch.tensor(views.lengths, device=self.device))  # [E] stretch of an entry
        # how far an entry lies before a token in its view; below 0: it comes later in the token's own block
        self._distance = views.queries.T.index_select(1, owner) - views.key_positions  # [T, E]

    def store(self, qkv: Tensor, layer: int, kv: tuple[Tensor, Tensor], norms: tuple[Norm, Norm] | None) -> Tensor:
        """As in `AttentionBackend`, but the returned queries are not rotated: that depends on the stretch."""
        c = self.config
        heads = qkv.view(qkv.shape[0], -1, c.head_dim)  # [T, Hq + 2 Hkv, D]
        q, k, v = heads.split((c.num_heads, c.num_kv_heads, c.num_kv_heads), dim=1)
        if norms is not None:
            q, k = rms_norm(q, norms[0]), rms_norm(k, norms[1])
        kv[0].index_copy_(0, self._views.slots, rotate(k, *self._stored[c.layer_ropes[layer]]))
        kv[1].index_copy_(0, self._views.slots, v.contiguous())
        return q

    def attend(self, q: Tensor, layer: int, kv: tuple[Tensor, Tensor]) -> Tensor:
        cos, sin = self._turns[self.config.layer_ropes[layer]]
        window = self.config.windows[layer]
        out = []
        for lo in range(0, q.shape[0], TILE_TOKENS):
            tile = slice(lo, lo + TILE_TOKENS)
            hidden = self._distance[tile] < 0  # [t, E]
            if window is not None:
                hidden |= self._distance[tile] >= window
            out.append(self._attend_tile(rotate(q[tile], cos[:, tile], sin[:, tile]), hidden, kv))
        return torch.cat(out)

    def _attend_tile(self, q: Tensor, hidden: Tensor, kv: tuple[Tensor, Tensor]) -> Tensor:
        """Queries rotated for each stretch [B, t, Hq, D] -> [t, Hq * D]; in float32, as fused kernels sum."""
        stretches, count, heads, dim = q.shape
        shared, group = kv[0].shape[1], heads // kv[0].shape[1]
        rows = q.view(stretches, count, shared, group, dim).transpose(1, 2).flatten(2, 3).float()  # [B, Hkv, t g, D]
        scores = torch.cat([rows[b] @ _read(kv[0], at).permute(1, 2, 0) for b, at in enumerate(self._views.keys)], -1)
        scores = scores.mul_(self.config.scale).view(shared, count, group, -1)  # [Hkv, t, g, E]
        weights = scores.masked_fill_(hidden[:, None], float("-inf")).softmax(-1).flatten(1, 2)  # [Hkv, t g, E]
        out = rows.new_zeros(shared, count * group, dim)
        for part, at in zip(weights.split(self._views.lengths, -1), self._views.keys, strict=True):
            out.baddbmm_(part, _read(kv[1], at).transpose(0, 1))
        return out.view(shared, count, group, dim).transpose(0, 1).reshape(count, -1).to(q.dtype)


def _read(cache: Tensor, at: slice | Tensor) -> Tensor:
    """[L, Hkv, D] float32: in place where a stretch is one run of slots, else a copy."""
    return (cache[at] if isinstance(at, slice) else cache.index_select(0, at)).float()


class BlockRunner:
    """Runs steps of all workers, each as one forward."""

    def __init__(self, runner: Runner, prompt: WorkerBlock, blocks: list[WorkerBlock]) -> None:
        """The prompt's K/V is there already. A block alone must follow the prompt on the same pages."""
        self.prompt, self.blocks = prompt, blocks
        self._runner, self._size = runner, runner.pool.page_size
        self._attention = BlockAttention(runner.decoder.attention)
        self._decoder = replace(runner.decoder, attention=self._attention)

    @torch.inference_mode()
    def forward(self, new: list[list[int]], want: list[int]) -> Output:
        """Append tokens to each worker's block (none to some); logits [N, V] after the last of the workers `want`."""
        if len(self.blocks) == 1:
            return self._forward_alone(new[0])
        ends = list(itertools.accumulate(len(tokens) for tokens in new))
        views = self._views(new)
        self._attention.plan(views)
        decoder = self._decoder
        x = decoder.run_blocks(decoder.embed(views.tokens), self._runner.kv, range(2 * decoder.config.num_layers))
        rows = torch.tensor([ends[worker] - 1 for worker in want], dtype=torch.int64, device=decoder.device)
        return Output(decoder.logits(x.index_select(0, rows)))

    def _forward_alone(self, ids: list[int]) -> Output:
        block = self.blocks[0]
        assert block.pages is self.prompt.pages and block.first == self.prompt.length
        span = Span(ids, block.first + block.length, block.pages, (len(ids) - 1,))
        block.length += len(ids)
        return self._runner.forward([span])

    def _views(self, new: list[list[int]]) -> Views:
        """Lay the step out; from here on the new tokens are part of their blocks."""
        slots, entries = [], []  # of new tokens, by worker
        for block, ids in zip(self.blocks, new, strict=True):
            entries.append(np.arange(block.length, block.length + len(ids)))
            slots.append(block.slots(block.length, block.length + len(ids), self._size))
            block.length += len(ids)
        prompt, lengths = self.prompt.length, [block.length for block in self.blocks]
        queries = [np.zeros((len(lengths) + 1, 0), dtype=np.int64)]  # by worker: [B, tokens]
        for worker, own in enumerate(entries):
            starts = np.array(view_starts(prompt, lengths, worker))
            positions = starts[worker] + own  # in the view of its own worker
            shifted = positions - (starts - prompt)[:, None]  # K of a block is rotated as if it followed the prompt
            queries.append(np.concatenate((positions[None], shifted)))
        stretches = [self.prompt, *self.blocks]
        bases = [0, *(prompt for _ in lengths)]
        key_positions = [base + np.arange(block.length) for base, block in zip(bases, stretches, strict=True)]
        return Views(
            tokens=self._tensor(np.array([token for ids in new for token in ids], dtype=np.int64)),
            slots=self._tensor(np.concatenate(slots)),
            stored=self._tensor(prompt + np.concatenate(entries)),
            queries=self._tensor(np.concatenate(queries, axis=1)),
            keys=[self._keys(block) for block in stretches],
            key_positions=self._tensor(np.concatenate(key_positions)),
            lengths=[block.length for block in stretches],
        )

    def _keys(self, block: WorkerBlock) -> slice | Tensor:
        slots = block.slots(0, block.length, self._size)
        if block.length and slots[-1] - slots[0] == block.length - 1 and bool((np.diff(slots) == 1).all()):
            return slice(int(slots[0]), int(slots[-1]) + 1)
        return self._tensor(slots)

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self._decoder.device)
