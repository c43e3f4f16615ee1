"""The one decoder: Llama, Mistral, Qwen2, Qwen3 and Gemma 3 text, told apart by their configuration alone.

`forward(batch, kv)` runs any tokens of any sequences. It knows no request, no page owner and no scheduler: what a token
sees and where its K/V goes is in the batch, how attention is done is the backend's, how products are done the linears'.
`embed`, `run_layers` and `logits` are the three parts of a forward, for callers that run some layers only; `run_blocks`
is for those that skip some: block 2 i is the attention of layer i, block 2 i + 1 its MLP. `AllLayersKV` writes and
reads rows of its K/V that no forward computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from forerun.core import KV, TokenBatch
from forerun.models.attention import AttentionBackend
from forerun.models.config import ModelConfig
from forerun.models.linear import Linear, Norm, Rotation, rms_norm
from forerun.models.rope import rotate

MIN_FLOAT8_ROWS = 1024  # fewer gain little by float8


@dataclass
class Layer:
    """Weights of one block; q/k/v and gate/up are fused."""

    attn_norm: Norm
    qkv: Linear
    o: Linear
    mlp_norm: Norm
    gate_up: Linear
    down: Linear
    qk_norms: tuple[Norm, Norm] | None = None
    post_attn_norm: Norm | None = None
    post_mlp_norm: Norm | None = None
    float8_mlp: Callable[[Tensor], Tensor] | None = None  # the whole MLP for MIN_FLOAT8_ROWS rows and more


# Called in every layer with what runs through it, while it runs: (layer, its input [T, hidden] in the decoder's own
# basis, rotated queries [T, Hq, D], attention output [T, Hq * D]); at last with the last layer's output and two Nones.
Watch = Callable[[int, Tensor, Tensor | None, Tensor | None], None]


@dataclass(frozen=True)
class Taps:
    """What a caller wants to see of a forward beside the logits."""

    hidden: frozenset[int] = frozenset()  # inputs of these layers; num_layers: the last layer's output
    kv: frozenset[int] = frozenset()  # K (rotated) and V of this batch's tokens at these layers


@dataclass
class Output:
    logits: Tensor  # [N, V] float32, for batch.logits_indices
    greedy: Tensor | None = None  # [N] the likeliest tokens, on the host, where the forward found them on its way
    hidden: dict[int, Tensor] = field(default_factory=dict)  # layer -> [T, hidden]
    kv: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # layer -> [T, Hkv, D] each


def likeliest(logits: Tensor) -> Tensor:
    """[N, V] -> [N] int64, the first of several. On a CPU numpy takes a tenth of torch's time."""
    return logits.argmax(-1) if logits.is_cuda else torch.from_numpy(logits.numpy().argmax(-1))


@dataclass(frozen=True)
class TokenEmbeddings:
    """Embeddings of all tokens in memory, which a kernel can also read by itself: weight [V, hidden]."""

    weight: Tensor

    def __call__(self, ids: Tensor) -> Tensor:
        return self.weight.index_select(0, ids)


