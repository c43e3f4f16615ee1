"""What a decoder needs to know about a model, whatever file it came from.

Knows no tensor, no file format and no device. Families differ only by the values here: a new dense family is a new
set of values in a loader, not a new decoder.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

# Beyond these a value is damage, not a model: tables and lists of that length would fill the memory first
MAX_LAYERS = 1024
MAX_CONTEXT = 1 << 22
MAX_SIZE = 1 << 24  # any other size: vocabulary, widths, heads

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of one kind of layer; `kind` names the scaling rule, the other values are its parameters."""

    theta: float = 10_000.0
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_context: int = 0  # context the model was trained on before scaling (llama3, yarn)
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: derived from factor

    def __post_init__(self) -> None:
        if not 1.0 < self.theta < math.inf:
            raise ValueError(f"the rope base is {self.theta}, it must be a number above 1")
        if not 0.0 < self.factor < math.inf:
            raise ValueError(f"the rope scaling factor is {self.factor}, it must be a number above 0")


@dataclass(frozen=True)
class ModelConfig:
    """Shape and switches of one dense decoder."""

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_context: int
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    qkv_bias: bool = False  # qwen2
    qk_norm: bool = False  # qwen3, gemma3: RMS norm of each head's q and k before rope
    post_norms: bool = False  # gemma3: a norm after attention and after the mlp, before the residual sum
    embed_scale: float = 1.0  # gemma3: sqrt(hidden_size)
    activation: Literal["silu", "gelu_tanh"] = "silu"
    query_scale: float = 0.0  # softmax scale; 0 means head_dim ** -0.5
    rope: RopeConfig = RopeConfig()
    local_rope: RopeConfig | None = None  # rope of the sliding-window layers where it differs
    sliding_window: int | None = None  # a token sees itself and the window-1 entries before it
    window_layers: tuple[bool, ...] = ()  # which layers slide; empty: all of them if sliding_window is set
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    pooling: Literal["", "mean", "last"] = ""  # of models trained to embed texts: how states become one vector

    def __post_init__(self) -> None:
        if self.max_context > MAX_CONTEXT:  # scaling may have stretched it
            raise ValueError(f"max_context is {self.max_context}, the limit is {MAX_CONTEXT}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}, rotary embedding needs an even number")
        if not 0.0 <= self.norm_eps < 1.0:
            raise ValueError(f"norm_eps is {self.norm_eps}, allowed is from 0 to 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} heads cannot share {self.num_kv_heads} KV heads evenly")
        if self.window_layers and len(self.window_layers) != self.num_layers:
            raise ValueError(f"window_layers has {len(self.window_layers)} entries for {self.num_layers} layers")

    @property
    def scale(self) -> float:
        return self.query_scale or self.head_dim**-0.5

    @property
    def layer_macs(self) -> int:
        """Multiply-adds of one token in the matrices of one layer; attention over other tokens is not counted."""
        return self.hidden_size * (2 * self.q_size + 2 * self.kv_size + 3 * self.intermediate_size)

    @property
    def macs(self) -> int:
        return self.num_layers * self.layer_macs

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer; None where it sees everything before it."""
        slides = self.window_layers or (True,) * self.num_layers
        return tuple(self.sliding_window if slide else None for slide in slides)

    def narrowed(self, window: int, wide: int) -> ModelConfig:
        """The same model whose layers from `wide` on see no further back than `window` entries; itself where some of
        its layers have windows of their own, since what it was made for is known best there."""
        if self.sliding_window is not None:
            return self
        slides = tuple(layer >= wide for layer in range(self.num_layers))
        return replace(self, sliding_window=window, window_layers=slides)

    @cached_property
    def layer_ropes(self) -> tuple[RopeConfig, ...]:
        local = self.local_rope or self.rope
        return tuple(self.rope if window is None else local for window in self.windows)
