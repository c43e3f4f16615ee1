"""Fixtures shared by all tests: tiny random models made once per session, and the real default model.

`make test` runs the tests in several processes (pytest-xdist, a file at a time), then those marked `alone` in one.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from forerun.models.fetch.store import resolve
from forerun_research.studies.prefill_score import EveryPromptPays
from tests import tiny

WORKER_BYTES = 2 << 30  # of one process that has the default model open in float32 beside transformers' copy of it


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """A process for each core, as far as memory goes; the cores are shared out among them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = max(1, min(cores, psutil.virtual_memory().available // WORKER_BYTES))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // workers)))  # the processes inherit it
    return workers


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that open the real model come first: they take longest, and what is left at the end is short."""
    real = {item.path for item in items if "smollm2" in getattr(item, "fixturenames", ())}
    items.sort(key=lambda item: item.path not in real)


def pytest_configure(config: pytest.Config) -> None:
    """No code of ours, tests included, uses a name that goes with the next release."""
    config.addinivalue_line("filterwarnings", "error:.*the old name goes with the next release:DeprecationWarning")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`tiny_folder("qwen2")`: a tiny random model of that family as a safetensors folder."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = tiny.write_folder(tmp_path_factory.mktemp(f"tiny-{family}"), family)
        return made[family]

    return folder


@pytest.fixture(scope="session")
def tiny_gguf(tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_gguf("llama", "Q8_0")`: the same model as `tiny_folder("llama")` in a GGUF file."""
    made: dict[tuple[str, str], Path] = {}

    def file(family: str, kind: str = "F32") -> Path:
        if (family, kind) not in made:
            path = tmp_path_factory.mktemp(f"gguf-{family}") / f"{family}-{kind}.gguf"
            made[family, kind] = tiny.write_gguf(path, tiny_folder(family), kind=kind)
        return made[family, kind]

    return file


@pytest.fixture(scope="session", autouse=True)
def prompts_are_drafted_whatever_they_cost() -> Iterator[None]:
    """Whether drafting pays depends on how busy the machine is; `tests/prefill/test_forecast.py` tests that
    decision."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("forerun.prefill.prefiller.PrefillForecast", EveryPromptPays)
        yield


@pytest.fixture(scope="session", autouse=True)
def fingerprint_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fingerprints of models that live for one session are not left in the user's cache."""
    folder = tmp_path_factory.mktemp("fingerprints")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("forerun.models.formats.fingerprint.home", lambda: folder)
        yield


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model, fetched on first use, by one process, and kept in the user's cache."""
    with open(Path(tempfile.gettempdir()) / f"forerun-tests-{os.getuid()}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return resolve("smollm2-135m-instruct")