@dataclass
class Decoder:
    """A loaded model. `lookup` maps token ids to embeddings (a plain table, or rows of a mapped file)."""

    config: ModelConfig
    lookup: Callable[[Tensor], Tensor]
    layers: list[Layer]
    final_norm: Norm
    head: Linear
    attention: AttentionBackend
    dtype: torch.dtype  # of activations and of the KV cache
    device: torch.device
    basis: Rotation | None = None  # what hidden states are rotated by inside; callers always see them as they are
    final_scale: Tensor | None = None  # of the last norm, where texts are embedded: `final_norm` may not have it

    @torch.inference_mode()
    def forward(
        self,
        batch: TokenBatch,
        kv: KV,
        taps: Taps | None = None,
        blocks: Sequence[int] | None = None,
        watch: Watch | None = None,
    ) -> Output:
        """`blocks`: run these only, in their order; what others would have added is left out."""
        output = Output(logits=torch.empty(0))
        self.attention.plan(batch)
        if blocks is not None:
            x = self.run_blocks(self.embed(batch.tokens), kv, blocks)
            output.logits = self.logits(x.index_select(0, batch.logits_indices))
            return output
        x = self.run_layers(self.embed(batch.tokens), batch, kv, range(self.config.num_layers), taps, output, watch)
        output.logits = self.logits(x.index_select(0, batch.logits_indices))
        return output

    def embed(self, tokens: Tensor) -> Tensor:
        x = self.lookup(tokens).to(self.dtype)  # [T, hidden]
        x = x if self.config.embed_scale == 1.0 else x * self.config.embed_scale
        return x if self.basis is None else self.basis.apply(x)

    def hidden(self, x: Tensor) -> Tensor:
        """The model's own hidden states [T, hidden] for what runs through the layers."""
        return x.clone() if self.basis is None else self.basis.undo(x)

    def run_layers(
        self,
        x: Tensor,
        batch: TokenBatch,
        kv: KV,
        layers: range,
        taps: Taps | None = None,
        output: Output | None = None,
        watch: Watch | None = None,
    ) -> Tensor:
        """The hidden states [T, hidden] after these layers; the backend must have planned this batch."""
        if watch is None and (taps is None or not taps.kv):
            fused = self._run_fused(x, kv, layers, taps, output)
            if fused is not None:
                return fused
        for i in layers:
            if taps and output and i in taps.hidden:
                output.hidden[i] = self.hidden(x)
            x = self._mlp(self._attend(x, i, kv[i], watch), i)
            if taps and output and i in taps.kv:
                output.kv[i] = (kv[i][0][batch.slot_mapping], kv[i][1][batch.slot_mapping])
        if taps and output and layers.stop in taps.hidden:
            output.hidden[layers.stop] = self.hidden(x)
        if watch is not None and layers.stop == self.config.num_layers:
            watch(layers.stop, x, None, None)
        return x

    def _run_fused(self, x: Tensor, kv: KV, layers: range, taps: Taps | None, output: Output | None) -> Tensor | None:
        """In one call of the backend from one tapped depth to the next; None where it has no such call."""
        depths = taps.hidden & set(range(layers.start, layers.stop + 1)) if taps and output else frozenset[int]()
        first = layers.start
        for stop in sorted(depths | {layers.stop}):
            found = x if stop == first else self.attention.run_layers(x, self.layers, kv, range(first, stop))
            if found is None:
                return None
            x, first = found, stop
            if output and stop in depths:
                output.hidden[stop] = self.hidden(x)
        return x

    def write_kv(self, x: Tensor, i: int, kv: KV) -> None:
        """Only the K/V of layer i for its inputs x [T, hidden], for tokens that go no further."""
        w = self.layers[i]
        self.attention.store(w.qkv(x, norm=w.attn_norm), i, kv[i], w.qk_norms)

    def run_blocks(self, x: Tensor, kv: KV, blocks: Sequence[int]) -> Tensor:
        """The hidden states [T, hidden] after these blocks; the backend must have planned the batch."""
        for block in blocks:
            i = block // 2
            x = self._mlp(x, i) if block % 2 else self._attend(x, i, kv[i])
        return x

    def _attend(self, x: Tensor, i: int, kv: tuple[Tensor, Tensor], watch: Watch | None = None) -> Tensor:
        w, attention = self.layers[i], self.attention
        qkv = w.qkv(x, norm=w.attn_norm)  # [T, (Hq + 2 Hkv) D]
        q = attention.store(qkv, i, kv, w.qk_norms)  # [T, Hq, D]
        a = attention.attend(q, i, kv)  # [T, Hq * D]
        if watch is not None:
            watch(i, x, q, a)
        return w.o(a, add=x) if w.post_attn_norm is None else x + rms_norm(w.o(a), w.post_attn_norm)

    def _mlp(self, x: Tensor, i: int) -> Tensor:
        w = self.layers[i]
        if w.float8_mlp is not None and x.shape[0] >= MIN_FLOAT8_ROWS:
            return w.float8_mlp(x)
        h = w.gate_up.gated(x, self.config.activation, norm=w.mlp_norm)  # [T, intermediate]
        return w.down(h, add=x) if w.post_mlp_norm is None else x + rms_norm(w.down(h), w.post_mlp_norm)

    def final_states(self, hidden: Tensor) -> Tensor:
        """What texts are embedded by, [T, hidden] float32, of the last layer's output as the model has it."""
        assert self.final_scale is not None, "the model was not trained to embed texts"
        return rms_norm(hidden.float(), (self.final_scale.float(), self.final_norm[1]))

    def logits(self, x: Tensor) -> Tensor:
        """Next-token logits of hidden states: [N, hidden] -> [N, V] float32."""
        return self.head(x, norm=self.final_norm).float()

    @property
    def weight_bytes(self) -> int:
        linears = [self.head] + [m for w in self.layers for m in (w.qkv, w.o, w.gate_up, w.down)]
        return sum(linear.nbytes for linear in linears)


