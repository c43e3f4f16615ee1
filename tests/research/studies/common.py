"""What tests of the prefill lab share: a tiny model beside a draft with the same weights, and a profile for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from forerun.models.formats.checkpoint import open_checkpoint
from forerun.models.formats.fingerprint import fingerprint
from forerun.prefill.profile import Profile
from forerun_research.studies.study import Study, read
from tests import tiny
from tests.prefill.sources.common import make_maps


def write_profile(folder: Path, path: Path, noise: float = 0.3) -> Path:
    """Maps that would be exactly right, and noise on top."""
    checkpoint = open_checkpoint(folder)
    maps = make_maps(folder, 1, tuple(range(1, checkpoint.config.num_layers)))
    maps.up += noise * maps.up.std() * torch.randn(maps.up.shape, generator=torch.Generator().manual_seed(1))
    print_ = fingerprint(checkpoint)
    Profile("draft", print_, print_, {"target": "t", "source": "s"}, maps, 0.05, share=0.1).save(path)
    return path


def write_data(folder: Path) -> Path:
    """A folder with texts of a few thousand tokens, none of them like the others."""
    texts = folder / "essays"
    texts.mkdir(parents=True)
    for number in range(4):
        lines = [f"{number}.{i}: {line}" for i, line in enumerate(tiny.TEXT.splitlines() * 6)]
        (texts / f"essay{number}.txt").write_text("\n".join(lines))
    return folder


def make_study(model: Path, data: Path, measures: list[Any], profile: Path | None = None, **more: Any) -> Study:
    values: dict[str, Any] = {
        "model": str(model),
        "data": data,
        "weights": "float32",
        "device": "cpu",
        "threads": 1,
        "measures": measures,
    }
    if profile is not None:
        values |= {"draft": str(model), "profile": str(profile)}
    return read(values | more, "test", "test")
