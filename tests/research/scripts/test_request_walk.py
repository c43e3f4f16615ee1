"""How far a reader walks to follow one request: counted on the real engine, and never more than this."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from forerun import LLM
from forerun_research.scripts.request_walk import drafted_walk, exact_walk

# The goal is 20 hops in 25 files, and 30 files for a drafted prompt. These limits only get lower.
MAX_EXACT_HOPS = 20
MAX_EXACT_FILES = 25
MAX_DRAFTED_FILES = 30


@pytest.fixture(scope="module")
def llm(smollm2: Path) -> Iterator[LLM]:
    with LLM(smollm2, quiet=True) as opened:
        yield opened


def test_an_exact_request_is_a_short_walk(llm: LLM) -> None:
    walk = exact_walk(llm)
    files = [file for file, _ in walk.hops]
    # The walk is the whole request: public method, step, forward, text.
    assert walk.hops[0] == ("llm.py", "LLM.generate")
    assert {"engine/engine.py", "models/decoder.py", "engine/output.py"} <= set(files)
    assert len(walk.hops) <= MAX_EXACT_HOPS, walk.hops
    assert len(walk.files) <= MAX_EXACT_FILES, walk.files


def test_a_drafted_prompt_is_a_longer_one(llm: LLM) -> None:
    walk = drafted_walk(llm)
    assert {"prefill/plan.py", "prefill/checks.py", "models/decoder.py"} <= set(walk.files)
    assert len(walk.files) <= MAX_DRAFTED_FILES, walk.files
