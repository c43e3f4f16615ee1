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
from forerun.options import check_number
from forerun.prefill.calibration.files import CHAT, Conversation, Section, find_files, split_held_out, text_kind
from forerun.text.tokenizer import Tokenizer

MIN_TRAIN_WINDOWS, MIN_HELD_WINDOWS = 4, 2  # with fewer no figure means anything
_FIRST = ("amber", "quiet", "northern", "velvet", "hollow", "silver", "crooked", "distant", "golden", "patient")
_SECOND = ("harbour", "lantern", "orchard", "falcon", "bridge", "meadow", "archive", "compass", "glacier", "mill")
_THINGS = ("special number", "access code", "lucky number", "room number", "serial number", "page count")
_MIN_LEAD_TOKENS = 16  # of the repetition that stand in the prompt: enough to identify the span


@dataclass(frozen=True)
class WindowSettings:
    """How windows are cut, and which shares of them are made to copy (`copy`) and to recall."""

    prompt: int = 2048
    continuation: int = 64
    tokens: int = 2_000_000  # at most
    held: float = 0.1  # share of them that is held out
    copy: float = 0.2
    recall: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (("prompt", 32), ("continuation", 8), ("tokens", 1)):
            check_number(f"calibration: {name}", getattr(self, name), low, whole=True)
        if not 0.0 < self.held <= 0.5 or min(self.copy, self.recall) < 0.0 or self.copy + self.recall > 1.0:
            shares = f"held {self.held}, copy {self.copy}, recall {self.recall}"
            raise BadRequest(f"calibration: impossible shares: {shares}", "held up to 0.5, copy and recall up to 1")

    @property
    def length(self) -> int:
        return self.prompt + self.continuation


@dataclass(frozen=True)
class Windows:
    train: Tensor  # [windows, prompt + continuation] int32
    held: Tensor  # the same, of other text
    kinds: list[tuple[str, ...]]  # of the held ones: plain, copy or recall, and the kind of their text
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
    (train, _), (held, texts) = (_cut(*part, tokenizer, settings.length, quiet) for part in parts)
    if len(train) < MIN_TRAIN_WINDOWS or len(held) < MIN_HELD_WINDOWS:
        raise _too_short(len(files), len(train), len(held), settings)
    augmenter = Augmenter(tokenizer, settings.prompt, settings.continuation)
    augmenter.augment(train, settings.copy, settings.recall, rng)
    made = augmenter.augment(held, settings.copy, settings.recall, rng)
    return Windows(_tensor(train), _tensor(held), [*zip(made, texts, strict=True)], len(files))


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
) -> tuple[list[list[int]], list[str]]:
    """Windows that begin where a document does, as far as documents are long enough; what is left over is joined. With
    the kind of text of each, of joined ones the last."""
    start = [tokenizer.bos_id] if tokenizer.bos_id is not None and tokenizer.add_bos else []
    body = length - len(start)
    rows: list[list[int]] = []
    kinds: list[str] = []
    rest: list[int] = []
    for section in track(sections, label, quiet):
        for document in section.documents():
            ids = _encoded(document, tokenizer)
            whole = len(ids) // body * body
            rows += [start + ids[at : at + body] for at in range(0, whole, body)]
            rest += ids[whole:]
            while len(rest) >= body:
                rows.append(start + rest[:body])
                rest = rest[body:]
            kind = text_kind(section.path) if isinstance(document, str) else CHAT
            kinds += [kind] * (len(rows) - len(kinds))
        if len(rows) >= want:
            break
    return rows[:want], kinds[:want]


def _encoded(document: str | Conversation, tokenizer: Tokenizer) -> list[int]:
    if isinstance(document, str):
        return tokenizer.encode(document)
    return tokenizer.apply_chat_template(document, add_generation_prompt=False)


