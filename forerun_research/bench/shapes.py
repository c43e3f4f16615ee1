"""Models of a real shape with random weights: good for timing where no real one can be had, and for nothing else."""

from __future__ import annotations

import random
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.models.config import ModelConfig, RopeConfig
from forerun.models.formats.checkpoint import expected_shapes
from forerun.models.formats.dequant import as_stored

SHAPES = {
    "1.5b": ModelConfig(
        family="qwen2",
        vocab_size=151_936,
        hidden_size=1536,
        num_layers=28,
        num_heads=12,
        num_kv_heads=2,
        head_dim=128,
        intermediate_size=8960,
        max_context=32_768,
        tie_embeddings=True,
        qkv_bias=True,
        rope=RopeConfig(theta=1_000_000.0),
    ),
    "0.5b": ModelConfig(
        family="qwen2",
        vocab_size=151_936,
        hidden_size=896,
        num_layers=24,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        intermediate_size=4864,
        max_context=32_768,
        tie_embeddings=True,
        qkv_bias=True,
        rope=RopeConfig(theta=1_000_000.0),
    ),
    "8b": ModelConfig(
        family="llama",
        vocab_size=128_256,
        hidden_size=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=14_336,
        max_context=131_072,
        norm_eps=1e-5,
        rope=RopeConfig(
            theta=500_000.0, kind="llama3", factor=8.0, original_context=8192, low_freq_factor=1.0, high_freq_factor=4.0
        ),
    ),
    # Ten times the weights of 0.5b, with its vocabulary: no real model, but what a tenfold draft is timed with.
    "5b": ModelConfig(
        family="qwen2",
        vocab_size=151_936,
        hidden_size=3072,
        num_layers=36,
        num_heads=24,
        num_kv_heads=4,
        head_dim=128,
        intermediate_size=11_264,
        max_context=32_768,
        tie_embeddings=True,
        qkv_bias=True,
        rope=RopeConfig(theta=1_000_000.0),
    ),
    # Ten times apart in what a token costs, and small enough to be trained within minutes (`trained_pair`).
    "250m": ModelConfig(
        family="llama",
        vocab_size=16_384,
        hidden_size=1024,
        num_layers=20,
        num_heads=16,
        num_kv_heads=4,
        head_dim=64,
        intermediate_size=2816,
        max_context=32_768,
        tie_embeddings=True,
        rope=RopeConfig(theta=500_000.0),
    ),
    "25m": ModelConfig(
        family="llama",
        vocab_size=16_384,
        hidden_size=384,
        num_layers=12,
        num_heads=6,
        num_kv_heads=2,
        head_dim=64,
        intermediate_size=1024,
        max_context=32_768,
        tie_embeddings=True,
        rope=RopeConfig(theta=500_000.0),
    ),
    # As many weights, another architecture: deep and narrow, with norms of queries and keys.
    "25m deep": ModelConfig(
        family="qwen3",
        vocab_size=16_384,
        hidden_size=256,
        num_layers=24,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        intermediate_size=768,
        max_context=32_768,
        tie_embeddings=True,
        qk_norm=True,
        rope=RopeConfig(theta=500_000.0),
    ),
    # Small enough to try a bench on a CPU within seconds.
    "tiny": ModelConfig(
        family="llama",
        vocab_size=512,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=128,
        max_context=2048,
        tie_embeddings=True,
    ),
    "tinier": ModelConfig(
        family="llama",
        vocab_size=512,
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        intermediate_size=64,
        max_context=2048,
        tie_embeddings=True,
    ),
}


class RandomCheckpoint:
    """A `Checkpoint` whose tensors are drawn when asked for; the same name always gives the same values."""

    quantised = False
    files: tuple[Path, ...] = ()

    def __init__(self, shape: str, device: torch.device) -> None:
        self.config, self.device, self.source = SHAPES[shape], device, f"random {shape}"
        self._shapes = expected_shapes(self.config)

    def tensor(self, name: str, device: torch.device | None = None) -> Tensor:
        shape = self._shapes[name]
        if name.endswith("norm"):
            return torch.ones(shape, device=self.device)
        draw = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        return torch.empty(shape, device=self.device, dtype=dtype).normal_(0.0, 0.02, generator=draw)

    def rows(self, name: str, ids: Tensor) -> Tensor:
        return self.tensor(name)[ids].float()

    def stored(self, name: str) -> tuple[str, Tensor]:
        return as_stored(self.tensor(name))

    def tokenizer(self) -> Any:
        """None: random models are asked with token ids and answer with token ids."""
        return None

    def release(self) -> None:
        """Nothing is mapped."""


def random_ids(vocab: int, count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(vocab) for _ in range(count)]
