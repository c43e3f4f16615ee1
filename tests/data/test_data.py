"""What ships with the package is there, varied and long enough."""

from __future__ import annotations

import ast

from forerun import data


def test_prompts_are_many_and_varied() -> None:
    prompts = data.read_prompts()
    assert len(prompts) >= 24
    assert len({prompt.id for prompt in prompts}) == len({prompt.text for prompt in prompts}) == len(prompts)
    assert {"question", "code", "summary", "extraction", "multilingual"} <= {prompt.kind for prompt in prompts}


def test_documents_are_long_and_their_own() -> None:
    handbook, depot = data.text("documents/handbook.txt"), data.text("documents/depot.py")
    assert len(handbook.split()) > 1800
    assert len(depot.splitlines()) > 240
    ast.parse(depot)
    ast.parse(data.text("quality_code.txt"))
    sentences = [s for s in handbook.replace("\n", " ").split(". ") if len(s) > 40]
    assert len(set(sentences)) == len(sentences)  # no filler
