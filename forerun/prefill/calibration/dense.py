"""The same decoder as a plain batched network, for calibration only: windows of equal length, gradients, no pages.

The engine's kernels are made for inference, not for training: they write in place, pack weights and keep no graph. This
network is slow and differentiable; a test compares it with the engine's decoder. It knows nothing of maps or losses.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from forerun.core.progress import track
from forerun.models.config import ModelConfig
from forerun.models.formats.checkpoint import Checkpoint, expected_shapes
from forerun.models.rope import RopeTable

MAX_WINDOW_TOKENS = 32_768
MASKED_SCORE = -30_000.0  # added to the score of an entry that a row may not attend to
# With the kernel that CUDA chooses by itself the gradients of masked attention are not numbers (torch 2.11, H200).
MASKED_BACKENDS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

# Called with (layer, rotated queries [B, Hq, R, D], rotated keys [B, Hkv, T, D], the queries' positions [R] or [B, R])
AttentionHook = Callable[[int, Tensor, Tensor, Tensor], None]


@dataclass
class LayerActivations:
    """Of one pass: inputs of every layer and the last one's output, K before rotation and V of every layer."""

    hidden: list[Tensor]  # [B, T, hidden] each
    kv: list[tuple[Tensor, Tensor]]  # [B, T, kv_size] each


class DenseModel:
    def __init__(self, config: ModelConfig, weights: dict[str, Tensor]) -> None:
        self.config, self.weights = config, weights
        self.embed = weights["embed"]
        self.device, self.dtype = self.embed.device, self.embed.dtype
        ropes = {config.layer_ropes[i] for i in range(config.num_layers)}
        length = min(config.max_context, MAX_WINDOW_TOKENS)
        self._ropes = {rope: RopeTable(rope, config.head_dim, length, self.device).table for rope in ropes}

    @classmethod
    def from_checkpoint(
        cls, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, quiet: bool = False
    ) -> DenseModel:
        shapes, weights = expected_shapes(checkpoint.config), {}
        for name in track(list(shapes), "reading weights", quiet):
            weights[name] = checkpoint.tensor(name, device).to(device, dtype)
        return cls(checkpoint.config, weights)

    # -- whole passes --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def trace(
        self, tokens: Tensor, layers: int | None = None, hook: AttentionHook | None = None, keep_kv: bool = True
    ) -> LayerActivations:
        """Run windows [B, T] through the first `layers` layers; `hook` is called in each."""
        x = self.embed_tokens(tokens)
        found = LayerActivations([x], [])
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        for i in range(self.config.num_layers if layers is None else layers):
            q, k, v = self.project(x, i)
            if keep_kv:
                found.kv.append((k, v))
            q, k = self.rotate(q, positions, i), self.rotate(k, positions, i)
            if hook is not None:
                hook(i, q, k, positions)
            x = self.finish_layer(x, self.causal_attention(q, k, v, i), i)
            found.hidden.append(x)
        return found

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.embed) * self.config.embed_scale

    def logits(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [..., V] in the network's dtype."""
        head = self.embed if self.config.tie_embeddings else self.weights["head"]
        return F.linear(self._norm(x, "final_norm"), head)

    # -- parts of a layer ----------------------------------------------------------------------------------------------

    def project(self, x: Tensor, i: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys (neither rotated yet) and values: [B, T, heads * D] each."""
        h = self._norm(x, f"layers.{i}.attn_norm")
        q, k, v = (self.linear(h, i, part) for part in "qkv")
        if self.config.qk_norm:
            q, k = (self._head_norm(y, f"layers.{i}.{part}_norm") for y, part in ((q, "q"), (k, "k")))
        return q, k, v

    def rotate(self, x: Tensor, positions: Tensor, i: int) -> Tensor:
        """[B, T, heads * D] -> [B, heads, T, D], rotated to positions [T] or [B, T]."""
        heads = x.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
        cos, sin = self._angles(i, positions)
        left, right = heads.chunk(2, -1)
        return (heads * cos + torch.cat((-right, left), -1) * sin).to(x.dtype)  # in float32 on the way

    def causal_attention(self, q: Tensor, k: Tensor, v: Tensor, i: int) -> Tensor:
        """Over the entries up to each row's own: q, k rotated [B, heads, T, D], v [B, T, kv_size] -> [B, T, Hq * D]."""
        v = v.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
        window = self.config.windows[i]
        if window is None or q.shape[2] <= window:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.config.scale, enable_gqa=True)
            return out.transpose(1, 2).flatten(2)
        positions = torch.arange(q.shape[2], device=q.device)[None]
        return self.masked_attention(q, k, v.transpose(1, 2).flatten(2), positions, i)

    def masked_attention(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, i: int) -> Tensor:
        """The same of rows at positions [B, R] only: q [B, Hq, R, D], k [B, Hkv, T, D], v [B, T, kv_size]."""
        v = v.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
        entry, window = torch.arange(k.shape[2], device=q.device), self.config.windows[i]
        mask = entry <= positions[..., None]  # [B, R, T]
        if window is not None:
            mask &= entry > positions[..., None] - window
        group = self.config.num_heads // self.config.num_kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        hidden = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, MASKED_SCORE)
        with sdpa_kernel(MASKED_BACKENDS) if q.is_cuda else nullcontext():
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=hidden[:, None], scale=self.config.scale)
        return out.transpose(1, 2).flatten(2)

    def attention_residual(self, attended: Tensor, i: int) -> Tensor:
        """What an attention output adds to the residual stream."""
        h = self.linear(attended, i, "o")
        return self._norm(h, f"layers.{i}.post_attn_norm") if self.config.post_norms else h

    def finish_layer(self, x: Tensor, attended: Tensor, i: int) -> Tensor:
        """A layer after its attention: output projection, residuals, MLP."""
        x = x + self.attention_residual(attended, i)
        h = self._norm(x, f"layers.{i}.mlp_norm")
        gate = self.linear(h, i, "gate")
        gate = F.silu(gate) if self.config.activation == "silu" else F.gelu(gate, approximate="tanh")
        h = self.linear(gate * self.linear(h, i, "up"), i, "down")
        return x + (self._norm(h, f"layers.{i}.post_mlp_norm") if self.config.post_norms else h)

    def linear(self, x: Tensor, i: int, part: str) -> Tensor:
        """A matrix of layer i and its bias, if it has one."""
        return F.linear(x, self.weights[f"layers.{i}.{part}"], self.weights.get(f"layers.{i}.{part}_bias"))

    # -- weights -------------------------------------------------------------------------------------------------------

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weights[name], self.config.norm_eps)

    def _head_norm(self, x: Tensor, name: str) -> Tensor:
        return self._norm(x.unflatten(-1, (-1, self.config.head_dim)), name).flatten(-2)

    def _angles(self, i: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [.., T, D], ready to be broadcast over heads."""
        cos, sin = self._ropes[self.config.layer_ropes[i]][positions].chunk(2, -1)
        cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
        return (cos, sin) if positions.dim() == 1 else (cos[:, None], sin[:, None])
