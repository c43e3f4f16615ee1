"""The KV cache as all parts of the engine see it: its tensors, and what decides their size."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

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
