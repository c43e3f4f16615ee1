"""vLLM's loaded model as a `Decoder`: its own linears, norms and rotary embedding behind our contracts.

So everything that runs a decoder (drafting, recomputing, checks) runs vLLM's weights in whatever form vLLM holds them.
K/V goes to a staging pool in our layout and, for entries that have one, to its slot in vLLM's cache, whose layout only
vLLM knows. Knows neither requests nor why rows run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from forerun.models.config import ModelConfig
from forerun.models.decoder import Decoder, Layer
from forerun.models.linear import Linear, Norm
from forerun.vllm.attention import VllmAttention


class Sum(Tensor):
    """A residual stream and what was added to it: vLLM's norms add before they round, which decides the bits."""

    parts: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, y: Tensor, residual: Tensor) -> Sum:
        made = (y + residual).as_subclass(cls)
        made.parts = y, residual.as_subclass(Tensor)
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What is computed from a sum is a tensor like any other."""
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
        return found.as_subclass(Tensor) if isinstance(found, cls) else found


def normed(norm: Any, x: Tensor) -> Tensor:
    """As vLLM's own model has it."""
    if not isinstance(x, Sum):
        return norm(x)
    y, residual = x.parts
    return norm(y.clone(), residual.clone())[0]  # it may work in place


class ModuleLinear(Linear):
    """A linear module of vLLM (quantised or not), and the norm module that it reads through."""

    beside = Linear

    def __init__(self, module: Any, norm: Any = None, activation: Any = None) -> None:
        self.module, self.norm, self.activation = module, norm, activation

    @property
    def nbytes(self) -> int:
        """Before quantisation: a packed module no longer has its weights."""
        return self.module.input_size * self.module.output_size * self.module.params_dtype.itemsize

    def __call__(self, x: Tensor, *, norm: Norm | None = None, add: Tensor | None = None) -> Tensor:
        y = self.module(x if norm is None else normed(self.norm, x))[0]
        return y if add is None else Sum.of(y, add)

    def gated(self, x: Tensor, activation: str, *, norm: Norm | None = None) -> Tensor:
        return self.activation(self(x, norm=norm))


class ModuleHead(ModuleLinear):
    """The head, which vLLM's model applies itself; its matrix may be the embedding's."""

    nbytes = 0

    def __call__(self, x: Tensor, *, norm: Norm | None = None, add: Tensor | None = None) -> Tensor:
        return self.module.compute_logits(x if norm is None else normed(self.norm, x))


def decoder_of(model: Any, config: ModelConfig, attention: VllmAttention, dtype: torch.dtype) -> Decoder:
    """`model`: one of the classes in `models.py`, loaded."""

    def norm_of(module: Any) -> Norm:
        return module.weight.data, module.variance_epsilon

    layers = []
    for layer in model.model.layers:
        own, mlp = layer.self_attn, layer.mlp
        layers.append(
            Layer(
                attn_norm=norm_of(layer.input_layernorm),
                qkv=ModuleLinear(own.qkv_proj, layer.input_layernorm),
                o=ModuleLinear(own.o_proj),
                mlp_norm=norm_of(layer.post_attention_layernorm),
                gate_up=ModuleLinear(mlp.gate_up_proj, layer.post_attention_layernorm, mlp.act_fn),
                down=ModuleLinear(mlp.down_proj),
                qk_norms=(norm_of(own.q_norm), norm_of(own.k_norm)) if config.qk_norm else None,
            )
        )
    return Decoder(
        config=config,
        lookup=model.embed_input_ids,
        layers=layers,
        final_norm=norm_of(model.model.norm),
        head=ModuleHead(model, model.model.norm),
        attention=attention,
        dtype=dtype,
        device=attention.device,
    )
