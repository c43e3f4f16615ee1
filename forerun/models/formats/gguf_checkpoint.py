"""A GGUF file as a `Checkpoint`: its metadata as `ModelConfig`, canonical names over the mapped file, tensors
dequantised when asked for.

Knows the keys and habits of each supported architecture: which layers slide, and which q/k rows are interleaved, which
is undone on the stored bytes, before dequantising, where it is cheapest. Does not know block formats (dequant.py) or
tokenizers.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from forerun.errors import CorruptModel, UnsupportedModel
from forerun.models.config import FAMILIES, MAX_CONTEXT, MAX_LAYERS, ModelConfig, RopeConfig
from forerun.models.formats.checkpoint import (
    ConfigKeys,
    check_shapes,
    checked,
    expected_shapes,
    reading,
    unsupported_architecture,
)
from forerun.models.formats.dequant import dequantise
from forerun.models.formats.gguf import GGUFFile
from forerun.models.formats.gguf_tokenizer import tokenizer_from_gguf
from forerun.text.tokenizer import Tokenizer

INTERLEAVED = ("llama", "mistral")  # architectures whose files store q and k rows in pairs (2i, 2i+1)
_OWN_FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16}
GEMMA3_PATTERN = 6  # every sixth layer sees everything
GEMMA3_27B_LAYERS = 62  # the one size whose softmax scale is not head_dim ** -0.5

_TOP = {"embed": "token_embd.weight", "final_norm": "output_norm.weight", "head": "output.weight"}
_LAYER = {
    "attn_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "post_attn_norm": "post_attention_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "post_mlp_norm": "post_ffw_norm.weight",
}
_POOLING: dict[Any, Any] = {1: "mean", 3: "last"}  # numbers of llama.cpp; others need other models
# Tokens that end an answer, by name: files list one end token, chat models use two
_END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_turn>", "</s>")


def gguf_name(name: str) -> str:
    """The GGUF name of a canonical tensor: `layers.3.q` -> `blk.3.attn_q.weight`."""
    if name in _TOP:
        return _TOP[name]
    _, layer, part = name.split(".")
    return f"blk.{layer}.{_LAYER[part]}"


def read_config(
    metadata: dict[str, Any], shapes: dict[str, tuple[int, ...]], source: str, freqs: torch.Tensor | None = None
) -> ModelConfig:
    """The configuration a file's metadata describes; `shapes` tells what the file holds, `freqs` is `rope_freqs`."""
    arch = metadata.get("general.architecture")
    if arch not in FAMILIES:
        raise unsupported_architecture(source, arch, FAMILIES)
    if "token_embd.weight" not in shapes:
        raise CorruptModel(f"{source}: tensor 'token_embd.weight' is missing", "fetch or convert the model again")
    keys = ConfigKeys(metadata, source, "the metadata", f"{arch}.")
    hidden, heads = keys.count("embedding_length"), keys.count("attention.head_count")
    head_dim = keys.count("attention.key_length", hidden // heads)
    rope = _rope(keys, head_dim, freqs)
    window = keys.get("attention.sliding_window") or None
    eps = keys.get("attention.layer_norm_rms_epsilon", 1e-6)
    try:
        return ModelConfig(
            family=arch,
            vocab_size=shapes["token_embd.weight"][0],
            hidden_size=hidden,
            num_layers=keys.count("block_count", most=MAX_LAYERS),
            num_heads=heads,
            num_kv_heads=keys.count("attention.head_count_kv", heads),
            head_dim=head_dim,
            intermediate_size=keys.count("feed_forward_length"),
            max_context=keys.count("context_length", most=MAX_CONTEXT),
            norm_eps=float(f"{eps:.6g}"),  # the decimal a float32 was written for: 9.99999974e-06 was 1e-05
            tie_embeddings="output.weight" not in shapes,
            qkv_bias="blk.0.attn_q.bias" in shapes,
            qk_norm="blk.0.attn_q_norm.weight" in shapes,
            rope=rope,
            sliding_window=window,
            eos_ids=_end_ids(metadata),
            bos_id=metadata.get("tokenizer.ggml.bos_token_id"),
            pooling=_POOLING.get(keys.get("pooling_type", 0), ""),
            **(_gemma3(keys, hidden, heads) if arch == "gemma3" else {}),
        )
    except ValueError as error:
        raise CorruptModel(f"{source}: {error}", "convert the model again") from error


def _gemma3(keys: ConfigKeys, hidden: int, heads: int) -> dict[str, Any]:
    layers = keys.count("block_count", most=MAX_LAYERS)
    if keys.get("final_logit_softcapping"):
        raise keys.unsupported("logit soft-capping")
    pattern = keys.get("attention.sliding_window_pattern", GEMMA3_PATTERN)
    slides = pattern if isinstance(pattern, list) else [(i + 1) % pattern != 0 for i in range(layers)]
    return {
        "post_norms": True,
        "embed_scale": math.sqrt(hidden),
        "activation": "gelu_tanh",
        "query_scale": (hidden / heads) ** -0.5 if layers == GEMMA3_27B_LAYERS else 0.0,
        "local_rope": RopeConfig(theta=float(keys.get("rope.freq_base_swa", 10_000.0))),
        "window_layers": tuple(bool(slide) for slide in slides),
    }


def _rope(keys: ConfigKeys, head_dim: int, freqs: torch.Tensor | None) -> RopeConfig:
    theta = float(keys.get("rope.freq_base", 10_000.0))
    rotated = keys.get("rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise keys.unsupported(f"rotary embedding of {rotated} of {head_dim} dimensions")
    if freqs is not None:
        return _llama3_rope(theta, freqs, keys.source)
    kind = keys.get("rope.scaling.type", "none")
    factor = float(keys.get("rope.scaling.factor", keys.get("rope.scale_linear", 1.0)))
    if kind == "none" and factor == 1.0:
        return RopeConfig(theta=theta)
    if kind in ("none", "linear"):
        return RopeConfig(theta=theta, kind="linear", factor=factor)
    if kind != "yarn":
        raise keys.unsupported(f"rope scaling {kind!r} (supported: linear, llama3, yarn)")
    multiplier = keys.get("rope.scaling.attn_factor")
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_context=keys.count("rope.scaling.original_context_length"),
        beta_fast=float(keys.get("rope.scaling.yarn_beta_fast", 32.0)),
        beta_slow=float(keys.get("rope.scaling.yarn_beta_slow", 1.0)),
        attention_factor=None if multiplier is None else float(multiplier) * (0.1 * math.log(factor) + 1.0),
    )


def llama3_factors(rope: RopeConfig, pairs: int) -> torch.Tensor:
    """What Llama 3's rule divides each frequency by: the table a GGUF file stores as `rope_freqs`."""
    freqs = rope.theta ** -(torch.arange(pairs, dtype=torch.float64) / pairs)
    turns = rope.original_context * freqs / (2 * math.pi)  # full turns within the original context
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return 1.0 / ((1.0 - smooth.clamp(0, 1)) / rope.factor + smooth.clamp(0, 1))  # [pairs]


def _llama3_rope(theta: float, table: torch.Tensor, source: str) -> RopeConfig:
    """Recover the rule's parameters from its table of divisors; only their ratios matter, so low_freq_factor is 1."""
    table = table.double().flatten()
    factor = round(float(table.max()), 4)
    if factor == 1.0:
        return RopeConfig(theta=theta)
    guess = RopeConfig(theta, "llama3", factor, 8192, 1.0, 4.0)  # what every published Llama 3.x has
    between = (table > 1.0 + 1e-4) & (table < factor * (1 - 1e-4))
    if not _matches(guess, table) and int(between.sum()) >= 2:
        freqs = theta ** -(torch.arange(table.numel(), dtype=torch.float64) / table.numel())
        smooth = (1.0 / table - 1.0 / factor) / (1.0 - 1.0 / factor)
        x, y = freqs[between], smooth[between]
        slope = float((y[0] - y[-1]) / (x[0] - x[-1]))
        width = 1.0 / (slope * float(x[0]) - float(y[0]))  # high - low, in units of low
        guess = RopeConfig(theta, "llama3", factor, round(slope * width * 2 * math.pi), 1.0, 1.0 + width)
    if not _matches(guess, table):
        hint = "convert the model again"
        raise UnsupportedModel(f"{source}: the rope_freqs table follows no Llama 3 scaling rule", hint)
    return guess


def _matches(rope: RopeConfig, table: torch.Tensor) -> bool:
    return torch.allclose(llama3_factors(rope, table.numel()), table, rtol=1e-3)


def _end_ids(metadata: dict[str, Any]) -> tuple[int, ...]:
    """The declared end token first, then others of the vocabulary that end an answer."""
    declared = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    named = zip(metadata.get("tokenizer.ggml.tokens", []), metadata.get("tokenizer.ggml.token_type", []), strict=False)
    known = [i for i, (token, kind) in enumerate(named) if kind == 3 and token in _END_TOKENS]
    return tuple(dict.fromkeys(i for i in declared + known if i is not None))


class GGUFCheckpoint:
    """See `Checkpoint`; every tensor's presence and shape is checked when the file is opened."""

    def __init__(self, path: Path) -> None:
        self.file = GGUFFile(path)
        self.source = path.name
        self.files: tuple[Path, ...] = (path,)
        shapes = {info.name: info.shape for info in self.file.tensors.values()}
        freqs = "rope_freqs.weight"
        table = dequantise(self.file.raw(freqs), self.file.tensors[freqs].type) if freqs in shapes else None
        self.config = read_config(self.file.metadata, shapes, self.source, table)
        check_shapes(shapes, {name: gguf_name(name) for name in expected_shapes(self.config)}, self.config, self.source)
        matrices = [info.type for info in self.file.tensors.values() if len(info.shape) > 1]
        self.quantised = any(kind.startswith("Q") for kind in matrices)

    def tensor(self, name: str, device: torch.device | None = None) -> torch.Tensor:
        info = self.file.tensors[gguf_name(name)]
        raw = self._half_split(name, self.file.raw(info.name)).to(device or "cpu")
        if info.type in _OWN_FLOATS:
            value = raw.clone().view(_OWN_FLOATS[info.type]).view(info.shape)
        else:
            value = dequantise(raw, info.type).view(info.shape)
        return checked(value, info.name, self.source)

    def rows(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        info = self.file.tensors[gguf_name(name)]
        order = self._order(name)
        wanted = ids if order is None else order[ids]
        return dequantise(self.file.raw(info.name)[wanted], info.type)  # [len(ids), in]

    def stored(self, name: str) -> tuple[str, torch.Tensor]:
        info = self.file.tensors[gguf_name(name)]
        return info.type, self._half_split(name, self.file.raw(info.name))

    def _half_split(self, name: str, raw: torch.Tensor) -> torch.Tensor:
        """Rows in the half-split rotary order; a bias is one row of numbers, so it is viewed as rows of one."""
        order = self._order(name)
        if order is None:
            return raw
        return raw.view(order.numel(), -1)[order] if raw.shape[0] == 1 else raw[order]

    def _order(self, name: str) -> torch.Tensor | None:
        """For each half-split row the stored row it comes from, or None where rows are stored as they are."""
        config, part = self.config, name.rpartition(".")[2]
        if config.family not in INTERLEAVED or part not in ("q", "k", "q_bias", "k_bias"):
            return None
        heads = config.num_heads if part.startswith("q") else config.num_kv_heads
        stored = torch.arange(heads * config.head_dim).view(heads, config.head_dim // 2, 2)
        return stored.transpose(1, 2).reshape(-1)

    def tokenizer(self) -> Tokenizer:
        with reading(f"{self.source}: its tokenizer"):
            return tokenizer_from_gguf(self.file.metadata, self.config, self.source)

    def release(self) -> None:
        self.file.release()
