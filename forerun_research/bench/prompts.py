"""Prompts of benches: the shipped ones, or those of a user's own file (`--data`)."""

from __future__ import annotations

import json
from pathlib import Path

from forerun import data
from forerun.data import ShippedPrompt
from forerun.errors import BadRequest


def read_prompts(path: Path | None = None) -> list[ShippedPrompt]:
    """The shipped prompts, or those of a file: JSON lines with a `prompt` field, or plain text as one prompt."""
    if path is None:
        return data.read_prompts()
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"cannot read {path}: {error}", "give a UTF-8 text file or a .jsonl file of prompts") from None
    if not content.strip():
        raise BadRequest(f"{path} is empty", "give a UTF-8 text file or a .jsonl file of prompts")
    if path.suffix == ".jsonl":
        return _parse_lines(content, str(path))
    return [ShippedPrompt(path.stem, "document", content)]


def _parse_lines(content: str, source: str) -> list[ShippedPrompt]:
    prompts = []
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            prompt = ShippedPrompt(str(record.get("id", number)), str(record.get("kind", "prompt")), record["prompt"])
        except (ValueError, KeyError, AttributeError):
            raise BadRequest(
                f"{source}, line {number}: not a JSON object with a `prompt` field",
                'one request a line: {"prompt": "..."}',
            ) from None
        if not isinstance(prompt.text, str) or not prompt.text:
            raise BadRequest(f"{source}, line {number}: `prompt` is empty or not text", "give every prompt some text")
        prompts.append(prompt)
    return prompts
