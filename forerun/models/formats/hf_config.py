"""config.json (and generation_config.json) to `ModelConfig`, and canonical tensor names to Hugging Face's.

Knows the keys of each supported family in both layouts: `rope_theta` + `rope_scaling`, and `rope_parameters`. Reads no
weights and no tokenizer.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from forerun.errors import CorruptModel, UnsupportedModel
from forerun.models.config import MAX_CONTEXT, MAX_LAYERS, ModelConfig, RopeConfig
from forerun.models.formats.checkpoint import ConfigKeys, unsupported_architecture

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
}
_MODEL_TYPES = {"llama", "mistral", "qwen2", "qwen3", "gemma3", "gemma3_text"}

# What a missing key means, where published configurations leave it out
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"max_position_embeddings": 32768},
    "qwen3": {"max_position_embeddings": 32768, "head_dim": 128},
    "gemma3": {
        "max_position_embeddings": 131072,
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "tie_word_embeddings": True,
        "rope_theta": 1_000_000.0,
    },
}
_ACTIVATIONS: dict[str, Literal["silu", "gelu_tanh"]] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}

_TOP = {"embed": "embed_tokens.weight", "final_norm": "norm.weight"}
_LAYER = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
_GEMMA_LAYER = _LAYER | {
    "post_attn_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "post_mlp_norm": "post_feedforward_layernorm.weight",
}


def hf_name(name: str, family: str) -> str:
    """The name after the model prefix: `layers.3.q` -> `layers.3.self_attn.q_proj.weight` (`head` has no prefix)."""
    if name in _TOP:
        return _TOP[name]
    _, layer, part = name.split(".")
    return f"layers.{layer}.{(_GEMMA_LAYER if family == 'gemma3' else _LAYER)[part]}"


def read_config(root: dict[str, Any], generation: dict[str, Any], source: str) -> ModelConfig:
    """The configuration config.json describes; of a model that also sees images, its text part."""
    family = _family(root, source)
    values = root.get("text_config", root) if family == "gemma3" else root
    if values is not root:
        values = {k: root[k] for k in ("tie_word_embeddings", "quantization_config") if k in root} | values
    keys = ConfigKeys(_DEFAULTS[family] | values, source, "config.json")
    _reject(keys, family)
    hidden, heads = keys.count("hidden_size"), keys.count("num_attention_heads")
    layers = keys.count("num_hidden_layers", most=MAX_LAYERS)
    window, slides = _windows(keys, family, layers)
    rope, local_rope = _ropes(keys, family)
    scalar = keys.get("query_pre_attn_scalar") if family == "gemma3" else None
    activation = keys.get("hidden_activation") or keys.get("hidden_act") or "silu"
    if family == "gemma3":
        activation = keys.get("hidden_activation", "gelu_pytorch_tanh")
    if activation not in _ACTIVATIONS:
        raise keys.unsupported(f"activation {activation!r}")
    context = keys.count("max_position_embeddings", most=MAX_CONTEXT)
    try:
        return ModelConfig(
            family=family,
            vocab_size=keys.count("vocab_size"),
            hidden_size=hidden,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=keys.count("num_key_value_heads", heads),
            head_dim=keys.count("head_dim", hidden // heads),
            intermediate_size=keys.count("intermediate_size"),
            max_context=max(context, int(rope.original_context * rope.factor)) if rope.kind == "yarn" else context,
            norm_eps=float(keys.get("rms_norm_eps", 1e-6)),
            tie_embeddings=bool(keys.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2",
            qk_norm=family in ("qwen3", "gemma3"),
            post_norms=family == "gemma3",
            embed_scale=math.sqrt(hidden) if family == "gemma3" else 1.0,
            activation=_ACTIVATIONS[activation],
            query_scale=scalar**-0.5 if scalar else 0.0,
            rope=rope,
            local_rope=local_rope,
            sliding_window=window,
            window_layers=slides,
            eos_ids=_ids(generation.get("eos_token_id"), root.get("eos_token_id"), values.get("eos_token_id")),
            bos_id=next(iter(_ids(root.get("bos_token_id"), values.get("bos_token_id"))), None),
        )
    except ValueError as error:
        raise CorruptModel(f"{source}: {error}", "fetch the model's config.json again") from error


def _family(root: dict[str, Any], source: str) -> str:
    names = root.get("architectures") or []
    kind = root.get("model_type")
    if names and names[0] in ARCHITECTURES:
        return ARCHITECTURES[names[0]]
    if not names and kind in _MODEL_TYPES:
        return str(kind).removesuffix("_text")
    raise unsupported_architecture(source, names[0] if names else kind, ARCHITECTURES)


def _reject(keys: ConfigKeys, family: str) -> None:
    """Features that would change the numbers if they were ignored."""
    if keys.get("quantization_config"):
        method = keys.get("quantization_config").get("quant_method")
        hint = "use the unquantised model or a GGUF file"
        raise UnsupportedModel(f"{keys.source}: weights quantised with {method!r} are not supported", hint)
    if family != "qwen2" and keys.get("attention_bias"):
        raise keys.unsupported("attention_bias")
    for key in ("mlp_bias", "final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"):
        if keys.get(key):
            raise keys.unsupported(key)


def _windows(keys: ConfigKeys, family: str, layers: int) -> tuple[int | None, tuple[bool, ...]]:
    """The sliding window and the layers it applies to (empty: all)."""
    window = keys.get("sliding_window")
    if family == "llama" or not window:
        return None, ()
    if family == "mistral":
        return int(window), ()
    if family in ("qwen2", "qwen3") and not keys.get("use_sliding_window"):
        return None, ()
    kinds = keys.get("layer_types")
    if kinds:
        return int(window), tuple(kind == "sliding_attention" for kind in kinds)
    if family == "gemma3":
        pattern = int(keys.get("sliding_window_pattern", keys.get("_sliding_window_pattern", 6)))
        return int(window), tuple((i + 1) % pattern != 0 for i in range(layers))
    return int(window), tuple(i >= keys.get("max_window_layers", 28) for i in range(layers))


def _ropes(keys: ConfigKeys, family: str) -> tuple[RopeConfig, RopeConfig | None]:
    """The rope of full layers and, for Gemma 3, that of sliding ones."""
    new = keys.get("rope_parameters") or {}
    theta = float(keys.get("rope_theta", 10_000.0))
    if family != "gemma3":
        return _rope(keys, {"rope_theta": theta} | (keys.get("rope_scaling") or {}) | new), None
    local = {"rope_theta": float(keys.get("rope_local_base_freq", 10_000.0))}
    full = {"rope_theta": theta} | (keys.get("rope_scaling") or {})
    return _rope(keys, full | new.get("full_attention", {})), _rope(keys, local | new.get("sliding_attention", {}))


def _rope(keys: ConfigKeys, values: dict[str, Any]) -> RopeConfig:
    kind = values.get("rope_type") or values.get("type") or "default"
    theta, factor = float(values["rope_theta"]), float(values.get("factor") or 1.0)
    if float(values.get("partial_rotary_factor") or 1.0) != 1.0:
        raise keys.unsupported("partial_rotary_factor")
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=factor)
    original = int(values.get("original_max_position_embeddings") or keys.count("max_position_embeddings"))
    if kind == "llama3":
        low, high = float(values.get("low_freq_factor") or 1.0), float(values.get("high_freq_factor") or 4.0)
        return RopeConfig(theta, "llama3", factor, original, low, high)
    if kind != "yarn" or values.get("truncate") is False:
        raise keys.unsupported(f"rope type {kind!r} (supported: default, linear, llama3, yarn)")
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_context=original,
        beta_fast=float(values.get("beta_fast") or 32.0),
        beta_slow=float(values.get("beta_slow") or 1.0),
        attention_factor=_attention_factor(values, factor),
    )


def _attention_factor(values: dict[str, Any], factor: float) -> float | None:
    """YaRN's multiplier where the configuration gives one, directly or as a ratio of two scales."""
    if values.get("attention_factor") is not None:
        return float(values["attention_factor"])
    top, bottom = values.get("mscale"), values.get("mscale_all_dim")
    if not top or not bottom:
        return None
    return (0.1 * float(top) * math.log(factor) + 1.0) / (0.1 * float(bottom) * math.log(factor) + 1.0)


def _ids(*values: Any) -> tuple[int, ...]:
    """Token ids given as one, a list or not at all, without repeats, in order."""
    flat = [item for value in values for item in (value if isinstance(value, list) else [value])]
    return tuple(dict.fromkeys(item for item in flat if isinstance(item, int)))