class Augmenter:
    """Windows made to copy and to recall: common uses of long prompts, and what drafted K/V loses first.

    `copy`: the end of the prompt begins to repeat an earlier span, and the continuation goes on with it. `recall`:
    made-up facts stand at random places of the prompt, a question about them at its end, and the continuation is the
    answer, all in the model's own chat format. Lengths stay as they are to the token.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: int, continuation: int) -> None:
        self._tokenizer, self._prompt, self._continuation = tokenizer, prompt, continuation
        self._first = 1 if tokenizer.bos_id is not None and tokenizer.add_bos else 0

    def augment(self, rows: list[list[int]], copy: float, recall: float, rng: random.Random) -> list[str]:
        """Change shares of the rows in place, spread evenly over them; returns the kind of each."""
        kinds = []
        for i, row in enumerate(rows):
            # A low-discrepancy sequence: the shares hold for any number of rows, however few
            place = (i * 0.6180339887 + 0.5) % 1.0
            kind = "copy" if place < copy else "recall" if place >= 1.0 - recall else "plain"
            made = {"copy": self.with_copy, "recall": self.with_recall}[kind](row, rng) if kind != "plain" else None
            if made is None:  # plain, or too short to hold it
                kind = "plain"
            else:
                rows[i] = made
            kinds.append(kind)
        return kinds

    def with_copy(self, row: list[int], rng: random.Random) -> list[int] | None:
        """The row with its end replaced by an earlier span of itself."""
        lead = rng.randint(_MIN_LEAD_TOKENS, 3 * _MIN_LEAD_TOKENS)
        span = lead + self._continuation
        room = self._prompt - lead - span  # starts that leave the span whole before its repetition
        if room < self._first:
            return None
        at = rng.randint(self._first, room)
        return row[: self._prompt - lead] + row[at : at + span]

    def with_recall(self, row: list[int], rng: random.Random) -> list[int] | None:
        """Facts in the row, a question about them, and the answer as its continuation."""
        encode = self._tokenizer.encode
        thing = rng.choice(_THINGS)
        names = [f"{a} {b}" for a, b in zip(rng.sample(_FIRST, 10), rng.sample(_SECOND, 10), strict=True)]
        facts: list[tuple[str, str]] = []
        answer: list[int] = []
        while len(answer) < self._continuation:  # as many facts as the answer needs to be long enough
            if len(facts) == len(names):
                return None
            name = names[len(facts)]
            facts.append((name, f"The {thing} of the {name} is {rng.randint(1000, 9999999)}."))
            answer = encode(" ".join(sentence for _, sentence in facts))
        asked = [name for name, _ in facts]
        listed = asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])} and {asked[-1]}"
        before, after = self.frame(f"What is the {thing} of the {listed}? Answer in whole sentences.")
        inserts = [encode(f"\n{sentence}\n") for _, sentence in facts]
        room = self._prompt - len(before) - len(after) - sum(map(len, inserts))
        if room < len(row) // 4:
            return None
        body = row[self._first : self._first + room]
        for ids in rng.sample(inserts, len(inserts)):
            at = rng.randint(0, len(body))
            body[at:at] = ids
        return before + body + after + answer[: self._continuation]

    def frame(self, question: str) -> tuple[list[int], list[int]]:
        """What stands before and after a document that a question follows. Found by rendering two documents: what is
        the same in both is the frame, whatever the template."""
        one, other = (self._rendered(f"{document}\n\n{question}") for document in ("7", "document"))
        shorter = min(len(one), len(other))
        before = next((i for i in range(shorter) if one[i] != other[i]), shorter)
        after = next((i for i in range(shorter - before) if one[-1 - i] != other[-1 - i]), shorter - before)
        return one[:before], one[len(one) - after :]

    def _rendered(self, text: str) -> list[int]:
        if self._tokenizer.has_chat_template:
            return self._tokenizer.apply_chat_template([{"role": "user", "content": text}])
        return self._tokenizer.encode(f"{text}\nAnswer:", add_special=True)
