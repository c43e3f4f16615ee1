"""A profile: the result of calibration on disk, for one target and one source only.

A signed file: the maps as tensors, everything else as what is known about them, among that the fingerprints of the
models it was fitted for; it refuses to be used with others.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.errors import BadProfile
from forerun.models.formats.signed_file import SignedFormat, restored, rounded
from forerun.prefill.damage import DamageModel
from forerun.prefill.drift import TextReference
from forerun.prefill.gate import DamageGate, gate_of
from forerun.prefill.maps import Maps

_FACTS = ("kind", "target", "source", "names", "source_cost", "share")
_FORMAT = SignedFormat(
    *("profile", "forerun_profile", 2, BadProfile),
    make="make one: forerun calibrate --target ... --out PROFILE",
    again="calibrate again",
    seed=lambda about: repr((tuple(about["taps"]), about["base"], about["own"])),
)
CHUNK_SHARE = 0.02  # of the tokens of copied chunks, recomputed at first; more where the predicted damage is too large
# 18 edited and reordered prompts of 900 tokens (code, essays), SmolLM2-135M and Qwen2.5-Coder-0.5B: KL after the first
# slice is at most 1.6 times tail_change + 0.7 value_error ** 2, from 0.001 (a changed line) to 0.016 (chunks reordered)
CHUNK_DAMAGE = DamageModel(tail_change=1.0, value_error=0.7, margin=2.0, max_kl=0.05, usual_change=0.003)


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
    damage: DamageModel | None = None  # decides in place of the thresholds
    texts: TextReference | None = None  # what calibration's text was like
    gate: DamageGate | None = None  # predicts the damage of a drafted prompt before anything is recomputed

    @property
    def looks_first(self) -> bool:
        """Whether drafts may be accepted by V at a few spans alone, before anything is ranked."""
        return self.damage is not None and self.damage.usual_change is not None

    @property
    def agreement(self) -> float:
        """Top-1 agreement with exact prefill at the default share, by the curve; 1 where there is none."""
        return min((point.top1 for point in self.curve if point.share >= self.share), default=1.0)

    @property
    def usual_kl(self) -> float | None:
        """Mean KL to exact prefill at the default share, by the curve; None where there is none."""
        return next((point.kl for point in self.curve if point.share >= self.share), None)

    @cached_property
    def key(self) -> str:
        """Drafted K/V is shared only under the same key; made once, as it reads all of the maps."""
        return _FORMAT.checksum(self._stored(), self._about(("kind", "target", "source")))[:16]

    def save(self, path: Path) -> None:
        about = self._about(_FACTS) | {"curve": [asdict(p) for p in self.curve]}
        about |= {"thresholds": self.thresholds, "facts": self.facts}
        about |= {} if self.damage is None else {"damage": asdict(self.damage)}
        about |= {} if self.texts is None else {"texts": self.texts.record()}
        about |= {} if self.gate is None else {"gate": asdict(self.gate)}
        _FORMAT.save(path, self._stored(), about)

    def _stored(self) -> dict[str, Tensor]:
        """Matrices in int8, which is half of a float16 file and what a CPU computes in anyway."""
        stored: dict[str, Tensor] = {}
        for name, value in self.maps.tensors().items():
            matrix = value.dim() == 2
            stored |= rounded(name, value) if matrix else {name: value.detach().to("cpu", torch.float32).contiguous()}
        return stored

    def _about(self, names: tuple[str, ...]) -> dict[str, Any]:
        maps = {"taps": list(self.maps.taps), "base": self.maps.base, "own": self.maps.target_embedding}
        return {name: getattr(self, name) for name in names} | maps

    @classmethod
    def load(cls, path: Path) -> Profile:
        about, tensors = _FORMAT.load(path)
        try:
            weights = {name: restored(tensors, name) for name in tensors if not name.endswith("_scale")}
            maps = Maps(tuple(about["taps"]), about["base"], **weights, target_embedding=about["own"])
            curve = [CurvePoint(**point) for point in about["curve"]]
            facts = {name: about[name] for name in (*_FACTS, "thresholds", "facts")}
            damage = DamageModel(**about["damage"]) if "damage" in about else None
            texts = TextReference.from_record(about["texts"]) if "texts" in about else None
            gate = DamageGate.from_record(about["gate"]) if "gate" in about else None
            if gate is not None and "windows" in facts["facts"]:  # fitted here, so that a better fit needs no new file
                gate = gate_of(facts["facts"]["windows"], [point.share for point in curve]) or gate
            return cls(maps=maps, curve=curve, damage=damage, texts=texts, gate=gate, **facts)
        except (KeyError, TypeError, ValueError) as error:
            raise _FORMAT.not_whole(path, error) from None

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


def as_stored(maps: Maps) -> Maps:
    """The maps as a profile's file gives them back: what is measured should be what is used."""
    parts = {name: t for name, t in maps.tensors().items() if t.dim() == 2}
    return maps.with_tensors({name: restored(rounded(name, t), name).to(t) for name, t in parts.items()})


def chunk_profile() -> Profile:
    """Of the source `chunk`, which needs no maps: drafts are the target's own K/V of another place, so that one gate
    serves all targets. There is no curve of quality against cost."""
    none = torch.zeros(1, 1)
    maps = Maps((0,), 1, none, none, none, none, none, none)
    return Profile("chunk", "", "", {}, maps, 0.0, CHUNK_SHARE, damage=CHUNK_DAMAGE)


def require_profile(profile: Profile, kind: str) -> None:
    """Raise unless it is one for this source."""
    if profile.kind != kind:
        hint = f"use source={profile.kind}"
        raise BadProfile(f"the profile is one for the source {profile.kind!r}, not for {kind!r}", hint)
