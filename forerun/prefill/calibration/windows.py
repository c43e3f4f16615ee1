"""Windows of tokens for calibration: some to fit on and some, of other files, held out.

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
from forerun.prefill.calibration.files import Section, find_files, split_held_out
from forerun.text.tokenizer import Tokenizer

MIN_TRAIN_WINDOWS, MIN_HELD_WINDOWS = 4, 2  # with fewer no figure means anything


@dataclass(frozen=True)
class WindowSettings:
    """How windows are cut, and which shares of them are made to copy (`echo`) and to recall."""

    prompt: int = 2048
    continuation: int = 64
    tokens: int = 2_000_000  # at most
    held: float = 0.1  # share of them that is held out
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


def read_windows(paths: Sequence[Path], tokenizer: Tokenizer, settings: WindowSettings, quiet: bool = False) -> Windows:
    """Windows of files and folders; the same text and settings give the same windows."""
    files = find_files(paths)
    rng = random.Random(settings.seed)
    sections = split_held_out(files, settings.held, rng)
    shares = (1.0 - settings.held, settings.held)
    least = (MIN_TRAIN_WINDOWS, MIN_HELD_WINDOWS)
    wanted = [max(2 * n, int(s * settings.tokens) // settings.length) for s, n in zip(shares, least, strict=True)]
    parts = zip(sections, wanted, ("reading text", "reading held-out text"), strict=True)
    train, held = (_cut(*part, tokenizer, settings.length, quiet) for part in parts)
    if len(train) < MIN_TRAIN_WINDOWS or len(held) < MIN_HELD_WINDOWS:
        raise _too_short(len(files), len(train), len(held), settings)
    augmenter = Augmenter(tokenizer, settings.prompt, settings.continuation)
    augmenter.augment(train, settings.echo, settings.recall, rng)
    kinds = augmenter.augment(held, settings.echo, settings.recall, rng)
    return Windows(_tensor(train), _tensor(held), kinds, len(files))


def _tensor(rows: list[list[int]]) -> Tensor:
    return torch.from_numpy(np.array(rows, dtype=np.int32))


def _too_short(files: int, train: int, held: int, settings: WindowSettings) -> BadRequest:
    least = MIN_TRAIN_WINDOWS + MIN_HELD_WINDOWS
    return BadRequest(
        f"the text is too short: {files} {'file makes' if files == 1 else 'files make'} {train} windows of "
        f"{settings.length:,} tokens to fit on and {held} of other text to evaluate on; at least {MIN_TRAIN_WINDOWS} "
        f"and {MIN_HELD_WINDOWS} are needed, {least * settings.length:,} tokens in all",
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
