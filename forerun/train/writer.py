"""Many continuations at once, by the dense network: one token of all rows a step, on the device the training runs on.

The engine serves requests as they come and spends its host's time on each; here all rows start together, stand at the
same position and share every launch, which makes answers for training ten times as fast on a GPU. Prompts of about the
same length belong together: what is longer than the shortest is forced token by token. Knows tokens; no text, no
files.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from forerun.errors import BadRequest
from forerun.prefill.calibration.dense import DenseModel

# One more entry at every step: a kernel that is planned for each shape would be planned all the time.
GROWING_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
CHECKED_EVERY = 16  # steps between two looks at which rows have ended: each look waits for the device
KEPT_ROWS = 0.75  # share of rows still writing below which the others are dropped
COMPARED = 4  # most probable tokens whose scores are computed again in float32: 16 bits make ties
DRAWN_FROM = 64  # most probable tokens of a drawn continuation
PROMPT_CHUNK_TOKENS = 65_536  # of prompts that run at a time


class BatchWriter:
    """Rows of one batch and their K/V."""

    def __init__(self, model: DenseModel, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        c, device = model.config, model.device
        total = max(map(len, prompts)) + max_tokens
        if total > c.max_context or any(window is not None and window < total for window in c.windows):
            hint = "give fewer tokens, or let the engine write"
            raise BadRequest(f"{total} tokens are more than every layer of the model attends to", hint)
        self._model, self._start, self._max_tokens = model, min(map(len, prompts)), max_tokens
        self.tokens = torch.full((len(prompts), total), -1, dtype=torch.long)
        for row, prompt in zip(self.tokens, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt, dtype=torch.long)
        self.tokens = self.tokens.to(device)
        self._prompt_ends = torch.tensor([len(prompt) for prompt in prompts], device=device)
        self._row_of = torch.arange(len(prompts), device=device)  # of each row that still writes, its prompt
        shape = (len(prompts), c.num_kv_heads, total, c.head_dim)
        self._kv = [
            (torch.empty(shape, dtype=model.dtype, device=device), torch.empty(shape, dtype=model.dtype, device=device))
            for _ in range(c.num_layers)
        ]
        self._joined = [_joined(model, i) for i in range(c.num_layers)]

    @torch.inference_mode()
    def run(self, stops: Collection[int], draw: torch.Generator | None = None) -> list[list[int]]:
        """Prompts and what follows them, the stop included. `draw`: at random, else the most probable token."""
        model = self._model
        ends = torch.tensor(sorted(stops), device=model.device)
        done = torch.zeros(len(self._row_of), dtype=torch.bool, device=model.device)
        with sdpa_kernel(GROWING_BACKENDS) if model.embed.is_cuda else nullcontext():
            self._write(ends, done, draw)
        rows = zip(self.tokens.tolist(), self._prompt_ends.tolist(), strict=True)
        return [_ended(row[: prompt + self._max_tokens], prompt, stops) for row, prompt in rows]

    def _write(self, ends: Tensor, done: Tensor, draw: torch.Generator | None) -> None:
        model, total, last = self._model, self.tokens.shape[1], self._prompts()
        for at in range(self._start, total):
            forced = self.tokens[self._row_of, at]
            chosen = torch.where(forced >= 0, forced, self._choose(last, draw))
            self.tokens[self._row_of, at] = chosen
            own = self._prompt_ends[self._row_of]
            done |= ((at >= own) & torch.isin(chosen, ends)) | (at + 1 >= own + self._max_tokens)
            if at % CHECKED_EVERY == 0:
                kept = int((~done).sum())
                if kept == 0:
                    break
                if kept < KEPT_ROWS * len(done):
                    chosen, done = chosen[~done], self._drop(done, at)
            if at + 1 < total:
                last = self._advance(model.embed_tokens(chosen[:, None]), at)

    def _prompts(self) -> Tensor:
        """The part that all prompts have, rows in turn: -> last hidden states [rows, hidden]."""
        model, length, found = self._model, self._start, []
        positions = torch.arange(length, device=model.device)
        rows = max(1, PROMPT_CHUNK_TOKENS // length)
        for lo in range(0, len(self.tokens), rows):
            x = model.embed_tokens(self.tokens[lo : lo + rows, :length])
            for i, caches in enumerate(self._kv):
                q, k, v = model.project(x, i)
                q, k = model.rotate(q, positions, i), model.rotate(k, positions, i)
                for cache, new in zip(caches, (k, _heads(v, model.config.head_dim)), strict=True):
                    cache[lo : lo + rows, :, :length] = new
                x = model.finish_layer(x, model.causal_attention(q, k, v, i), i)
            found.append(x[:, -1])
        return torch.cat(found)

    def _advance(self, x: Tensor, at: int) -> Tensor:
        """One token of every row, [rows, 1, hidden], at this position: -> [rows, hidden]. As `DenseModel`'s layers, in
        as few launches as it takes: with one token a row the host's time counts."""
        model, c = self._model, self._model.config
        position, group = torch.tensor([at], device=model.device), c.num_heads // c.num_kv_heads
        layer_of = {rope: i for i, rope in enumerate(c.layer_ropes)}
        angles = {rope: model._angles(i, position) for rope, i in layer_of.items()}
        for i, (keys, values) in enumerate(self._kv):
            q, k, v = self._queries(x, i)
            rotated = _rotate(torch.cat((q, k), 1), *angles[c.layer_ropes[i]])  # [rows, Hq + Hkv, D]
            keys[:, :, at] = rotated[:, c.num_heads :]
            values[:, :, at] = v
            # query heads of one K/V head are rows of one attention: its entries are read once
            q = rotated[:, : c.num_heads].unflatten(1, (c.num_kv_heads, group))
            out = F.scaled_dot_product_attention(q, keys[:, :, : at + 1], values[:, :, : at + 1], scale=c.scale)
            x = model.finish_layer(x, out.reshape(len(x), 1, -1), i)
        return x[:, 0]

    def _queries(self, x: Tensor, i: int) -> tuple[Tensor, ...]:
        """Queries, keys and values of one token a row, [rows, heads, D] each, by one product."""
        model, c = self._model, self._model.config
        weight, bias = self._joined[i]
        made = F.linear(model._norm(x[:, 0], f"layers.{i}.attn_norm"), weight, bias).unflatten(-1, (-1, c.head_dim))
        q, k, v = made.split((c.num_heads, c.num_kv_heads, c.num_kv_heads), 1)
        if c.qk_norm:
            q, k = (model._norm(y, f"layers.{i}.{part}_norm") for y, part in ((q, "q"), (k, "k")))
        return q, k, v

    def _choose(self, hidden: Tensor, draw: torch.Generator | None) -> Tensor:
        model = self._model
        head = model.embed if model.config.tie_embeddings else model.weights["head"]
        normed = model._norm(hidden, "final_norm")
        top = (normed @ head.T).topk(COMPARED if draw is None else DRAWN_FROM, -1)
        if draw is None:
            scores = (normed.float()[:, None] * head[top.indices].float()).sum(-1)
        else:  # the largest of scores with Gumbel noise is a draw from their softmax
            noise = torch.rand(top.values.shape, generator=draw, device=hidden.device).clamp_(1e-9, 1.0 - 1e-7)
            scores = top.values.float() - (-noise.log()).log()
        return top.indices.gather(1, scores.argmax(-1, keepdim=True))[:, 0]

    def _drop(self, done: Tensor, end: int) -> Tensor:
        """Rows that have ended leave; entries before `end` are kept."""
        kept = (~done).nonzero()[:, 0]
        self._row_of = self._row_of[kept]
        for i, caches in enumerate(self._kv):
            fresh = []
            for cache in caches:
                moved = torch.empty((len(kept), *cache.shape[1:]), dtype=cache.dtype, device=cache.device)
                moved[:, :, :end] = cache[:, :, :end].index_select(0, kept)
                fresh.append(moved)
            self._kv[i] = (fresh[0], fresh[1])
        return done[kept]


def _heads(v: Tensor, head_dim: int) -> Tensor:
    """[B, T, heads * D] -> [B, heads, T, D]"""
    return v.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def _joined(model: DenseModel, i: int) -> tuple[Tensor, Tensor | None]:
    """Matrices and biases of a layer's queries, keys and values, below each other."""
    weights = [model.weights[f"layers.{i}.{part}"] for part in "qkv"]
    biases = [model.weights.get(f"layers.{i}.{part}_bias") for part in "qkv"]
    given = [bias for bias in biases if bias is not None]
    return torch.cat(weights), torch.cat(given) if given else None


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[rows, heads, D], all at the position of the angles [1, D]; in float32 on the way."""
    left, right = heads.chunk(2, -1)
    return (heads * cos + torch.cat((-right, left), -1) * sin).to(heads.dtype)


def _ended(row: list[int], prompt: int, stops: Collection[int]) -> list[int]:
    """A row up to its first stop after the prompt, or to where it was left."""
    for at in range(prompt, len(row)):
        if row[at] in stops:
            return row[: at + 1]
        if row[at] < 0:
            return row[:at]
    return row
