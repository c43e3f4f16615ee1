"""Prompts and documents that ship with the package, all written for it: benches and demos work without any download.

Knows where they are and how they are read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources

HERE = resources.files(__name__)


@dataclass(frozen=True)
class ShippedPrompt:
    """One request of a bench: its id, the kind of its task, and its text."""

    id: str
    kind: str
    text: str


def text(name: str) -> str:
    """A shipped text by its path in this folder, such as `documents/handbook.txt`."""
    return HERE.joinpath(name).read_text(encoding="utf-8")


def read_prompts() -> list[ShippedPrompt]:
    """The shipped prompts."""
    records = [json.loads(line) for line in text("prompts.jsonl").splitlines()]
    return [ShippedPrompt(record["id"], record["kind"], record["prompt"]) for record in records]
