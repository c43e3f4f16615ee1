"""Workers, slowly: every key of every view turned to its position, one token of one worker at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forerun import LLM
from forerun.engine.sequence import Event
from forerun.models.decoder import Decoder
from forerun.models.linear import rms_norm
from forerun.models.rope import inverse_frequencies

PROMPT = "A lighthouse keeper counts the ships that pass and writes each name"


def tokens_of(events: list[Event], n: int) -> list[list[int]]:
    return [[token for event in events if event.index == w for token in event.token_ids] for w in range(n)]


class Reference:
    """K before rotation and V of the prompt (-1) and of each block, layer by layer; nothing is paged or batched."""

    def __init__(self, decoder: Decoder, prompt: list[int], n: int) -> None:
        self.decoder, self.n = decoder, n
        layers = range(decoder.config.num_layers)
        shape = (0, decoder.config.num_kv_heads, decoder.config.head_dim)
        self.k = {b: [torch.zeros(shape) for _ in layers] for b in range(-1, n)}
        self.v = {b: [torch.zeros(shape) for _ in layers] for b in range(-1, n)}
        self.first = self.step({-1: prompt})[-1]  # logits after the prompt

    @torch.inference_mode()
    def step(self, new: dict[int, list[int]]) -> dict[int, Tensor]:
        """Logits after the last new token of each block."""
        d = self.decoder
        x = {b: d.embed(torch.tensor(ids)) for b, ids in new.items() if ids}
        for layer in range(d.config.num_layers):
            queries = {b: self._append(b, layer, rows) for b, rows in x.items()}
            for b, q in queries.items():
                w = d.layers[layer]
                out = w.o(torch.stack([self._attend(b, layer, q, t) for t in range(len(q))]))
                out = out if w.post_attn_norm is None else rms_norm(out, w.post_attn_norm)
                x[b] = d._mlp(x[b] + out, layer)
        return {b: d.logits(rows[-1:])[0] for b, rows in x.items()}

    def _append(self, b: int, layer: int, x: Tensor) -> Tensor:
        w, c = self.decoder.layers[layer], self.decoder.config
        q, k, v = w.qkv(x, norm=w.attn_norm).split((c.q_size, c.kv_size, c.kv_size), -1)
        q, k, v = (part.view(len(x), -1, c.head_dim) for part in (q, k, v))
        if w.qk_norms is not None:
            q, k = rms_norm(q, w.qk_norms[0]), rms_norm(k, w.qk_norms[1])
        self.k[b][layer], self.v[b][layer] = torch.cat((self.k[b][layer], k)), torch.cat((self.v[b][layer], v))
        return q

    def _attend(self, b: int, layer: int, q: Tensor, t: int) -> Tensor:
        """Token t of the new ones, q [new, Hq, D], with all that it sees laid out in one line."""
        line = [-1] if b == -1 else [-1, *((b + i) % self.n for i in range(1, self.n)), b]
        hidden = len(q) - 1 - t  # tokens of its own block that come after it
        k, v = (torch.cat([cache[part][layer] for part in line]) for cache in (self.k, self.v))
        seen, c = len(k) - hidden, self.decoder.config
        k, v = self._rotate(k[:seen], layer, torch.arange(seen)), v[:seen].double()
        turned = self._rotate(q[t : t + 1], layer, torch.tensor([seen - 1]))[0]  # [Hq, D]
        first = max(0, seen - (c.windows[layer] or seen))
        share = c.num_heads // c.num_kv_heads
        out = []
        for head in range(c.num_heads):
            weights = torch.softmax(k[first:, head // share] @ turned[head] * c.scale, 0)
            out.append(weights @ v[first:, head // share])
        return torch.cat(out).float()

    def _rotate(self, x: Tensor, layer: int, positions: Tensor) -> Tensor:
        inverse, factor = inverse_frequencies(self.decoder.config.layer_ropes[layer], x.shape[-1])
        angles = (positions.double()[:, None] * inverse.double())[:, None]  # [T, 1, D / 2]
        a, b = x.double().chunk(2, -1)
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1) * factor


def replay(llm: LLM, prefixes: list[list[int]], events: list[Event]) -> None:
    """Every greedy token and log-probability of every worker, against the reference fed with the same tokens."""
    n, said = len(prefixes), tokens_of(events, len(prefixes))
    logprobs = [[p for event in events if event.index == w for p in event.logprobs] for w in range(n)]
    reference = Reference(llm.decoder, llm.encode(PROMPT), n)
    at = [0] * n
    new = {w: prefix for w, prefix in enumerate(prefixes)}
    logits = {w: reference.first for w, prefix in enumerate(prefixes) if not prefix}
    while any(at[w] < len(said[w]) for w in range(n)):
        if not logits:
            logits = reference.step(new)
            new = {}
        for w, row in logits.items():
            if at[w] == len(said[w]):
                continue
            token, expected = said[w][at[w]], torch.log_softmax(row, -1)
            assert token == int(row.argmax())
            assert logprobs[w][at[w]].logprob == pytest.approx(float(expected[token]), abs=1e-4)
            for other, value in logprobs[w][at[w]].top:
                assert value == pytest.approx(float(expected[other]), abs=1e-4)
            new[w] = [token]
            at[w] += 1
        logits = {}
