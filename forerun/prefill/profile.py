"""A profile: the result of calibration on disk, for one target and one source only.

One safetensors file: the maps as tensors, everything else as JSON in its metadata. It carries the fingerprints of the
models it was fitted for and a checksum of its own tensors, and refuses to be used when either differs.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from forerun.errors import BadProfile
from forerun.prefill.maps import Maps

PROFILE_VERSION = 2
_METADATA_KEY = "forerun_profile"
_HINT = "make one: forerun calibrate --target ... --out PROFILE"


@dataclass(frozen=True)
class CurvePoint:
    """Quality on held-out text at one share of recomputed tokens."""

    share: float  # of tokens that the target runs through all layers, beside the first ones and the tail
    cost: float  # all work as a share of exact prefill's, at the length it was measured
    top1: float  # agreement of the likeliest next token with exact prefill
    kl: float


@dataclass
class Profile:
    kind: str  # draft or self: whose hidden states the maps read
    target: str  # fingerprint of the target's weights
    source: str  # fingerprint of the source's weights; the target's own for `self`
    names: dict[str, str]  # target, source -> name of the checkpoint, for messages only
    maps: Maps
    source_cost: float  # reading a token, in tokens of the target's prefill, without the maps
    share: float  # of tokens recomputed where a request does not name a budget or quality
    curve: list[CurvePoint] = field(default_factory=list)
    thresholds: dict[str, list[float]] = field(default_factory=dict)  # signal -> worst value that passes, per layer
    facts: dict[str, Any] = field(default_factory=dict)  # how it was made: tokens, steps, figures

    @property
    def key(self) -> str:
        """Drafted K/V is shared only under the same key."""
        digest = hashlib.sha256(f"{self.kind} {self.target} {self.source} {checksum(self.maps)}".encode())
        return digest.hexdigest()[:16]

    def save(self, path: Path) -> None:
        tensors = {name: t.detach().to("cpu", torch.float16).contiguous() for name, t in self.maps.tensors().items()}
        rounded = self.maps.with_tensors(tensors)
        about = {f: getattr(self, f) for f in ("kind", "target", "source", "names", "source_cost", "share")}
        about |= {"curve": [asdict(p) for p in self.curve], "thresholds": self.thresholds, "facts": self.facts}
        maps = self.maps
        about |= {"version": PROFILE_VERSION, "taps": list(maps.taps), "base": maps.base, "own": maps.target_embedding}
        about["checksum"] = checksum(rounded, about)
        part = path.with_name(path.name + ".part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(tensors, part, metadata={_METADATA_KEY: json.dumps(about)})
            part.chmod(0o644)  # no secret: readable for all users of the folder
            part.replace(path)  # a concurrent reader gets the old file or the new one, never half of one
        except (OSError, SafetensorError) as error:
            with suppress(OSError):
                part.unlink()
            reason = getattr(error, "strerror", None) or error
            raise BadProfile(f"cannot write the profile {path}: {reason}", "make room there, then try again") from None

    @classmethod
    def load(cls, path: Path) -> Profile:
        if not path.is_file():
            raise BadProfile(f"there is no profile {path}", _HINT)
        try:
            with safe_open(path, framework="pt") as file:
                header = file.metadata() or {}
                if _METADATA_KEY not in header:
                    raise BadProfile(f"{path} holds tensors, but is not a profile", _HINT)
                about = json.loads(header[_METADATA_KEY])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if about["version"] != PROFILE_VERSION:
                raise BadProfile(
                    f"{path} is a profile of version {about['version']}, this is {PROFILE_VERSION}", "calibrate again"
                )
            maps = Maps(tuple(about["taps"]), about["base"], **tensors, target_embedding=about["own"])
            profile = cls(
                maps=maps,
                curve=[CurvePoint(**p) for p in about["curve"]],
                **{f: about[f] for f in ("kind", "target", "source", "names", "source_cost", "share")},
                **{f: about[f] for f in ("thresholds", "facts")},
            )
            intact = about.pop("checksum") == checksum(maps, about)
        except BadProfile:
            raise
        except OSError as error:
            raise BadProfile(f"cannot read {path}: {error.strerror or error}", "give a file that can be read") from None
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise BadProfile(f"{path} is not a whole profile: {error}", "calibrate again, or copy it anew") from None
        if not intact:
            raise BadProfile(f"{path} is damaged: its checksum does not fit", "calibrate again, or copy it anew")
        return profile

    def check(self, target: str, source: str | None) -> None:
        """Raise unless these are the fingerprints of the models it was made for."""
        hint = "calibrate for this model: forerun calibrate --target ... --out PROFILE"
        if target != self.target:
            raise BadProfile(f"the profile was made for {self.names.get('target')}, not for this target", hint)
        if self.kind == "draft" and source is None:
            raise BadProfile(
                f"the profile drafts with {self.names.get('source')}, and no draft model is open",
                "open the model with that draft: draft_model=..., or --draft-model on the command line",
            )
        if self.kind == "draft" and source != self.source:
            raise BadProfile(f"the profile was made for the draft {self.names.get('source')}, not for this one", hint)


def checksum(maps: Maps, about: dict[str, Any] | None = None) -> str:
    """Of the maps as they are stored, and of the metadata `about`."""
    digest = hashlib.sha256(repr((tuple(maps.taps), maps.base, maps.target_embedding)).encode())
    digest.update(json.dumps(about, sort_keys=True).encode())
    for name, tensor in sorted(maps.tensors().items()):
        data = tensor.detach().to("cpu", torch.float16).contiguous().view(torch.uint8).numpy()
        digest.update(f"{name} {tuple(tensor.shape)}".encode() + data.tobytes())
    return digest.hexdigest()


def require_profile(profile: Profile, kind: str) -> None:
    """Raise unless it is one for this source."""
    if profile.kind != kind:
        raise BadProfile(
            f"the profile is one for the source {profile.kind!r}, not for {kind!r}", f"use source={profile.kind}"
        )
