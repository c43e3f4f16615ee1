"""vLLM's own model classes, whose instances can be found again by the model's name.

A connector is given K/V tensors and never the model; the subclasses add that, and refuse configurations that the
connector would refuse. Knows no prompt.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from forerun.vllm.settings import checked_settings, is_used

_loaded: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()  # by the name vLLM opened it under


def loaded_model(name: str) -> Any | None:
    """The model that this process has loaded under that name."""
    return _loaded.get(name)


class _Remembered(torch.nn.Module):
    def __init__(self, *, vllm_config: Any, prefix: str = "", **others: Any) -> None:
        if is_used(vllm_config):
            checked_settings(vllm_config)  # before weights are read; the connector is made after that
        super().__init__(vllm_config=vllm_config, prefix=prefix, **others)
        _loaded[vllm_config.model_config.model] = self


class ForerunLlamaForCausalLM(_Remembered, LlamaForCausalLM):
    pass


class ForerunQwen2ForCausalLM(_Remembered, Qwen2ForCausalLM):
    pass


class ForerunQwen3ForCausalLM(_Remembered, Qwen3ForCausalLM):
    pass
