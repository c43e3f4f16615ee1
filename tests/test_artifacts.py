"""What lies under artifacts/: whole files with a card each, small enough for a repository."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.models.formats.adapter import DrafterFile, drafter_folders

FOLDER = Path(__file__).parent.parent / "artifacts" / "drafters"
MAX_BYTES = 50_000_000


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.safetensors")), ids=lambda path: path.stem)
def test_a_shipped_drafter_is_whole_and_has_a_card(path: Path):
    drafter = DrafterFile.load(path)  # reads the checksum too
    assert path.stat().st_size < MAX_BYTES and FOLDER in drafter_folders()
    card = (FOLDER / "README.md").read_text()
    about = card[card.index(path.name) :]
    for name in (*drafter.names.values(), str(drafter.parallel.mask_token), "licence", "Apache-2.0"):
        assert name in about


def test_there_is_one():
    assert list(FOLDER.glob("*.safetensors"))
