"""Blocks and heads of a tiny target as if they had been trained, and how they are opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.models.formats.checkpoint import open_checkpoint
from forerun.models.formats.hidden_drafter import HiddenDrafterWeights
from forerun.prefill.calibration.dense import DenseModel
from forerun.train.block import BlockNetwork
from forerun.train.heads import HeadsNetwork
from forerun.train.run import HiddenRun, TrainJob
from forerun.train.trainer import TrainSettings

CPU, TOKENS, WINDOW, MASK = torch.device("cpu"), 4, 16, 1
SMALL: dict[str, Any] = {"tokens": TOKENS, "rank": 4, "vocab": 300, "minutes": 0.02, "window": 32, "long_window": 64}
VARIANTS: dict[str, dict[str, Any]] = {
    "block": {},
    "heads": {},
    "norms": {"state_norms": True},
    "kv": {"reuse": "kv"},
    "both": {"reuse": "both", "state_norms": True},
    "low-rank": {"head_rank": 32},
    "state-input": {"state_input": True},
    "five-bits": {"state_input": True, "bits": 5},
}
SETTINGS = {
    name: TrainSettings(
        kind=name if name == "heads" else "block",
        **{"attention_window": WINDOW, "batch_tokens": 128, "rate": 1e-2, "layers": 2, **SMALL, **options},
    )
    for name, options in VARIANTS.items()
}
OPTIONS: dict[str, Any] = {"dtype": "float32", "kv_cache_tokens": 4096, "max_model_len": 256, "quiet": True}
PROMPTS = [[5, 6, 7, 8] * 6, list(range(20, 90)), [9, 9, 9, 40, 41, 42, 9, 9, 9], [300, 301]]


def teacher(target: Path) -> DenseModel:
    return DenseModel.from_checkpoint(open_checkpoint(target), CPU, torch.float32, quiet=True)


def make(kind: str, dense: DenseModel, ids: Tensor) -> BlockNetwork | HeadsNetwork:
    return (
        HeadsNetwork(dense, ids, SETTINGS[kind]) if kind == "heads" else BlockNetwork(dense, ids, SETTINGS[kind], MASK)
    )


def network(kind: str, dense: DenseModel) -> BlockNetwork | HeadsNetwork:
    """As if it had been trained: every parameter is random."""
    ids = torch.randperm(520, generator=torch.Generator().manual_seed(3))[:300].sort().values
    made = make(kind, dense, ids)
    generator = torch.Generator().manual_seed(4)
    for value in made.parameters():
        value.data += 0.1 * torch.randn(value.shape, generator=generator)
    return made


def trained(target: Path, kind: str) -> HiddenDrafterWeights:
    made = HiddenRun(TrainJob(str(target), None, Path(f"{kind}.safetensors"), answers=1), SETTINGS[kind])
    made.covered = 1.0
    return made.made(network(kind, teacher(target)), {})
