"""A transformers model made from one of our checkpoints: same tensors, their code. The oracle of tests and benches.

Knows the names transformers gives to weights and configuration values; knows nothing of how it will be run.
"""

from __future__ import annotations

from typing import Any

import torch

from forerun.models.config import ModelConfig, RopeConfig
from forerun.models.formats.checkpoint import Checkpoint, expected_shapes
from forerun.models.formats.hf_config import hf_name

CLASSES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
}


def hf_from_checkpoint(
    checkpoint: Checkpoint, *, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32, **options: Any
) -> Any:
    """A transformers causal language model in eval mode that holds the checkpoint's tensors; SDPA attention unless
    `options` (passed to the configuration) say otherwise."""
    import transformers

    config_name, model_name = CLASSES[checkpoint.config.family]
    options.setdefault("attn_implementation", "sdpa")
    config = getattr(transformers, config_name)(**hf_config_values(checkpoint.config), **options)
    # Built on the meta device: the random initialisation of a 1.5B model would cost 6 GB and half a minute.
    with torch.device("meta"):
        model = getattr(transformers, model_name)(config)
    state = _state(checkpoint, device, dtype)
    if checkpoint.config.tie_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True, assign=True)
    model.tie_weights()
    _restore_buffers(model, device)
    left = [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta]
    assert not left, f"tensors without values: {left}"
    return model.eval().requires_grad_(False)


def hf_config_values(config: ModelConfig) -> dict[str, Any]:
    """Our configuration in transformers' words."""
    values: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_context,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_parameters": _rope(config.rope),
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids) or None,
        "pad_token_id": None,
    }
    if config.family == "mistral":
        values["sliding_window"] = config.sliding_window
    elif config.family in ("qwen2", "qwen3"):
        values |= {"use_sliding_window": config.sliding_window is not None, "sliding_window": config.sliding_window}
        values["layer_types"] = _layer_types(config)
    elif config.family == "gemma3":
        values |= {"query_pre_attn_scalar": round(config.scale**-2), "sliding_window": config.sliding_window}
        values["layer_types"] = _layer_types(config)
        values["rope_parameters"] = {
            "full_attention": _rope(config.rope),
            "sliding_attention": _rope(config.local_rope or config.rope),
        }
    return values


def _layer_types(config: ModelConfig) -> list[str]:
    slides = (config.windows[layer] is not None for layer in range(config.num_layers))
    return ["sliding_attention" if slide else "full_attention" for slide in slides]


def _rope(rope: RopeConfig) -> dict[str, Any]:
    values: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind != "default":
        values["factor"] = rope.factor
    if rope.kind in ("llama3", "yarn"):
        values["original_max_position_embeddings"] = rope.original_context
    if rope.kind == "llama3":
        values |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        values |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
        if rope.attention_factor is not None:
            values["attention_factor"] = rope.attention_factor
    return values


def _state(checkpoint: Checkpoint, device: str | torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    config = checkpoint.config
    state = {}
    for name in expected_shapes(config):
        tensor = checkpoint.tensor(name)
        if config.family == "gemma3" and name.endswith("norm"):
            tensor = tensor.float() - 1.0  # theirs multiplies by 1 + weight
        theirs = "lm_head.weight" if name == "head" else f"model.{hf_name(name, config.family)}"
        state[theirs] = tensor.to(device=device, dtype=dtype).contiguous()
    return state


def _restore_buffers(model: Any, device: str | torch.device) -> None:
    """Values that are computed, not stored: rotary frequencies and Gemma's embedding scale."""
    inner = model.model
    inner.rotary_emb = type(inner.rotary_emb)(model.config).to(device)
    embed = inner.embed_tokens
    if isinstance(getattr(embed, "embed_scale", None), torch.Tensor):
        embed.embed_scale = torch.tensor(model.config.hidden_size**0.5, device=device)
