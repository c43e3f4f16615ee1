"""Tiny models for the tests of sessions and of workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forerun import LLM
from tests.sharing.common import open_llm


@pytest.fixture(scope="module")
def make(tiny_folder: Callable[[str], Path]) -> Callable[..., LLM]:
    def made(**options: Any) -> LLM:
        return open_llm(tiny_folder("qwen3"), **{"kv_cache_tokens": 4096, **options})

    return made


@pytest.fixture(scope="module")
def llms(tiny_folder: Callable[[str], Path]) -> Iterator[Callable[[str], LLM]]:
    """`llms("qwen3")`: a tiny model of that family."""
    made: dict[str, LLM] = {}

    def find(family: str) -> LLM:
        if family not in made:
            made[family] = open_llm(tiny_folder(family))
        return made[family]

    yield find
    for llm in made.values():
        llm.close()
