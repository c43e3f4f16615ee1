"""What is shipped: whole files with a card each, small enough for a repository, and in the package for a wheel."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.models.formats.adapter import DrafterFile
from forerun.models.formats.drafter_file import drafter_folders, read_drafter
from forerun.models.formats.hidden_drafter import HiddenDrafterWeights

PACKAGED, ARTIFACTS, _ = drafter_folders()
MAX_BYTES = {PACKAGED: 12_000_000, ARTIFACTS: 50_000_000}
FILES = sorted(path for folder in MAX_BYTES for path in folder.glob("*.safetensors"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_shipped_drafter_is_whole_and_has_a_card(path: Path):
    about, tensors = read_drafter(path)  # reads the checksum too
    kind = DrafterFile if about["kind"] == "parallel" else HiddenDrafterWeights
    drafter = kind.of(path, about, tensors)
    assert path.stat().st_size < MAX_BYTES[path.parent]
    card = (path.parent / "README.md").read_text()
    card = card[card.index(path.name) :]
    for name in (*drafter.names.values(), f"{drafter.tokens} tokens", "licence", "Apache-2.0"):
        assert name in card


def test_there_is_one():
    assert list(ARTIFACTS.glob("*.safetensors"))
