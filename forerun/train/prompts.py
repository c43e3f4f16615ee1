"""Prompts of many kinds for a target's own answers: questions, maths, code to write and to continue, texts to work on.

Made of lists that come with the package and of source files that are given: function heads with their docstrings are
continued as text, functions and paragraphs are asked about. No benchmark's prompts. Knows a tokenizer; no model.
"""

from __future__ import annotations

import ast
import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from forerun import data
from forerun.text.tokenizer import Tokenizer

MAX_PROMPT_TOKENS = 320
SUFFIXES = (".py", ".md", ".rst", ".txt")
MAX_FILES = 600  # of source that are parsed
MAX_FILE_BYTES = 200_000
FUNCTION_LINES = (6, 40)  # of a function that is asked about
PARAGRAPH_CHARS = (250, 1500)
SHARES = {"chat": 0.22, "maths": 0.14, "coding": 0.14, "head": 0.24, "excerpt": 0.12, "function": 0.06, "text": 0.08}
EXCERPT_LINES = (8, 40)


@dataclass
class Sources:
    """Pieces of source files."""

    heads: list[str]  # imports, signature and docstring of a function
    functions: list[str]  # whole functions
    paragraphs: list[str]  # of prose, out of docstrings and documents
    excerpts: list[str]  # lines from the middle of a file


def read_sources(folders: Sequence[Path], rng: random.Random) -> Sources:
    """Of some of the files below the folders."""
    found = Sources([], [], [], [])
    files = [path for folder in folders for path in _files(folder)]
    for path in rng.sample(files, min(MAX_FILES, len(files))):
        try:
            text = path.read_text(encoding="utf-8")[:MAX_FILE_BYTES]
            if path.suffix == ".py":
                _read_python(text, found, rng)
            else:
                found.paragraphs += _paragraphs(text)
        except (OSError, ValueError, SyntaxError, RecursionError):
            continue  # no text, or no Python of this version
    return found


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    walked = ((Path(folder), name) for folder, _, names in os.walk(path) for name in names)
    return sorted(folder / name for folder, name in walked if name.endswith(SUFFIXES))


def _read_python(text: str, found: Sources, rng: random.Random) -> None:
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        doc = ast.get_docstring(node)
        if doc:
            found.paragraphs += _paragraphs(doc)
        if not isinstance(node, ast.FunctionDef) or node.end_lineno is None:
            continue
        own = lines[node.lineno - 1 : node.end_lineno]
        if doc and node.body and node.body[0].end_lineno is not None and len(doc) < PARAGRAPH_CHARS[1]:
            head = lines[node.lineno - 1 : node.body[0].end_lineno]
            if len(own) > len(head):
                found.heads.append(_dedent(head))
        if FUNCTION_LINES[0] <= len(own) <= FUNCTION_LINES[1]:
            found.functions.append(_dedent(own))
    for _ in range(len(lines) // 200):
        at = rng.randrange(len(lines))
        found.excerpts.append("\n".join(lines[at : at + rng.randint(*EXCERPT_LINES)]) + "\n")


def _dedent(lines: list[str]) -> str:
    """As a function of a module."""
    indent = len(lines[0]) - len(lines[0].lstrip())
    return "\n".join(line[indent:] if not line[:indent].strip() else line for line in lines) + "\n"


def _paragraphs(text: str) -> list[str]:
    parts = (" ".join(part.split()) for part in text.split("\n\n"))
    low, high = PARAGRAPH_CHARS
    return [part for part in parts if low <= len(part) <= high and _is_prose(part)]


def _is_prose(text: str) -> bool:
    return sum(c.isalpha() or c == " " for c in text) > 0.85 * len(text)


@dataclass(frozen=True)
class Prompt:
    ids: tuple[int, ...]
    message: bool  # to be answered; else text to be continued


class PromptMix:
    """An endless mix of prompts as token ids."""

    def __init__(
        self, tokenizer: Tokenizer, folders: Sequence[Path], seed: int, max_tokens: int = MAX_PROMPT_TOKENS
    ) -> None:
        self._tokenizer, self._rng, self._max_tokens = tokenizer, random.Random(seed), max_tokens
        self._lists = json.loads(data.text("training_prompts.json"))
        self._sources = read_sources(folders, self._rng)
        chat = tokenizer.has_chat_template
        makers: dict[str, tuple[Callable[[], str], bool]] = {  # and whether it is a message, not text to continue
            "chat": (self._chat, True),
            "maths": (self._maths, True),
            "coding": (self._coding, True),
            "head": (self._head, False),
            "excerpt": (lambda: self._rng.choice(self._sources.excerpts), False),
            "function": (lambda: self._about("about_code", self._sources.functions), True),
            "text": (lambda: self._about("about", self._sources.paragraphs), True),
        }
        s = self._sources
        empty = {"head": not s.heads, "excerpt": not s.excerpts, "function": not s.functions, "text": not s.paragraphs}
        self._makers = {
            name: (make, message)
            for name, (make, message) in makers.items()
            if not empty.get(name) and (chat or not message)
        }

    def __iter__(self) -> Iterator[Prompt]:
        names = list(self._makers)
        while names:
            name = self._rng.choices(names, [SHARES[each] for each in names])[0]
            make, message = self._makers[name]
            text = make()
            if message:
                ids = self._tokenizer.apply_chat_template([{"role": "user", "content": text}])
            else:
                ids = self._tokenizer.encode(text, add_special=True)
            if 4 <= len(ids) <= self._max_tokens:
                yield Prompt(tuple(ids), message)

    def _chat(self) -> str:
        ask = self._rng.choice(self._lists["asks"])
        return ask.format(*self._rng.sample(self._lists["topics"], 2))

    def _coding(self) -> str:
        return self._rng.choice(self._lists["code"]).format(self._rng.choice(self._lists["tasks"]))

    def _maths(self) -> str:
        rng = self._rng
        a, b = rng.sample(self._lists["names"], 2)
        values = {"n": rng.randint(6, 60), "m": rng.randint(2, 40), "k": rng.randint(2, 9), "j": rng.randint(2, 8)}
        first = rng.choice(self._lists["maths"]).format(a=a, b=b, p=10 * rng.randint(6, 50), **values)
        return first + rng.choice(["", "", " Explain your answer step by step.", " Let's think step by step."])

    def _head(self) -> str:
        before = self._rng.choice(["", "", "from typing import List\n\n\n", "import math\n\n\n"])
        return before + self._rng.choice(self._sources.heads)

    def _about(self, forms: str, texts: list[str]) -> str:
        return str(self._rng.choice(self._lists[forms])).replace("{}", self._rng.choice(texts).strip())