class RowPicker:
    """The same rows of many tensors that are shown one after the other."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows
        self._picked: list[Tensor] = []  # [some tensors, rows, ...] each

    def add(self, x: Tensor) -> None:
        """x [T, ...]: all are of one shape and dtype, and none is written to after it was shown."""
        self._picked.append(x.index_select(0, self._rows)[None])

    def flush(self) -> None:
        """Let go of whatever was shown."""

    def picked(self) -> Tensor:
        """[tensors, rows, ...], once all were shown."""
        self.flush()
        return torch.cat(self._picked)


class PickedRows(RowPicker):
    """Rows picked already, [tensors, rows, ...]: copied, since their memory may be used again."""

    def __init__(self, picked: Tensor) -> None:
        self._picked = [picked.clone()]


@dataclass(frozen=True)
class RecomputePass:
    """What some rows of a pass met on their way, in all layers but the last, and what follows its last row."""

    x: Tensor  # [layers - 1, rows, hidden] inputs
    q: Tensor  # [layers - 1, rows, Hq, D] rotated queries
    logits: Tensor  # [1, V] float32


class AllLayersKV:
    """All layers' caches of one decoder: rows that are written or read at once. One contract, by torch layer
    by layer (here), or for all layers in one launch (CUDA in bf16: the host's time for each is what costs) or call (C
    kernels)."""

    def __init__(self, decoder: Decoder, kv: KV) -> None:
        self._kv, self._config, self._ropes = kv, decoder.config, decoder.attention.ropes

    def prepare(self) -> None:
        """Compile what a device compiles at its first use, for mapped K/V and rows of the decoder's own dtype."""

    def write(self, mapped: Tensor, first: int, slots: Tensor, runs: list[range]) -> None:
        """K, not rotated yet, and V [T, layers, 2, Hkv, D] of entries first, first + 1, ... to slots [T].

        `runs` are the layers, from the first to the last one: in runs of equal angles, rotated in one go.
        """
        positions = torch.arange(first, first + len(mapped), device=mapped.device)
        angles = {rope: [a[:, None] for a in table.at(positions)] for rope, table in self._ropes.items()}
        base = runs[0].start
        for layers in runs:
            own = slice(layers.start - base, layers.stop - base)
            k = rotate(mapped[:, own, 0], *angles[self._config.layer_ropes[layers.start]])  # [T, some layers, Hkv, D]
            for j, i in enumerate(layers):
                keys, values = self._kv[i]
                keys.index_copy_(0, slots, k[:, j].to(keys.dtype))
                values.index_copy_(0, slots, mapped[:, own.start + j, 1].to(values.dtype))

    def read(self, base: int, slots: Tensor) -> Tensor:
        """K, rotated, and V of the layers from `base` on at slots [N]: [2, layers, N, Hkv, D]."""
        like = self._kv[base][0]
        out = like.new_empty(2, len(self._kv) - base, len(slots), *like.shape[1:])
        for i, layer in enumerate(self._kv[base:]):
            for j, cache in enumerate(layer):
                torch.index_select(cache, 0, slots, out=out[j, i])
        return out

    def move(self, base: int, places: Tensor) -> None:
        """K/V of the layers from `base` on copied to other slots, K rotated from its old positions to new ones.

        `places` [4, N] int64: slots it lies in, slots it goes to, old positions, new positions. No slot is both.
        """
        source, target, old, new = places.unbind()
        rotations = {rope: table.between(old, new) for rope, table in self._ropes.items()}
        for i in range(base, len(self._kv)):
            keys, values = self._kv[i]
            keys.index_copy_(0, target, rotate(keys.index_select(0, source), *rotations[self._config.layer_ropes[i]]))
            values.index_copy_(0, target, values.index_select(0, source))

    def row_picker(self, rows: Tensor) -> RowPicker:
        """For tensors [T, ...] of which rows [N] are wanted."""
        return RowPicker(rows)


def make_all_layers_kv(decoder: Decoder, kv: KV) -> AllLayersKV:
    if decoder.device.type == "cuda" and decoder.dtype == torch.bfloat16:
        from forerun.models.cuda.all_layers_kv import CudaAllLayersKV

        return CudaAllLayersKV(decoder, kv)
    if decoder.attention.kernels_write and kv[0][0].dtype == torch.float32:
        from forerun.models.cpu.all_layers_kv import CpuAllLayersKV

        return CpuAllLayersKV(decoder, kv)
    return AllLayersKV(decoder, kv)
