"""Tiny random models of every family, as safetensors folders (written by transformers) and as GGUF files (by `gguf`).

Every parameter is random, biases and norms too, so that a loader or decoder that forgets one is seen. The files are
written by the libraries that define the formats: nothing here shares code with the loaders under test.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3")
VOCAB = 512
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TEXT = """A lighthouse keeper counts the ships that pass and writes each name in a long grey book. On quiet nights the
book stays shut and the keeper reads old letters instead. The lamp turns twelve times a minute, 720 times an hour.
def turn(lamp): return lamp.angle + 30  # degrees
When the fog comes the horn sounds, and every ship that hears it answers; the keeper listens, counts, and writes.
Morning brings gulls, bread from the village, and a boat with oil for the lamp. Nobody asks why the light must burn
all night: somewhere beyond the horizon a captain is looking for exactly this point, white, then dark, then white.
for ship in harbour.ships: print(f"{ship.name}: {ship.length} m, bound for {ship.port!r}")
Winter storms throw pebbles against the window; spring washes the salt away, and children climb the spiral staircase.
"""

_CONFIGS = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "gemma3": Gemma3TextConfig,
}
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_FAMILY_SHAPE: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "qwen2": {},
    "qwen3": {"head_dim": 32, "tie_word_embeddings": True},
    # Seven layers with a short window: both kinds of layer occur, and the window matters; a scale not head_dim ** -0.5
    "gemma3": {"num_hidden_layers": 7, "sliding_window": 8, "head_dim": 32, "query_pre_attn_scalar": 24},
}


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE of VOCAB tokens trained on TEXT, with a ChatML template."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=SPECIALS,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=1,
    )
    backend.train_from_iterator([TEXT], trainer)
    backend.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[0],
        "eos_token": SPECIALS[2],
        "pad_token": SPECIALS[0],
        "chat_template": CHATML,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_folder(folder: Path, family: str, *, seed: int = 0, max_shard_size: str = "1GB", **overrides: Any) -> Path:
    """A random model of a family as transformers saves it; `overrides` are keys of its configuration."""
    torch.manual_seed(seed)
    config = _CONFIGS[family](**(_SHAPE | _FAMILY_SHAPE[family] | overrides))
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for value in model.parameters():
            if value.ndim == 1:
                value.add_(torch.randn_like(value), alpha=0.1)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    write_tokenizer(folder)
    return folder


def write_gguf(
    path: Path,
    folder: Path,
    *,
    kind: str = "F32",
    rope_freqs: np.ndarray | None = None,
    metadata: dict[str, Any] | None = None,
) -> Path:
    """The model of a folder as a GGUF file, matrices in `kind`; `metadata` adds or replaces plain values."""
    config = json.loads((folder / "config.json").read_text())
    arch = config["model_type"].removesuffix("_text").replace("mistral", "llama")
    writer = GGUFWriter(path, arch)
    _write_metadata(writer, arch, config, metadata or {})
    _write_vocabulary(writer, folder)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config["num_hidden_layers"])
    for name, value in _folder_tensors(folder, config).items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        data = _as_stored(value, name, arch, config).numpy()
        if value.ndim == 1:
            writer.add_tensor(stored, data)
        else:
            writer.add_tensor(stored, quantize(data, GGMLQuantizationType[kind]), raw_dtype=GGMLQuantizationType[kind])
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _folder_tensors(folder: Path, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    if config.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    return tensors


def _as_stored(value: torch.Tensor, name: str, arch: str, config: dict[str, Any]) -> torch.Tensor:
    """What GGUF's converters do to a tensor: pair up the rotary rows of Llama, add Gemma's one to its norms."""
    if arch == "gemma3" and name.endswith("norm.weight"):
        return value + 1.0
    for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if arch == "llama" and part in name:
            halves = value.reshape(config[heads], 2, -1, *value.shape[1:])
            return halves.transpose(1, 2).reshape(value.shape).contiguous()
    return value


def _write_metadata(writer: GGUFWriter, arch: str, config: dict[str, Any], extra: dict[str, Any]) -> None:
    rope = config["rope_parameters"]
    values: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(rope.get("full_attention", rope)["rope_theta"]),
    }
    if "head_dim" in config:
        values |= {"attention.key_length": config["head_dim"], "attention.value_length": config["head_dim"]}
    if config["model_type"] in ("gemma3_text", "mistral") and config.get("sliding_window"):
        values["attention.sliding_window"] = config["sliding_window"]
    for key, value in (values | extra).items():
        kinds = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, bool: writer.add_bool}
        add = kinds[type(value)]
        add(key if key.startswith("tokenizer.") else f"{arch}.{key}", value)


def _write_vocabulary(writer: GGUFWriter, folder: Path) -> None:
    stored = json.loads((folder / "tokenizer.json").read_text())
    vocab = sorted(stored["model"]["vocab"], key=stored["model"]["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(vocab)
    writer.add_token_types([3 if token in SPECIALS else 1 for token in vocab])
    writer.add_token_merges([" ".join(pair) for pair in stored["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHATML)
