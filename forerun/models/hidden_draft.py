"""Drafters on the target's hidden states, as models beside the decoder they draft for: heads, blocks, EAGLE-3.

Each turns the hidden states of a few depths into one vector a token (`project`), and vectors into logits over its own
vocabulary. Layers run on the decoder's own attention and matrix products. Knows batches and weights; no tree, no
request and no file.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.core import KV, HostBatch, KVShape
from forerun.errors import BadRequest
from forerun.models.build import attention_backend, cuda_precision
from forerun.models.config import ModelConfig
from forerun.models.cpu.attention import PagedCpuAttention
from forerun.models.cpu.block_linear import BlockLinear, PackedBlocks
from forerun.models.cpu.block_pass import BlockPass
from forerun.models.cpu.ranking import BlockRanking
from forerun.models.decoder import Decoder, Layer
from forerun.models.execution.hidden_features import FeatureShape
from forerun.models.formats.checkpoint import Checkpoint
from forerun.models.formats.hidden_drafter import HiddenDrafterWeights
from forerun.models.linear import CPU_PRECISIONS, Linear, Norm, Precision, rms_norm
from forerun.models.online_adapter import OnlineAdapter
from forerun.models.online_habits import OnlineHabits

BLOCK_COLUMNS = 32  # values of a block: matrices whose rows are no multiple stay in float32
# Of a drafter's matrices beside a target of packed blocks; layers may be trained for 5. In 5 where they were trained
# for 8: 2.01 tokens a round in place of 2.12, for 0.11 ms of 7 (SmolLM2, 3 nodes)
DRAFT_BITS = 8
ODDS_RANGE = (1e-4, 1.0 - 1e-4)  # of a probability whose odds a confidence head reads, as in training
KEPT_EMBEDDINGS = 2048  # rows of the embedding: 5 MB of 576 values each
COMPARED_ROWS = 64  # of an embedding, to see whether it is the target's


def draft_precision(target: Decoder) -> Precision:
    """As the target computes: on its C kernels in 8 bits, on CUDA in its own dtype, else in float32."""
    if target.device.type == "cuda":
        return cuda_precision(target.dtype)
    if isinstance(target.attention, PagedCpuAttention):
        return Precision("file", BlockLinear, torch.float32)
    return CPU_PRECISIONS["float32"] if target.dtype == torch.float32 else Precision("bf16", Linear, target.dtype)


def join_states(hidden: list[Tensor], norms: list[Norm], dtype: torch.dtype) -> Tensor:
    """Hidden states [T, hidden] side by side, each with a norm of its own where there are norms."""
    parts = [h.to(dtype) for h in hidden]
    return torch.cat([rms_norm(*each) for each in zip(parts, norms, strict=True)] if norms else parts, -1)


class HiddenDraftModel:
    """What all kinds have: the vocabulary they draft from, and the target's head over it."""

    layers: ModelConfig | None = None  # of those that keep K/V of their own
    adapter: OnlineAdapter | None = None  # what it learns while serving: in steps of training,
    habits: OnlineHabits | None = None  # and by counting tokens

    def __init__(self, weights: HiddenDrafterWeights, checkpoint: Checkpoint, target: Decoder, context: int) -> None:
        self.kind, self.tokens, self.source = weights.kind, weights.tokens, weights.source
        self.depths, self.width = weights.depths(target.config), target.config.hidden_size
        self.target, self.device, self.dtype, self.max_context = target, target.device, target.dtype, context
        self.ids, self.vocab = weights.draft_ids.to(target.device), target.config.vocab_size
        self._precision, self._tensors = draft_precision(target), weights.tensors
        self._layer_bits = int(weights.config.get("bits", DRAFT_BITS))
        self.identity, self.outcomes = weights.identity, weights.outcomes
        self._own_head = weights.tensors.get("lm_head.weight")
        self._learnt = {name: value for name, value in weights.tensors.items() if name.startswith("adapter.")}
        self._load(weights, checkpoint)
        self._tensors = {}  # they have been packed

    def _load(self, weights: HiddenDrafterWeights, checkpoint: Checkpoint) -> None:
        raise NotImplementedError

    @property
    def on_pages(self) -> list[KVShape]:
        """What it keeps of every token on the pool's pages: its vector, and K/V of its own layers."""
        vectors = [FeatureShape(self.width // 2)] if self.depths else []
        return [*vectors, *([] if self.layers is None else [self.layers])]

    def project(self, hidden: list[Tensor]) -> Tensor:
        """Hidden states at `depths`, [T, hidden] each, to what is kept of each token: [T, width]."""
        raise NotImplementedError

    def _apply_head(self, rows: Tensor) -> Tensor:
        raise NotImplementedError

    def row_logits(self, rows: Tensor, adapted: bool = True) -> Tensor:
        """[.., hidden] -> [.., draft vocabulary] float32; `adapted`: with what was learnt while serving."""
        flat, adapter = rows.flatten(0, -2), self.adapter if adapted else None
        if adapter is None:
            return self._apply_head(flat.to(self.dtype)).float().unflatten(0, rows.shape[:-1])
        logits = adapter.change_logits(self._apply_head(adapter.change_rows(flat).to(self.dtype)).float())
        return logits.unflatten(0, rows.shape[:-1])

    def adapt(self, checkpoint: Checkpoint, learning: bool) -> None:
        """Apply what was learnt before; `learning`: and learn from now on."""
        name = "embed" if checkpoint.config.tie_embeddings else "head"
        head = self._own_head if self._own_head is not None else checkpoint.rows(name, self.ids.cpu())
        bias = self.bias if isinstance(self, BlockModel) and self.has_markov else None
        self.adapter = OnlineAdapter(head.to(self.device).float(), self.ids, self.vocab, bias, learning)
        self.adapter.load(self._learnt)
        self.habits = OnlineHabits(learning)
        self.habits.load(self._learnt)

    def learnt(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """What was learnt while serving, as a file holds it, and counts of what happened."""
        assert self.adapter is not None and self.habits is not None
        return self.adapter.tensors() | self.habits.tensors(), self.adapter.stats | self.habits.stats

    def full_vocab(self, logits: Tensor) -> Tensor:
        """[N, draft vocabulary] to [N, V]; tokens that are never drafted are impossible."""
        if logits.shape[-1] == self.vocab:
            return logits
        return logits.new_full((*logits.shape[:-1], self.vocab), float("-inf")).index_copy_(-1, self.ids, logits)

    # -- building ------------------------------------------------------------------------------------------------------

    def _linear(self, weight: Tensor, bits: int = DRAFT_BITS) -> Linear:
        weight = weight.to(self.device)
        if self._precision.linear is BlockLinear:
            packs = weight.shape[1] % BLOCK_COLUMNS == 0
            return BlockLinear([PackedBlocks.quantised(weight, bits)]) if packs else Linear(weight.float())
        return self._precision.linear(weight.to(self._precision.dtype))

    def _norm(self, name: str, eps: float) -> Norm:
        return self._tensors[name].to(self.device, self.dtype), eps

    def _head(self, checkpoint: Checkpoint) -> Linear:
        own = self._tensors.get("lm_head.weight")
        name = "embed" if checkpoint.config.tie_embeddings else "head"
        return self._linear(checkpoint.rows(name, self.ids.cpu()) if own is None else own)

    def _embedding(self, checkpoint: Checkpoint) -> Callable[[Tensor], Tensor]:
        """Its own where it was trained, else the target's."""
        own = self._tensors.get("embed_tokens.weight")
        if own is not None:
            ids = torch.linspace(0, len(own) - 1, COMPARED_ROWS).long()
            if not torch.allclose(own[ids].float(), checkpoint.rows("embed", ids).float(), rtol=2e-2, atol=1e-4):
                table = own.to(self.device, self.dtype)
                return lambda tokens: table[tokens]
        return lambda tokens: self.target.lookup(tokens).to(self.dtype)

    def _layer(self, i: int, eps: float, qk_norm: bool) -> Layer:
        def part(name: str) -> Tensor:
            return self._tensors[f"layers.{i}.{name}.weight"]

        q_norm, k_norm = (f"layers.{i}.self_attn.{n}_norm.weight" for n in "qk")
        return Layer(
            attn_norm=self._norm(f"layers.{i}.input_layernorm.weight", eps),
            qkv=self._linear(torch.cat([part(f"self_attn.{n}_proj") for n in "qkv"]), self._layer_bits),
            o=self._linear(part("self_attn.o_proj"), self._layer_bits),
            mlp_norm=self._norm(f"layers.{i}.post_attention_layernorm.weight", eps),
            gate_up=self._linear(torch.cat((part("mlp.gate_proj"), part("mlp.up_proj"))), self._layer_bits),
            down=self._linear(part("mlp.down_proj"), self._layer_bits),
            qk_norms=(self._norm(q_norm, eps), self._norm(k_norm, eps)) if qk_norm else None,
        )

    def _decoder(self, config: ModelConfig, checkpoint: Checkpoint) -> Decoder:
        return Decoder(
            config=config,
            lookup=self._embedding(checkpoint),
            layers=[self._layer(i, config.norm_eps, config.qk_norm) for i in range(config.num_layers)],
            final_norm=self._norm("norm.weight", config.norm_eps),
            head=self._head(checkpoint),
            attention=attention_backend(config, self.device, self._precision, self.max_context, same_bits=False),
            dtype=self.dtype,
            device=self.device,
        )


class HeadsModel(HiddenDraftModel):
    """Medusa: the last hidden state through one residual block for each token to come."""

    def _load(self, weights: HiddenDrafterWeights, checkpoint: Checkpoint) -> None:
        blocks = [self._tensors[f"heads.{j}.weight"] for j in range(self.tokens)]
        self._blocks, self._vocab_head = self._linear(torch.cat(blocks)), self._head(checkpoint)
        norm = checkpoint.tensor("final_norm").float().to(self.device, self.dtype)
        self._final_norm: Norm = (norm, checkpoint.config.norm_eps)

    def project(self, hidden: list[Tensor]) -> Tensor:
        return rms_norm(hidden[0].to(self.dtype), self._final_norm)

    def logits(self, features: Tensor) -> Tensor:
        """[N, width] of the tokens before the last ones -> [N, tokens, draft vocabulary] float32."""
        return self.row_logits(self.rows(features))

    def rows(self, features: Tensor) -> Tensor:
        """What the head reads: [N, tokens, hidden] float32."""
        added = F.silu(self._blocks(features).float()).unflatten(-1, (self.tokens, -1))
        return features.float()[:, None] + added

    def _apply_head(self, rows: Tensor) -> Tensor:
        return self._vocab_head(rows)


@dataclass
class BlockRows:
    """Of one pass: logits of each drafted position before the tokens between are known, and what its heads read."""

    logits: Tensor  # [N, tokens, draft vocabulary] float32
    hidden: Tensor  # [N, tokens, hidden], or as wide as the rank of its own head


class BlockModel(HiddenDraftModel):
    """DFlash and DSpark: few layers over K/V made of the target's hidden states; the last token and masks after it are
    rows of one pass. A low-rank Markov head adds what the token before makes likely, a confidence head rates it."""

    block_pass: BlockPass | None = None

    def _load(self, weights: HiddenDrafterWeights, checkpoint: Checkpoint) -> None:
        self.layers = config = weights.layers
        self.decoder = self._decoder(config, checkpoint)
        self._embeddings: dict[int, Tensor] = {}
        self.kv_layers = weights.kv_layers(checkpoint.config)
        each = range(len(self.depths)) if weights.config.get("fc_norm") else ()
        self._each_norm = [self._norm(f"fc_norm.{i}.weight", config.norm_eps) for i in each]
        self._context_kv: list[Linear] = []
        if self.depths:
            self._fc = self._linear(self._tensors["fc.weight"])
            self._hidden_norm = self._norm("hidden_norm.weight", config.norm_eps)
            parts = [
                [self._tensors[f"layers.{i}.self_attn.{n}_proj.weight"] for n in "kv"] for i in range(config.num_layers)
            ]
            self._context_kv = [self._linear(torch.cat(pair), self._layer_bits) for pair in parts]
        down = self._tensors.get("head_down.weight")
        self._head_down = None if down is None else self._linear(down)
        self.first_row = 0 if weights.samples_anchor else 1
        whole = bool(weights.config.get("sliding_window_non_causal", False))
        self._sees_block = [window is None or whole for window in config.windows]  # of each layer: in both directions
        own, token = self._tensors.get("embed_tokens.weight"), int(weights.config["mask_token_id"])
        mask = checkpoint.rows("embed", torch.tensor([token]))[0] if own is None else own[token]
        self._mask = mask.to(self.device, self.dtype)
        self.state_input = bool(weights.config.get("state_input", False))
        if self.state_input:
            self._state_in = self._linear(self._tensors["state_in.weight"])
            self._depth_embed = self._tensors["depth_embed.weight"].to(self.device, self.dtype)
        w1, w2 = (self._tensors.get(f"markov_head.markov_w{n}.weight") for n in (1, 2))
        self._previous = None if w1 is None else w1.to(self.device, torch.float32)  # [V, r]
        self._next = None if w2 is None else w2.to(self.device, torch.float32)  # [draft vocabulary, r]
        self._confidence = None
        if "confidence_head.proj.weight" in self._tensors:
            names = ("confidence_head.proj.weight", "confidence_head.proj.bias")
            self._confidence = tuple(self._tensors[name].to(self.device, torch.float32) for name in names)
        odds = self._tensors.get("confidence_head.odds")
        self._confidence_odds = None if odds is None else odds.to(self.device, torch.float32)

    @cached_property
    def ranking(self) -> BlockRanking:
        """What ranks its tokens on a CPU."""
        sure = None if self._confidence is None else (self._confidence[0], self._confidence[1])
        return BlockRanking(self.ids, self._previous, self._next, sure, self._confidence_odds)

    def project(self, hidden: list[Tensor]) -> Tensor:
        if self.block_pass is not None:
            return self.block_pass.vectors(hidden)
        return rms_norm(self._fc(join_states(hidden, self._each_norm, self.dtype)), self._hidden_norm)

    def use_pages(self, kv: KV) -> None:
        """The pages its K/V lies on are known: from now on one block runs in few calls, where that is possible."""
        attention, plain = self.decoder.attention, self.state_input and not self.kv_layers and not self._each_norm
        whole = self._head_down is not None or any(self._sees_block) or self.first_row
        if not plain or whole or not isinstance(attention, PagedCpuAttention) or not isinstance(self._fc, BlockLinear):
            return
        linears, fused = (
            [*self._context_kv, self._state_in, self.decoder.head],
            attention.fused(self.decoder.layers, kv),
        )
        if fused is not None and BlockPass.possible(linears):
            made = (self._fc, self._hidden_norm, self._context_kv, self._state_in, self._depth_embed, len(self.depths))
            self.block_pass = BlockPass(self.decoder, fused, *made)  # type: ignore[arg-type]

    def run_one(
        self, token: int, vector: Tensor, pages: array[int], first: int, rows: int, page_size: int
    ) -> BlockRows:
        """`run` of one block whose token stands at entry `first`, by `block_pass`."""
        assert self.block_pass is not None
        logits, hidden = self.block_pass.run(self._embedding_of(token), vector, pages, first, rows, page_size)
        if self.adapter is not None and self.adapter.active:
            logits = self.row_logits(hidden)
        return BlockRows(logits[None], hidden[None])

    def write_context(self, features: Tensor | None, positions: Tensor, slots: Tensor, kv: KV, target_kv: KV) -> None:
        """K/V of tokens that the target has run, at positions [T], to slots [T]: made of vectors [T, width] (None:
        there
        are none, which counts as zeros), beside the target's own where it is read."""
        c, attention = self.decoder.config, self.decoder.attention
        if features is not None and self.block_pass is not None:
            self.block_pass.write_context(features, positions, slots)
            return
        for i in range(c.num_layers):
            if features is None:
                for cache in kv[i]:
                    cache.index_fill_(0, slots, 0.0)
            else:
                norms = self.decoder.layers[i].qk_norms
                made = self._context_kv[i](features)
                attention.write_rows(made, i, kv[i], positions, slots, None if norms is None else norms[1])
            if self.kv_layers:
                for cache, source in zip(kv[i], target_kv[self.kv_layers[i]], strict=True):
                    cache.index_add_(0, slots, source.index_select(0, slots).to(cache.dtype))

    @torch.inference_mode()
    def run(self, batch: HostBatch, kv: KV, rows: int, states: Tensor | None = None) -> BlockRows:
        """A pass of blocks of `rows` rows each: the first row of a block is a token, the others are masks. `states`:
        [blocks, width] vectors of the tokens before, where rows start from them."""
        decoder, count = self.decoder, len(batch.tokens) // rows
        tokens = self._embedded(batch.tokens[::rows])
        if self.state_input:
            assert states is not None
            depth = self._depth_embed[:rows]
            if rows > len(depth):  # a pass of more rows than a block has, to be timed
                depth = torch.cat((depth, depth[-1:].expand(rows - len(depth), -1)))
            x = ((tokens + self._state_in(states))[:, None] + depth).flatten(0, 1)
        else:
            x = self._mask.expand(len(batch.tokens), -1).clone()
            x[::rows] = tokens
        ways = set(self._sees_block)
        planned = {way: (_whole_blocks(batch, rows) if way else batch).to(self.device) for way in ways}
        for way, same in groupby(range(len(self._sees_block)), self._sees_block.__getitem__):
            which = list(same)
            decoder.attention.plan(planned[way])
            x = decoder.run_layers(x, planned[way], kv, range(which[0], which[-1] + 1))
        hidden = rms_norm(x.unflatten(0, (count, rows))[:, self.first_row :], decoder.final_norm)
        if self._head_down is not None:
            hidden = self._head_down(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])
        return BlockRows(self.row_logits(hidden), hidden.float())

    def _embedded(self, tokens: np.ndarray) -> Tensor:
        """[N, hidden]; on a CPU rows are kept, as reading one out of packed blocks takes many small operators."""
        if self.device.type != "cpu":
            return self.decoder.lookup(torch.from_numpy(tokens.copy()).to(self.device)).to(self.dtype)
        return torch.cat([self._embedding_of(token) for token in tokens.tolist()])

    def _embedding_of(self, token: int) -> Tensor:
        """[1, hidden]"""
        found = self._embeddings.get(token)
        if found is None:
            if len(self._embeddings) >= KEPT_EMBEDDINGS:
                self._embeddings.clear()
            found = self._embeddings[token] = self.decoder.lookup(torch.tensor([token])).to(self.dtype)
        return found

    def _apply_head(self, rows: Tensor) -> Tensor:
        return self.decoder.head(rows)

    # -- what depends on the token before ------------------------------------------------------------------------------

    @property
    def has_markov(self) -> bool:
        return self._previous is not None

    def bias(self, before: Tensor, columns: Tensor | None = None) -> Tensor:
        """What tokens [..., P] before a position add to its logits: [..., P, draft vocabulary], or to `columns`
        [..., C] alone: [..., P, C]."""
        assert self._previous is not None and self._next is not None
        rows = self._next if columns is None else self._next[columns]  # [.., C, r]
        return self._previous[before] @ rows.transpose(-1, -2)

    def confidence(self, hidden: Tensor, before: Tensor, top: Tensor | None = None) -> Tensor | None:
        """How probable it is that the draft is right after tokens [..., P], of rows hidden [..., h]: [..., P]. `top`:
        [..., P] the probability of the likeliest token there."""
        if self._confidence is None:
            return None
        weight, bias = self._confidence
        score = (hidden @ weight[0, : hidden.shape[-1]])[..., None] + bias
        if weight.shape[1] > hidden.shape[-1] and self._previous is not None:
            score = score + self._previous[before] @ weight[0, hidden.shape[-1] :]
        if self._confidence_odds is not None and top is not None:
            score = score + self._confidence_odds * top.clamp(*ODDS_RANGE).logit()
        return score.expand(*before.shape).sigmoid()


def _whole_blocks(batch: HostBatch, rows: int) -> HostBatch:
    """The same rows where each sees all of its own block."""
    last = batch.kv_lens.reshape(-1, rows)[:, -1:]
    return replace(batch, kv_lens=last.repeat(rows, 1).reshape(-1).copy())


class EagleModel(HiddenDraftModel):
    """EAGLE-3: a token's embedding beside a vector of the token before it, the target's or, while drafting, its own."""

    def _load(self, weights: HiddenDrafterWeights, checkpoint: Checkpoint) -> None:
        self.layers = config = weights.layers
        self.decoder = self._decoder(config, checkpoint)
        self._fc, eps = self._linear(self._tensors["fc.weight"]), config.norm_eps
        self._input_norm = self._norm("input_norm.weight", eps) if weights.config.get("norm_before_fc") else None
        each = range(len(self.depths)) if weights.config.get("fc_norm") else ()
        self._each_norm = [self._norm(f"fc_norm.{i}.weight", eps) for i in each]
        self._hidden_norm = self._norm("layers.0.hidden_norm.weight", eps)
        self._norm_before_residual = bool(weights.config.get("norm_before_residual", False))
        self._norm_output = bool(weights.config.get("norm_output", False))

    def project(self, hidden: list[Tensor]) -> Tensor:
        joined = join_states(hidden, self._each_norm, self.dtype)
        return self._fc(joined if self._input_norm is None else rms_norm(joined, self._input_norm))

    @torch.inference_mode()
    def run(self, batch: HostBatch, before: Tensor, kv: KV) -> tuple[Tensor, Tensor]:
        """`before`: [T, width] of the token before each. Logits [N, V] float32 of the wanted rows, and what each row
        hands on [T, width]."""
        decoder, rows = self.decoder, batch.to(self.device)
        decoder.attention.plan(rows)
        w = decoder.layers[0]
        embedded, normed = rms_norm(decoder.lookup(rows.tokens), w.attn_norm), rms_norm(before, self._hidden_norm)
        q = decoder.attention.store(w.qkv(torch.cat((embedded, normed), -1)), 0, kv[0], w.qk_norms)
        residual = normed if self._norm_before_residual else before
        x = w.o(decoder.attention.attend(q, 0, kv[0]), add=residual.contiguous())
        x = decoder.run_blocks(x, kv, (1,))
        x = decoder.run_layers(x, rows, kv, range(1, decoder.config.num_layers))
        hidden = rms_norm(x, decoder.final_norm)
        logits = decoder.head(hidden.index_select(0, rows.logits_indices)).float()
        return self.full_vocab(logits), hidden if self._norm_output else x


_MODELS: dict[str, type[HiddenDraftModel]] = {"heads": HeadsModel, "block": BlockModel, "eagle3": EagleModel}


def build_hidden_draft(
    weights: HiddenDrafterWeights, checkpoint: Checkpoint, target: Decoder, context: int, adapt: bool = False
) -> HiddenDraftModel:
    """`weights.check(checkpoint)` passed; `target` is the decoder of that checkpoint. `adapt`: it learns while serving;
    what an earlier process learnt is used either way."""
    model = _MODELS[weights.kind](weights, checkpoint, target, context)
    if adapt or model._learnt:
        if model.kind == "eagle3":
            raise BadRequest("adapt is for drafters of kind block and heads, this is EAGLE-3", "leave adapt out")
        model.adapt(checkpoint, adapt)
    return model
