"""One tiny pair and one folder of text for all calibration tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forerun.models.formats.checkpoint import open_checkpoint
from forerun.prefill.calibration.dense import DenseModel
from forerun.prefill.calibration.model_pair import ModelPair
from forerun.text.tokenizer import Tokenizer
from tests.prefill.calibration.common import write_pair, write_text


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a target and of a draft."""
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def tokenizer(models: tuple[Path, Path]) -> Tokenizer:
    return open_checkpoint(models[0]).tokenizer()


@pytest.fixture(scope="session")
def pair(models: tuple[Path, Path]) -> ModelPair:
    target, draft = (
        DenseModel.from_checkpoint(open_checkpoint(path), torch.device("cpu"), torch.float32) for path in models
    )
    return ModelPair(target, draft, taps=(0, 1, 2), base=1)


@pytest.fixture(scope="session")
def alone(pair: ModelPair) -> ModelPair:
    """The target drafting for itself."""
    return ModelPair(pair.target, pair.target, taps=(0, 1, 2), base=2)
