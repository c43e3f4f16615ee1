"""Draft models that draft several tokens in one forward, as PARD folders: ordinary model folders whose config.json
names the mask as `pard_token`.

How many tokens one drafts is not part of that format: `num_speculative_tokens` is what this package adds, and under
`forerun` the fingerprint of the target that a model was trained for, acceptance by depth and how it was made. vLLM
reads such a folder as `{"method": "draft_model", "parallel_drafting": true}`, this package as `draft_model=FOLDER`.
Gemma, whose norms and scales are stored otherwise, is not written. Knows no drafter.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from forerun.core.progress import track
from forerun.errors import CorruptModel, UnsupportedModel
from forerun.models.config import ModelConfig
from forerun.models.formats.checkpoint import Checkpoint, expected_shapes
from forerun.models.formats.hf_config import ARCHITECTURES, hf_name

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
DEFAULT_PARALLEL_TOKENS = 8  # of a PARD folder that does not name a number: what its authors train and recommend
MAX_PARALLEL_TOKENS = 32


@dataclass(frozen=True)
class ParallelDrafting:
    mask_token: int
    tokens: int = DEFAULT_PARALLEL_TOKENS  # drafted in one forward: one by the last token, the others by masks
    outcomes: dict[str, list[list[float]]] = field(default_factory=dict)  # kind of text -> accepted and tried by depth
    target: str = ""  # fingerprint of the model it was trained for, where a folder has it


def read_parallel(root: dict[str, Any], vocab: int, source: str) -> ParallelDrafting | None:
    """What a config.json says; None where the model was not trained for it."""
    mask, tokens = root.get("pard_token"), root.get("num_speculative_tokens", DEFAULT_PARALLEL_TOKENS)
    if mask is None:
        return None
    if isinstance(mask, bool) or not isinstance(mask, int) or not 0 <= mask < vocab:
        hint = "fetch or train the drafter again"
        raise CorruptModel(f"{source}: pard_token is {mask!r}, the vocabulary has {vocab} tokens", hint)
    if isinstance(tokens, bool) or not isinstance(tokens, int) or not 1 <= tokens <= MAX_PARALLEL_TOKENS:
        problem = f"{source}: num_speculative_tokens is {tokens!r}, between 1 and {MAX_PARALLEL_TOKENS} are possible"
        raise CorruptModel(problem, "fetch or train the drafter again")
    found = root.get("forerun")
    about = found if isinstance(found, dict) else {}
    return ParallelDrafting(mask, tokens, about.get("outcomes", {}), str(about.get("target", "")))


def write_pard(
    checkpoint: Checkpoint,
    parallel: ParallelDrafting,
    folder: Path,
    quiet: bool = False,
    facts: dict[str, Any] | None = None,
) -> None:
    """The checkpoint's weights in bfloat16, its tokenizer, and a configuration with the mask; `facts`: how it was
    made."""
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
        tensors[stored] = checkpoint.tensor(name).to(torch.bfloat16).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = checkpoint.tokenizer()
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    values = hf_values(config) | {
        "pard_token": parallel.mask_token,
        "spd_type": "pard",
        "num_speculative_tokens": parallel.tokens,
        "forerun": {"target": parallel.target, "outcomes": parallel.outcomes, "facts": facts or {}},
    }
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
