"""Structured extraction: answers that fit a JSON schema, given as a dict or as a pydantic model.

python examples/extraction.py
"""

from __future__ import annotations

import json
from pathlib import Path

from forerun import LLM, Grammar, SamplingParams

TEXTS = (
    "Mara has kept the north light for twelve years; before that she repaired clocks.",
    "The lamp at Skerry is run by Tom Hale, who came four years ago.",
)
SCHEMA = json.loads((Path(__file__).parent / "keeper.json").read_text())


def main() -> None:
    params = SamplingParams(max_tokens=64, grammar=Grammar.json(SCHEMA), speculation="grammar")
    with LLM() as llm:
        prompts = [
            [{"role": "user", "content": f"Extract the lighthouse keeper as JSON with name and years.\n\n{text}"}]
            for text in TEXTS
        ]
        for text, answer in zip(TEXTS, llm.chat(prompts, params), strict=True):
            keeper = json.loads(answer.text)  # always valid: the grammar allows nothing else
            print(f"{keeper['name']!r}, {keeper['years']} years  <-  {text}")
        usage = answer.usage
        print(f"{usage.accepted} of {usage.drafted} drafted tokens accepted: a schema leaves little choice")


if __name__ == "__main__":
    main()
