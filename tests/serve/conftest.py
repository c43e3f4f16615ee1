from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forerun import LLM
from tests.serve.common import Running, running, slowed

collect_ignore = [] if importlib.util.find_spec("zmq") else ["test_kv_events_zmq.py"]


@pytest.fixture(scope="session")
def llm(tiny_folder: Callable[[str], Path]) -> Iterator[LLM]:
    folder = str(tiny_folder("qwen3"))
    with LLM(folder, dtype="float32", threads=1, quiet=True, kv_cache_tokens=8192, max_num_seqs=16) as made:
        yield made


@pytest.fixture(scope="session")
def served(llm: LLM) -> Iterator[Running]:
    with running(llm) as made:
        yield made


@pytest.fixture
def slow(llm: LLM) -> Iterator[None]:
    patch, _ = slowed(llm)
    yield
    patch.undo()
