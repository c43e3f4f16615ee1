"""What the tests of sessions and of workers share; the models are fixtures in conftest.py."""

from __future__ import annotations

from pathlib import Path

from forerun import LLM, SamplingParams

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, speculation="off")
LONG = "The lamp turns twelve times a minute, and every ship that hears the horn answers. " * 6
USER = {"role": "user", "content": "Who counts the ships that pass, and where are their names written?"}
PREFIXES = ["Alice:", "Bob, who listens:", " Carol"]


def params(max_tokens: int = 6, **others) -> SamplingParams:
    return SamplingParams(**{"max_tokens": max_tokens, "ignore_eos": True, **others})


def open_llm(folder: Path, **options) -> LLM:
    return LLM(str(folder), dtype="float32", threads=1, quiet=True, **{"kv_cache_tokens": 2048, **options})


def assert_no_page_is_held(llm: LLM) -> None:
    llm.clear_cache()
    assert llm.engine.pool.used == 0
