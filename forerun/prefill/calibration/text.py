"""Windows of tokens for calibration: some to learn from and some, of other files, to judge by.

A window is a prompt followed by its continuation. Text is read in an order that depends on the seed alone, until there
are tokens enough. Knows a tokenizer, but no model.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from forerun.core.progress import track
from forerun.errors import BadRequest
from forerun.prefill.calibration.augment import Augmenter
from forerun.prefill.calibration.files import Section, find_files, split
from forerun.text.tokenizer import Tokenizer

LEAST_TRAIN, LEAST_HELD = 4, 2  # windows; with fewer no figure means anything


@dataclass(frozen=True)
class WindowSettings:
    """How windows are cut, and which shares of them are made to copy and to recall."""

    prompt: int = 2048
    continuation: int = 64
    tokens: int = 2_000_000  # most that are read
    held: float = 0.1  # share of them to judge by
    echo: float = 0.2
    recall: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (("prompt", 32), ("continuation", 8), ("tokens", 1)):
            if getattr(self, name) < low:
                raise BadRequest(f"calibration: {name} is {getattr(self, name)}, the least is {low}", "give more")
        if not 0.0 < self.held <= 0.5 or min(self.echo, self.recall) < 0.0 or self.echo + self.recall > 1.0:
            shares = f"held {self.held}, echo {self.echo}, recall {self.recall}"
            raise BadRequest(f"calibration: impossible shares: {shares}", "held up to 0.5, echo and recall up to 1")

    @property
    def length(self) -> int:
        return self.prompt + self.continuation


@dataclass(frozen=True)
class Windows:
    train: Tensor  # [windows, prompt + continuation] int32
    held: Tensor  # the same, of other text
    kinds: list[str]  # of the held ones: plain, echo or recall
    files: int


def read_windows(paths: Sequence[Path], tokenizer: Tokenizer, recipe: WindowSettings, quiet: bool = False) -> Windows:
    """Windows of files and folders; the same text and recipe give the same windows."""
    files = find_files(paths)
    rng = random.Random(recipe.seed)
    sections = split(files, recipe.held, rng)
    shares = (1.0 - recipe.held, recipe.held)
    wanted = [max(2 * least, int(share * recipe.tokens) // recipe.length) for share, least in _parts(shares)]
    labels = ("reading text", "reading held-out text")
    train, held = (_cut(*args, tokenizer, recipe.length, quiet) for args in zip(sections, wanted, labels, strict=True))
    if len(train) < LEAST_TRAIN or len(held) < LEAST_HELD:
        raise _too_short(len(files), len(train), len(held), recipe)
    augmenter = Augmenter(tokenizer, recipe.prompt, recipe.continuation)
    augmenter.spread(train, recipe.echo, recipe.recall, rng)
    kinds = augmenter.spread(held, recipe.echo, recipe.recall, rng)
    return Windows(_tensor(train), _tensor(held), kinds, len(files))


def _parts(shares: tuple[float, float]) -> list[tuple[float, int]]:
    return list(zip(shares, (LEAST_TRAIN, LEAST_HELD), strict=True))


def _tensor(rows: list[list[int]]) -> Tensor:
    return torch.from_numpy(np.array(rows, dtype=np.int32))


def _too_short(files: int, train: int, held: int, recipe: WindowSettings) -> BadRequest:
    return BadRequest(
        f"the text is too short: {files} {'file makes' if files == 1 else 'files make'} {train} windows of "
        f"{recipe.length:,} tokens to learn from and {held} of other text to judge by; at least {LEAST_TRAIN} and "
        f"{LEAST_HELD} are needed, {(LEAST_TRAIN + LEAST_HELD) * recipe.length:,} tokens in all",
        "give more text (a million tokens make a good start) in several files, or a smaller --window",
    )


def _cut(
    sections: list[Section], want: int, label: str, tokenizer: Tokenizer, length: int, quiet: bool
) -> list[list[int]]:
    """Windows that begin where a document does, as far as documents are long enough; what is left over is joined."""
    start = [tokenizer.bos_id] if tokenizer.bos_id is not None and tokenizer.add_bos else []
    body = length - len(start)
    rows: list[list[int]] = []
    rest: list[int] = []
    for section in track(sections, label, quiet):
        for text in section.texts():
            ids = tokenizer.encode(text)
            whole = len(ids) // body * body
            rows += [start + ids[at : at + body] for at in range(0, whole, body)]
            rest += ids[whole:]
            while len(rest) >= body:
                rows.append(start + rest[:body])
                rest = rest[body:]
        if len(rows) >= want:
            break
    return rows[:want]
