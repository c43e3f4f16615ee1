"""Metadata of published files, as far as tiny models do not cover it: rope scaling, Gemma's sizes, refusals."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.errors import CorruptModel, UnsupportedModel
from forerun.models.config import RopeConfig
from forerun.models.formats.checkpoint import open_checkpoint
from forerun.models.formats.gguf_checkpoint import gguf_name, llama3_factors, read_config
from tests import tiny

SHAPES: dict[str, tuple[int, ...]] = {"token_embd.weight": (1000, 256)}


def metadata(arch: str = "llama", **keys: Any) -> dict[str, Any]:
    base = {
        "block_count": 12,
        "context_length": 4096,
        "embedding_length": 256,
        "feed_forward_length": 512,
        "attention.head_count": 4,
        "rope.freq_base": 500_000.0,
    }
    return {"general.architecture": arch} | {f"{arch}.{key}": value for key, value in (base | keys).items()}


def test_names() -> None:
    assert gguf_name("layers.11.post_mlp_norm") == "blk.11.post_ffw_norm.weight"
    assert gguf_name("head") == "output.weight"


def test_defaults() -> None:
    config = read_config(metadata(), SHAPES, "m")
    assert (config.num_kv_heads, config.head_dim, config.tie_embeddings) == (4, 64, True)
    assert config.rope == RopeConfig(theta=500_000.0) and config.sliding_window is None


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(500_000.0, "llama3", 8.0, 8192, 1.0, 4.0),  # Llama 3.1
        RopeConfig(500_000.0, "llama3", 32.0, 8192, 1.0, 4.0),  # Llama 3.2
        RopeConfig(500_000.0, "llama3", 16.0, 4096, 1.0, 8.0),
        RopeConfig(500_000.0, "llama3", 8.0, 8192, 2.0, 6.0),  # the same rule as low 1, high 3, context 4096
    ],
)
def test_llama3_scaling_is_recovered(rope: RopeConfig) -> None:
    table = llama3_factors(rope, 64).float()
    found = read_config(metadata(), SHAPES, "m", table).rope
    assert found.kind == "llama3" and found.factor == rope.factor
    torch.testing.assert_close(llama3_factors(found, 64).float(), table, rtol=1e-4, atol=0)


def test_llama3_factors_equal_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    values = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "original_max_position_embeddings": 8192}
    values |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = LlamaConfig(head_dim=128, max_position_embeddings=131072, rope_parameters=values)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500_000.0 ** -(torch.arange(64, dtype=torch.float64) / 64)
    ours = plain / llama3_factors(RopeConfig(500_000.0, "llama3", 8.0, 8192, 1.0, 4.0), 64)
    torch.testing.assert_close(ours.float(), scaled, rtol=1e-5, atol=0)


def test_no_rule_fits_the_table() -> None:
    table = torch.linspace(1.0, 8.0, 64) ** 2
    with pytest.raises(UnsupportedModel, match="rope_freqs"):
        read_config(metadata(), SHAPES, "m", table)


def test_yarn() -> None:
    keys: dict[str, Any] = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 1024,
    }
    rope = read_config(metadata("qwen2", **keys), SHAPES, "m").rope
    assert (rope.kind, rope.factor, rope.original_context, rope.attention_factor) == ("yarn", 4.0, 1024, None)


def test_linear() -> None:
    keys: dict[str, Any] = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "attention.sliding_window": 128}
    config = read_config(metadata("gemma3", **keys), SHAPES, "m")
    assert config.layer_ropes[5] == RopeConfig(500_000.0, "linear", 8.0)
    assert config.layer_ropes[4] == RopeConfig(10_000.0)  # sliding layers are not scaled
    assert [config.windows[i] for i in (4, 5, 10, 11)] == [128, None, 128, None]


def test_gemma3_27b_has_its_own_scale() -> None:
    keys: dict[str, Any] = {"block_count": 62, "attention.key_length": 128, "attention.sliding_window": 128}
    assert read_config(metadata("gemma3", **keys), SHAPES, "m").scale == 64**-0.5


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (metadata("mamba"), "'mamba' is not supported; supported are llama, mistral, qwen2, qwen3, gemma3"),
        (metadata("llama", **{"rope.scaling.type": "longrope"}), "longrope"),
        (metadata("llama", **{"rope.dimension_count": 16}), "16 of 64"),
        (metadata("gemma3", final_logit_softcapping=30.0), "soft-capping"),
        ({}, "architecture None"),
    ],
)
def test_unsupported(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        read_config(values, SHAPES, "m")


@pytest.mark.parametrize("value", [None, 0, "four", [4, 2]])
def test_bad_counts(value: Any) -> None:
    with pytest.raises(CorruptModel, match="llama.attention.head_count"):
        read_config(metadata(**{"attention.head_count": value}), SHAPES, "m")


def test_uneven_heads() -> None:
    keys: dict[str, Any] = {"attention.head_count_kv": 3}
    with pytest.raises(CorruptModel, match="3 KV heads"):
        read_config(metadata(**keys), SHAPES, "m")


def test_llama3_table_in_a_file(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    table = llama3_factors(RopeConfig(10_000.0, "llama3", 8.0, 8192, 1.0, 4.0), 8)
    path = tiny.write_gguf(tmp_path / "m.gguf", tiny_folder("llama"), rope_freqs=table.numpy())
    assert open_checkpoint(path).config.rope == RopeConfig(10_000.0, "llama3", 8.0, 8192, 1.0, 4.0)
