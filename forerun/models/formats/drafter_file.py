"""Trained drafters on disk: tensors and what is known about them in one safetensors file with a checksum.

Matrices are int8 with a scale for each row. A file that is cut off, changed or of another kind is refused before
anything of it is used. Knows no kind of drafter.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from forerun.errors import BadDrafter
from forerun.models.fetch.store import home

DRAFTER_VERSION = 1
TRAIN_HINT = "train one: forerun train drafter --target ... --out FILE"
_METADATA_KEY = "forerun_drafter"
_PACKAGE = Path(__file__).parents[2]


def drafter_folders() -> tuple[Path, ...]:
    """Where drafters lie that are found without being named: in the package, in its checkout, in the user's cache."""
    return _PACKAGE / "data" / "drafters", _PACKAGE.parent / "artifacts" / "drafters", home() / "drafters"


def rounded(name: str, value: Tensor) -> dict[str, Tensor]:
    """A matrix as int8 with a scale for each row: what was trained is small, its rounding far smaller."""
    value = value.detach().float().cpu()
    scale = value.abs().amax(1, keepdim=True).clamp_min(1e-12) / 127.0
    return {name: (value / scale).round().to(torch.int8).contiguous(), f"{name}_scale": scale[:, 0].contiguous()}


def restored(tensors: dict[str, Tensor], name: str) -> Tensor:
    """The tensor of that name in float32, rounded or not."""
    value = tensors[name]
    return value.float() * tensors[f"{name}_scale"][:, None] if value.dtype == torch.int8 else value


def write_drafter(path: Path, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    """Whole or not at all."""
    about = about | {"version": DRAFTER_VERSION}
    about["checksum"] = _checksum(tensors, about)
    part_path = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, part_path, metadata={_METADATA_KEY: json.dumps(about)})
        part_path.chmod(0o644)
        part_path.replace(path)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            part_path.unlink()
        raise BadDrafter(f"cannot write the drafter {path}: {error}", "make room there, then try again") from None


def read_drafter(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What is known about it, its kind among that, and its tensors."""
    if not path.is_file():
        raise BadDrafter(f"there is no drafter {path}", TRAIN_HINT)
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            if _METADATA_KEY not in header:
                raise BadDrafter(f"{path} holds tensors, but is not a trained drafter", TRAIN_HINT)
            about = json.loads(header[_METADATA_KEY])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if about["version"] != DRAFTER_VERSION:
            raise BadDrafter(
                f"{path} is a drafter of version {about['version']}, this is {DRAFTER_VERSION}", TRAIN_HINT
            )
        intact = about.pop("checksum") == _checksum(tensors, about)
    except OSError as error:
        raise BadDrafter(f"cannot read {path}: {error.strerror or error}", "give a file that can be read") from None
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise not_whole(path, error) from None
    if not intact:
        raise BadDrafter(f"{path} is damaged: its checksum does not fit", "copy it anew, or train again")
    return about, tensors


def not_whole(path: Path | None, error: object) -> BadDrafter:
    return BadDrafter(f"{path} is not a whole drafter: {error}", "copy it anew, or train again")


def _checksum(tensors: dict[str, Tensor], about: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)}".encode() + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()
