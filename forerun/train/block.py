"""`block`: one to three layers over the target's hidden states, a block of tokens in one pass (DSpark).

Layers start as copies of the target's last ones. Context K/V is made of hidden states at a few depths, or is the
target's own of those layers, or the sum of both; with a sliding window it is the last few hundred tokens, whatever the
length of the text. With `state_input` every row starts from the vector of the token before its block, the block's
first token and what is learnt of its depth; else from that token or a mask, and all else comes through attention, which
is a third as wide in a small model. A Markov head of low rank adds what the token before makes likely, a confidence
head learns how often a row's draft is accepted. Saved in the names and with the configuration of the `speculators`
package, and with keys of our own where that has none. Knows no text and no files.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from forerun.models.config import ModelConfig, RopeConfig
from forerun.models.formats.checkpoint import expected_shapes
from forerun.models.formats.hf_config import hf_name
from forerun.models.formats.hf_writer import hf_values
from forerun.prefill.calibration.dense import MASKED_BACKENDS, DenseModel
from forerun.train.layout import RowLayout, draw_blocks
from forerun.train.loss import Outcome, Teaching
from forerun.train.parallel import in_five_bits
from forerun.train.trainer import TrainSettings

SPECULATORS_VERSION = "0.9.0"  # whose folders these are
STATE_INPUT_SCALE = 0.3  # of the vector that rows start from, before training: an embedding is about as large
OTHER_DEPTHS_SPREAD = 0.02  # of the first matrix where it reads depths other than the deepest


def default_depths(layers: int) -> tuple[int, ...]:
    """As EAGLE-3's: early, in the middle, near the end."""
    return tuple(sorted({min(max(depth, 1), layers - 1) for depth in (2, layers // 2, layers - 3)}))


def block_layers(target: ModelConfig, settings: TrainSettings) -> ModelConfig:
    """The layers of a block drafter, in the target's own sizes: Qwen 3's form with a sliding window. Those that read
    the
    target's keys have no norm on queries where the target has none."""
    normed = settings.reuse == "hidden" or target.qk_norm
    return replace(
        target,
        family="qwen3" if normed else "mistral",
        num_layers=settings.layers,
        qk_norm=normed,
        qkv_bias=False,
        post_norms=False,
        embed_scale=1.0,
        activation="silu",
        query_scale=0.0,
        rope=RopeConfig(theta=target.rope.theta),
        local_rope=None,
        sliding_window=settings.attention_window,
        window_layers=(),
        tie_embeddings=False,
    )


class BlockNetwork(DenseModel):
    """See `TrainableDrafter`."""

    extra_columns = 0

    def __init__(self, target: DenseModel, ids: Tensor, settings: TrainSettings, mask_token: int) -> None:
        """`mask_token`: whose embedding stands for the tokens to come."""
        config = block_layers(target.config, settings)
        super().__init__(config, {"embed": target.embed})
        self.settings, self._target, self.ids = settings, target, ids.to(self.device)
        self.mask_token = mask_token
        layers = target.config.num_layers
        self.depths = () if settings.reuse == "kv" else default_depths(layers)
        self.kv_layers = () if settings.reuse == "hidden" else tuple(range(layers - settings.layers, layers))
        generator = torch.Generator().manual_seed(settings.seed)
        self.trained = self._initial(target, generator)
        self.weights |= {name: value for name, value in self.trained.items() if name.startswith(("layers.", "final"))}
        self.learned: Tensor | None = self.trained["head"]

    def _initial(self, target: DenseModel, generator: torch.Generator) -> dict[str, Tensor]:
        """Layers and last norm by canonical names, what a block has beside them by the package's. `head`: what is
        trained beside the target's head or in its place, columns of the own head and of the Markov head together."""
        hidden, rank, taps, low = self.config.hidden_size, self.settings.rank, len(self.depths), self.settings.head_rank
        first = target.config.num_layers - self.config.num_layers
        found: dict[str, Tensor] = {"final_norm": target.weights["final_norm"].float().clone()}
        for name, shape in expected_shapes(self.config).items():
            if name.startswith("layers."):
                _, i, part = name.split(".")
                source = target.weights.get(f"layers.{first + int(i)}.{part}")
                same = source is not None and source.shape == shape
                found[name] = source.float().clone() if same and source is not None else torch.ones(shape)
        if taps:
            fc = torch.randn(hidden, taps * hidden, generator=generator) * OTHER_DEPTHS_SPREAD
            fc[:, -hidden:] += torch.eye(hidden)
            # the target's layer norms its input; K/V of the context is made without that norm
            found |= {"fc.weight": fc, "hidden_norm.weight": found["layers.0.attn_norm"].clone()}
        if taps and self.settings.state_norms:
            found |= {f"fc_norm.{i}.weight": torch.ones(hidden) for i in range(taps)}
        if taps and self.settings.state_input:
            found["state_in.weight"] = torch.eye(hidden) * STATE_INPUT_SCALE
            found["depth_embed.weight"] = torch.zeros(self.settings.tokens, hidden)
        up = torch.zeros(len(self.ids), 0)
        if low:
            left, scale, right = torch.linalg.svd(self._target_head().float().cpu(), full_matrices=False)
            up, found["head_down.weight"] = left[:, :low] * scale[:low], right[:low].clone()
        found |= {
            "markov_head.markov_w1.weight": torch.randn(self.config.vocab_size, rank, generator=generator) * 0.1,
            "head": torch.cat((up, torch.zeros(len(self.ids), rank)), 1),
            "confidence_head.proj.weight": torch.zeros(1, (low or hidden) + rank),
            "confidence_head.proj.bias": torch.zeros(1),
        }
        if self.settings.state_input:  # which other engines cannot read anyway
            found["confidence_head.odds"] = torch.ones(1)
        return {name: value.to(self.device).requires_grad_() for name, value in found.items()}

    def parameters(self) -> list[Tensor]:
        return list(self.trained.values())

    def quick(self) -> list[Tensor]:
        return []

    def matrices(self) -> list[Tensor]:
        own = ("fc.weight", "state_in.weight")
        return [t for name, t in self.trained.items() if t.ndim == 2 and (name.startswith("layers.") or name in own)]

    def layout(self, length: int, tokens: int, generator: torch.Generator) -> RowLayout:
        return draw_blocks(length, tokens, self.settings.attention_window, generator, self.device)

    def linear(self, x: Tensor, i: int, part: str) -> Tensor:
        weight = self.weights[f"layers.{i}.{part}"].to(x.dtype)
        if self.settings.bits == 5:  # the gradient goes through as if it were not rounded
            weight = weight + (in_five_bits(weight.detach()) - weight.detach())
        return F.linear(x, weight)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.trained.get(name)
        return F.rms_norm(x, (x.shape[-1],), None if weight is None else weight.to(x.dtype), self.config.norm_eps)

    def _context(self, teaching: Teaching, layout: RowLayout) -> Tensor | None:
        """[B, T, hidden] of the positions that have hidden states; zeros where they are missing."""
        states = teaching.hidden
        if not states:
            return None
        if self.settings.state_norms:
            states = [self._norm(state, f"fc_norm.{i}.weight") for i, state in enumerate(states)]
        joined = torch.cat(states, -1)  # [B, T, taps * hidden]
        context = self._norm(F.linear(joined, self.trained["fc.weight"].to(joined.dtype)), "hidden_norm.weight")
        known = torch.arange(joined.shape[1], device=self.device) >= layout.first_known
        return context * known[:, None].to(context.dtype)

    def rows(self, tokens: Tensor, teaching: Teaching, layout: RowLayout) -> Tensor:
        context = self._context(teaching, layout)
        x = self._first(tokens, context, layout)
        for i in range(self.config.num_layers):
            before = self._before(context, teaching.kv[i] if teaching.kv else None, i)
            x = self.finish_layer(x, self._attend(x, before, layout, i), i)
        previous = F.embedding(tokens[:, layout.positions], self.trained["markov_head.markov_w1.weight"])
        read = self._norm(x, "final_norm")
        if self.settings.head_rank:
            read = F.linear(read, self.trained["head_down.weight"].to(x.dtype))
        return torch.cat((read, previous.to(x.dtype)), -1)

    def _first(self, tokens: Tensor, context: Tensor | None, layout: RowLayout) -> Tensor:
        """What the first layer reads of each row."""
        anchored = F.embedding(tokens[:, layout.anchors], self.embed)
        if not self.settings.state_input:
            return torch.where(layout.depths[:, None] == 0, anchored, self.embed[self.mask_token])
        assert context is not None
        added = F.linear(context, self.trained["state_in.weight"].to(context.dtype))[:, layout.anchors - 1]
        return anchored + added + self.trained["depth_embed.weight"].to(context.dtype)[layout.depths]

    def _before(self, context: Tensor | None, kv: tuple[Tensor, Tensor] | None, i: int) -> tuple[Tensor, Tensor]:
        """Keys (rotated) and values of the text, [B, Hkv, T, D] each: made of hidden states, the target's, or both."""
        if context is None:
            assert kv is not None
            return kv
        k, v = self.linear(context, i, "k"), self.linear(context, i, "v")
        if self.config.qk_norm:
            k = self._head_norm(k, f"layers.{i}.k_norm")
        keys = self.rotate(k, torch.arange(k.shape[1], device=self.device), i)
        values = v.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
        return (keys, values) if kv is None else (keys + kv[0], values + kv[1])

    def _attend(self, x: Tensor, before: tuple[Tensor, Tensor], layout: RowLayout, i: int) -> Tensor:
        """Rows over the context and their own block; -> [B, rows, Hq * D]."""
        q, k, v = self.project(x, i)
        own = self.rotate(k, layout.positions, i), v.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
        group, mask = self.config.num_heads // self.config.num_kv_heads, layout.hidden.to(x.dtype)
        keys, values = (torch.cat(pair, 2).repeat_interleave(group, 1) for pair in zip(before, own, strict=True))
        with sdpa_kernel(MASKED_BACKENDS) if x.is_cuda else nullcontext():
            out = F.scaled_dot_product_attention(
                self.rotate(q, layout.positions, i), keys, values, attn_mask=mask, scale=self.config.scale
            )
        return out.transpose(1, 2).flatten(2)

    def _target_head(self) -> Tensor:
        target = self._target
        return (target.embed if target.config.tie_embeddings else target.weights["head"])[self.ids]

    def head(self) -> Tensor:
        return self._target_head()[:, :0] if self.settings.head_rank else self._target_head()

    def learn_confidence(self, rows: Tensor, outcome: Outcome) -> None:
        """Cross entropy to what is accepted; the layers do not change for it."""
        weight, bias = (self.trained[f"confidence_head.proj.{name}"] for name in ("weight", "bias"))
        score, odds = F.linear(rows.float(), weight, bias)[..., 0], self.trained.get("confidence_head.odds")
        if odds is not None and outcome.odds is not None:
            score = score + odds * outcome.odds
        loss = F.binary_cross_entropy_with_logits(score, outcome.accepted, outcome.weights, reduction="sum")
        loss.backward()

    def saved(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Configuration and tensors as the `speculators` package has them."""
        layers = self.settings.layers
        sliding = {"layer_types": ["sliding_attention"] * layers, "max_window_layers": 0, "attention_bias": False}
        config = {
            "architectures": ["DSparkDraftModel"],
            "speculators_model_type": "dspark",
            "speculators_version": SPECULATORS_VERSION,
            "transformer_layer_config": hf_values(self.config) | sliding,
            "draft_vocab_size": len(self.ids),
            "block_size": self.settings.tokens,
            "aux_hidden_state_layer_ids": list(self.depths),
            "mask_token_id": self.mask_token,
            "sample_from_anchor": True,
            "sliding_window_non_causal": False,
            "markov_rank": self.settings.rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
            "tie_word_embeddings": False,
            "fc_norm": bool(self.depths) and self.settings.state_norms,
            "reuse": self.settings.reuse,
            "head_rank": self.settings.head_rank,
            "bits": self.settings.bits,
            "state_input": self.settings.state_input,
            "confidence_odds": "confidence_head.odds" in self.trained,
        }
        tensors = {name: value.detach().cpu().clone() for name, value in self.trained.items()}
        if self.settings.bits == 5:
            matrices = [name for name, value in tensors.items() if name.startswith("layers.") and value.ndim == 2]
            tensors |= {name: in_five_bits(tensors[name]) for name in matrices}
        own, markov = tensors.pop("head").split((self.settings.head_rank, self.settings.rank), 1)
        tensors["markov_head.markov_w2.weight"] = markov.clone()
        if self.settings.head_rank:
            tensors["lm_head.weight"] = own.clone()
        return config, {_saved_name(name): value for name, value in tensors.items()}

    def go_on_from(self, tensors: dict[str, Tensor]) -> None:
        """Start from what `saved` gave of a drafter of the same sizes and vocabulary. Layers that it does not have come
        last and change nothing yet."""
        head = [tensors["markov_head.markov_w2.weight"]]
        head = [tensors["lm_head.weight"], *head] if self.settings.head_rank else head
        for name, own in self.trained.items():
            if name == "head":
                own.data.copy_(torch.cat(head, 1))
            elif _saved_name(name) in tensors:
                own.data.copy_(tensors[_saved_name(name)])
            elif name.endswith((".o", ".down")):
                own.data.zero_()


def _saved_name(name: str) -> str:
    """Of a trained tensor, as the `speculators` package has it."""
    return hf_name(name, "qwen3") if name.startswith("layers.") or name == "final_norm" else name
