"""Which weights a checkpoint holds, in 32 hex digits: what was fitted to one model must not meet another.

Reads samples, not everything: all norms and biases, and some rows of every matrix. A fine-tune or another quantisation
moves nearly every number, so a few thousand of them tell. Looks only at what decides a model's hidden states, and at
numbers, not at bytes of a file: the precision it is built in later, its name and its format do not count.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, fields
from typing import Any

import torch

from forerun.models.config import ModelConfig
from forerun.models.formats.checkpoint import Checkpoint
from forerun.models.formats.shapes import expected_shapes

ROWS = 2  # of every matrix of a layer
EMBED_ROWS = 16  # of the embedding and the head: ordinary tokens lie all over
_IGNORED = ("family", "max_context", "eos_ids", "bos_id")  # names, and where texts end: they change no number


def fingerprint(checkpoint: Checkpoint) -> str:
    digest = hashlib.sha256(_canonical(checkpoint.config).encode())
    for name, shape in sorted(expected_shapes(checkpoint.config).items()):
        if len(shape) == 1:
            values = checkpoint.tensor(name)
        else:
            values = checkpoint.rows(name, _sample(shape[0], ROWS if name.startswith("layers.") else EMBED_ROWS))
        data = values.detach().float().cpu().contiguous().numpy().astype("<f4", copy=False)
        digest.update(f"{name} {shape}".encode() + data.tobytes())
    return digest.hexdigest()[:32]


def _sample(rows: int, count: int) -> torch.Tensor:
    """Rows spread over a matrix, its first and last among them."""
    return torch.linspace(0, rows - 1, min(rows, count), dtype=torch.float64).round().long()


def _canonical(config: ModelConfig) -> str:
    """The configuration as text, the same whatever file it was read from."""
    values = {entry.name: getattr(config, entry.name) for entry in fields(config) if entry.name not in _IGNORED}
    values |= {name: asdict(values[name]) for name in ("rope", "local_rope") if values[name] is not None}
    return json.dumps(_rounded(values), sort_keys=True)


def _rounded(value: Any) -> Any:
    """Numbers to six digits: some files keep them as float32, others in decimals."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return f"{value:.6g}" if isinstance(value, float) else value
