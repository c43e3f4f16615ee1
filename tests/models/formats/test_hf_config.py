"""config.json in the layouts people have: old and new rope keys, omitted defaults, end tokens, refusals."""

import math
from typing import Any

import pytest
from transformers import AutoConfig, Gemma3TextConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from forerun.errors import CorruptModel, UnsupportedModel
from forerun.models.config import RopeConfig
from forerun.models.formats.hf_config import read_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
}


def read(generation: dict[str, Any] | None = None, **keys: Any) -> Any:
    return read_config(LLAMA | keys, generation or {}, "m")


@pytest.mark.parametrize("kind", [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, Gemma3TextConfig])
def test_transformers_defaults(kind: type[AutoConfig]) -> None:
    """What transformers writes for an untouched configuration of each family reads as the same model."""
    theirs = kind()
    ours = read_config(theirs.to_dict(), {}, "m")
    assert (ours.vocab_size, ours.hidden_size, ours.num_layers) == (
        theirs.vocab_size, theirs.hidden_size, theirs.num_hidden_layers,
    )  # fmt: skip
    assert (ours.num_heads, ours.num_kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert ours.head_dim == head_dim
    assert ours.tie_embeddings == theirs.tie_word_embeddings and ours.max_context == theirs.max_position_embeddings


def test_gemma3_omitted_keys() -> None:
    """A published text_config names only what differs from the defaults."""
    text: dict[str, Any] = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    }
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "model_type": "gemma3_text"}
    root = {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106], "text_config": text}
    config = read_config(root, {}, "m")
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262208)
    assert config.rope == RopeConfig(1_000_000.0, "linear", 8.0) and config.local_rope == RopeConfig(10_000.0)
    assert config.tie_embeddings and config.embed_scale == math.sqrt(2560) and config.query_scale == 1 / 16
    assert config.eos_ids == (1, 106) and config.windows[5] is None and config.windows[6] == 1024


SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 2048}
YARN = {"factor": 4.0, "original_max_position_embeddings": 2048}


@pytest.mark.parametrize(
    ("keys", "rope"),
    [
        ({"rope_theta": 5e5}, RopeConfig(5e5)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, RopeConfig(5e5)),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3"} | SCALING}, RopeConfig(5e5, "llama3", 8.0, 2048)),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5} | SCALING},
            RopeConfig(5e5, "llama3", 8.0, 2048),
        ),
        ({"rope_scaling": {"type": "yarn"} | YARN}, RopeConfig(1e4, "yarn", 4.0, 2048)),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "attention_factor": 1.5} | YARN},
            RopeConfig(1e4, "yarn", 4.0, 2048, attention_factor=1.5),
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, RopeConfig(1e4, "linear", 2.0)),
    ],
)
def test_rope_layouts(keys: dict[str, Any], rope: RopeConfig) -> None:
    assert read(**keys).rope == rope


def test_yarn_extends_the_context() -> None:
    assert read(rope_scaling={"type": "yarn"} | YARN).max_context == 8192


def test_end_tokens() -> None:
    assert read({"eos_token_id": [7, 9]}, eos_token_id=9).eos_ids == (7, 9)
    assert read({}, eos_token_id=9, bos_token_id=3).eos_ids == (9,)
    assert read().eos_ids == () and read().bos_id is None


def test_qwen_windows() -> None:
    keys: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64, "max_window_layers": 1}
    assert read(**keys).sliding_window is None
    assert read(**keys, use_sliding_window=True).window_layers == (False, True)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            "'MambaForCausalLM' is not supported; supported are LlamaForCausalLM",
        ),
        ({"architectures": None, "model_type": "rwkv"}, "'rwkv'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "relu"}, "relu"),
    ],
)
def test_unsupported(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        read(**keys)


@pytest.mark.parametrize(("key", "value"), [("hidden_size", None), ("num_hidden_layers", 0), ("vocab_size", "many")])
def test_bad_values(key: str, value: Any) -> None:
    with pytest.raises(CorruptModel, match=key):
        read(**{key: value})
