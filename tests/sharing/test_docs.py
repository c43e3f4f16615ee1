"""The page about sharing is one program: it must run from top to bottom, here with a tiny model."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import forerun
from forerun import sharing
from forerun.prefill.profile import CHUNK_DAMAGE
from tests import tiny

PAGE = Path(__file__).parents[2] / "docs" / "sharing.md"


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(tiny.write_folder(tmp_path / "model", "qwen3", max_position_embeddings=8192))
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    first = examples[0].replace('"smollm2-135m-instruct"', f'{model!r}, threads=1, dtype="float32", quiet=True')
    assert first != examples[0] and len(examples) >= 10
    monkeypatch.chdir(tmp_path)
    # K/V of random weights depends on all that was before it: copied elsewhere it would be refused
    monkeypatch.setattr("forerun.prefill.profile.CHUNK_DAMAGE", replace(CHUNK_DAMAGE, max_kl=float("inf")))
    names: dict[str, Any] = {}
    try:
        for example in (first, *examples[1:]):
            exec(compile(example, "docs/sharing.md", "exec"), names)
    finally:
        if "llm" in names:
            names["llm"].close()
    assert capsys.readouterr().out.count("'approximate'") >= 4
    assert names["answer"].usage.served["approximate"] > 1000  # documents in another order
    assert names["rank"].cached_tokens > 1000 and names["done"].results["#E3"] == "2070"
    assert names["llm"].sessions.names() == ["light", "north", "south", "storm"]


def test_packages_of_public_names_need_no_import_of_their_own() -> None:
    assert forerun.__getattr__("recipes").best_of_n and forerun.__getattr__("sharing").token_advantages
    assert {"recipes", "sharing"} <= set(dir(forerun))
    for name in sharing.__all__:
        assert hasattr(sharing, name)
