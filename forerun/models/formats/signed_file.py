"""Tensors and what is known about them in one safetensors file with a checksum over both: profiles, trained drafters.

A file that is cut off, changed or of another kind is refused before anything of it is used. Knows no use of tensors.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from forerun.errors import ForerunError


@dataclass(frozen=True)
class SignedFormat:
    """One kind of such files. `seed`: what its checksum begins with."""

    what: str  # for messages
    key: str  # of the metadata
    version: int
    error: type[ForerunError]
    make: str  # the hint where there is none
    again: str  # the hint where it is of no use
    seed: Callable[[dict[str, Any]], str] = lambda about: ""

    def save(self, path: Path, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
        """Whole or not at all. The tensors are contiguous and on the CPU; `about` is anything that JSON can hold."""
        about = about | {"version": self.version}
        about["checksum"] = self.checksum(tensors, about)
        part = path.with_name(path.name + ".part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(tensors, part, metadata={self.key: json.dumps(about)})
            part.chmod(0o644)  # no secret: readable for all users of the folder
            part.replace(path)  # a concurrent reader gets the old file or the new one, never half of one
        except (OSError, SafetensorError) as error:
            with suppress(OSError):
                part.unlink()
            reason = getattr(error, "strerror", None) or error
            problem = f"cannot write the {self.what} {path}: {reason}"
            raise self.error(problem, "make room there, then try again") from None

    def load(self, path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What is known about the tensors, and the tensors."""
        if not path.is_file():
            raise self.error(f"there is no {self.what} {path}", self.make)
        try:
            with safe_open(path, framework="pt") as file:
                header = file.metadata() or {}
                if self.key not in header:
                    raise self.error(f"{path} holds tensors, but is not a {self.what}", self.make)
                about = json.loads(header[self.key])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if about["version"] != self.version:
                problem = f"{path} is a {self.what} of version {about['version']}, this is {self.version}"
                raise self.error(problem, self.again)
            intact = about.pop("checksum") == self.checksum(tensors, about)
        except ForerunError:
            raise
        except OSError as error:
            raise self.error(f"cannot read {path}: {error.strerror or error}", "give a file that can be read") from None
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise self.not_whole(path, error) from None
        if not intact:
            raise self.error(f"{path} is damaged: its checksum does not fit", f"copy it anew, or {self.again}")
        return about, tensors

    def not_whole(self, path: Path | None, error: object) -> ForerunError:
        return self.error(f"{path} is not a whole {self.what}: {error}", f"copy it anew, or {self.again}")

    def checksum(self, tensors: dict[str, Tensor], about: dict[str, Any]) -> str:
        digest = hashlib.sha256((self.seed(about) + json.dumps(about, sort_keys=True)).encode())
        for name, tensor in sorted(tensors.items()):
            digest.update(f"{name} {tuple(tensor.shape)}".encode() + tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()


def rounded(name: str, value: Tensor) -> dict[str, Tensor]:
    """A matrix as int8 with a scale for each row. What was rounded once is rounded to the same bits again: a scale has
    16 bits, so that its product with 127 is exact."""
    value = value.detach().float().cpu()
    mantissa, exponent = torch.frexp(value.abs().amax(1, keepdim=True).clamp_min(1e-12) / 127.0)
    scale = torch.ldexp((mantissa * 65536.0).ceil() / 65536.0, exponent)
    return {name: (value / scale).round().to(torch.int8).contiguous(), f"{name}_scale": scale[:, 0].contiguous()}


def restored(tensors: dict[str, Tensor], name: str) -> Tensor:
    """The tensor of that name in float32, rounded or not."""
    value = tensors[name]
    return value.float() * tensors[f"{name}_scale"][:, None] if value.dtype == torch.int8 else value
