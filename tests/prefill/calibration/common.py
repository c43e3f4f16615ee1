"""Tiny pairs and text of any length, for calibrations that take a second."""

from __future__ import annotations

import random
from pathlib import Path

from tests import tiny


def write_text(folder: Path, files: int = 6, words: int = 1500, seed: int = 0) -> Path:
    """Files of words that the tiny tokenizer knows, no two alike."""
    folder.mkdir(parents=True, exist_ok=True)
    known = tiny.TEXT.split()
    for i in range(files):
        rng = random.Random(seed * 1000 + i)
        (folder / f"{i}.txt").write_text(" ".join(rng.choices(known, k=words)))
    return folder


def write_pair(folder: Path) -> tuple[Path, Path]:
    """A random target, and a random draft of half its depth and width with the same tokenizer."""
    target = tiny.write_folder(folder / "target", "qwen2", seed=1)
    draft = tiny.write_folder(
        folder / "draft", "qwen2", seed=2, hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=8
    )
    return target, draft
