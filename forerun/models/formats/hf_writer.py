"""Writes a checkpoint as a Hugging Face folder: what vLLM and transformers open, from whatever file the model came in.

Gemma, whose norms and scales are stored otherwise, and scaled rope are not written.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from forerun.core.progress import track
from forerun.errors import UnsupportedModel
from forerun.models.config import ModelConfig
from forerun.models.formats.checkpoint import Checkpoint, expected_shapes
from forerun.models.formats.hf_config import ARCHITECTURES, hf_name

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def write_hf_folder(
    checkpoint: Checkpoint, folder: Path, dtype: torch.dtype, more: dict[str, Any] | None = None, quiet: bool = False
) -> None:
    """The weights in `dtype`, the tokenizer with its template, and config.json with `more` values."""
    config = checkpoint.config
    if config.family not in FAMILIES or config.rope.kind != "default":
        raise UnsupportedModel(
            f"{checkpoint.source} is a {config.family} model with {config.rope.kind} rope, which cannot be written "
            "as a folder",
            f"use its own file; folders are written for {', '.join(FAMILIES)} without rope scaling",
        )
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name in track(list(expected_shapes(config)), "writing weights", quiet):
        stored = "lm_head.weight" if name == "head" else "model." + hf_name(name, config.family)
        tensors[stored] = checkpoint.tensor(name).to(dtype).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    checkpoint.tokenizer().save(folder)
    values = hf_values(config) | {"torch_dtype": str(dtype).removeprefix("torch.")} | (more or {})
    (folder / "config.json").write_text(json.dumps(values, indent=2))


def hf_values(config: ModelConfig) -> dict[str, Any]:
    """config.json of a model, as far as these families need it."""
    architecture = next(name for name, family in ARCHITECTURES.items() if family == config.family)
    values: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_context,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope.theta},
        "tie_word_embeddings": config.tie_embeddings,
        "sliding_window": config.sliding_window,
        "use_sliding_window": config.sliding_window is not None,
        "torch_dtype": "bfloat16",
    }
    if config.eos_ids:
        values["eos_token_id"] = list(config.eos_ids) if len(config.eos_ids) > 1 else config.eos_ids[0]
    if config.bos_id is not None:
        values["bos_token_id"] = config.bos_id
    return values
