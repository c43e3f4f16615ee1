"""A tiny target, and drafters of its hidden states in files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import tiny
from tests.train.kinds import trained


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_folder(tmp_path_factory.mktemp("kinds") / "target", "llama", vocab_size=520)


@pytest.fixture(scope="module", params=["block", "heads"])
def saved(request: pytest.FixtureRequest, target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("files") / f"{request.param}.safetensors"
    trained(target, request.param).save(path)
    return path
