"""Fixtures shared by all tests: tiny random models made once per session, and the real default model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forerun.models.fetch.store import resolve
from tests import tiny


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
def fingerprint_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fingerprints of models that live for one session are not left in the user's cache."""
    folder = tmp_path_factory.mktemp("fingerprints")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("forerun.models.formats.fingerprint.home", lambda: folder)
        yield


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model, fetched on first use and kept in the user's cache."""
    return resolve("smollm2-135m-instruct")
