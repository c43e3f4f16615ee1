"""Profiles: what is saved comes back, damage and other models are refused, and shares follow from the curve."""

from __future__ import annotations

import json
import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from forerun.errors import BadProfile
from forerun.prefill.maps import Maps
from forerun.prefill.plan import share_for
from forerun.prefill.profile import CurvePoint, Profile, as_stored
from tests.prefill.test_maps import made

CURVE = [CurvePoint(0.0, 0.3, 0.9, 0.12), CurvePoint(0.1, 0.4, 0.95, 0.05), CurvePoint(0.2, 0.5, 0.98, 0.02)]


def profile(kind: str = "draft", maps: Maps | None = None) -> Profile:
    return Profile(
        kind=kind,
        target="t" * 32,
        source="s" * 32 if kind == "draft" else "t" * 32,
        names={"target": "large.gguf", "source": "small.gguf"},
        maps=maps if maps is not None else made(),
        source_cost=0.27,
        share=0.1,
        curve=CURVE,
        thresholds={"key": [0.0, 0.25, 0.5], "attention": [1.0, 0.9, 0.8]},
        facts={"steps": 3, "kinds": {"plain": [{"share": 0.0}]}},
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "new" / "a.profile"
    profile().save(path)
    return path


def rewritten(path: Path, **changes: object) -> None:
    """The same file with other words in its header."""
    with safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()["forerun_profile"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, value in changes.items():
        if value is None:
            del about[name]
        else:
            about[name] = value
    save_file(tensors, path, metadata={"forerun_profile": json.dumps(about)})


def test_round_trip(path: Path) -> None:
    ours, back = profile(), Profile.load(path)
    for name in ("kind", "target", "source", "names", "source_cost", "share", "curve", "thresholds", "facts", "key"):
        assert getattr(back, name) == getattr(ours, name), name
    assert (back.maps.taps, back.maps.base) == (ours.maps.taps, ours.maps.base)
    for name, tensor in back.maps.tensors().items():
        assert torch.equal(tensor, as_stored(ours.maps).tensors()[name]), name
        assert torch.allclose(tensor, ours.maps.tensors()[name], atol=float(tensor.abs().max()) / 250), name
    assert as_stored(back.maps).tensors()["up"].equal(back.maps.up)  # rounded once, the same bits ever after
    assert [p.name for p in path.parent.iterdir()] == ["a.profile"]  # nothing half-written is left


@pytest.mark.parametrize("target_embedding", [True, False])
def test_whether_the_targets_embedding_is_read_is_kept(tmp_path: Path, target_embedding: bool) -> None:
    path = tmp_path / "a.profile"
    ours = profile(maps=made(target_embedding=target_embedding))
    ours.save(path)
    back = Profile.load(path)
    assert back.maps.target_embedding is target_embedding
    assert back.maps.down.shape == ours.maps.down.shape and back.key == ours.key


def test_saving_again_replaces(path: Path) -> None:
    other = profile()
    other.share = 0.2
    other.save(path)
    assert Profile.load(path).share == 0.2


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(BadProfile, match="there is no profile") as error:
        Profile.load(tmp_path / "none")
    assert "forerun calibrate" in error.value.hint


@pytest.mark.parametrize("kept", [0.0, 0.001, 0.1, 0.5, 0.99])
def test_truncated(path: Path, kept: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(kept * len(data))])
    with pytest.raises(BadProfile, match="not a whole profile"):
        Profile.load(path)


@pytest.mark.parametrize("place", [0.3, 0.6, 0.9, 1.0])
def test_a_flipped_byte_of_the_maps(path: Path, place: float) -> None:
    data = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    data[header + int(place * (len(data) - header - 1))] ^= 0x11
    path.write_bytes(bytes(data))
    with pytest.raises(BadProfile, match="damaged"):
        Profile.load(path)


def test_something_else(path: Path) -> None:
    path.write_text("all good children go to heaven")
    with pytest.raises(BadProfile, match="not a whole profile"):
        Profile.load(path)
    save_file({"down": torch.zeros(2)}, path)
    with pytest.raises(BadProfile, match="holds tensors, but is not a profile") as error:
        Profile.load(path)
    assert "forerun calibrate" in error.value.hint


def test_a_file_that_cannot_be_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **more: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("forerun.models.formats.signed_file.safe_open", refuse)
    with pytest.raises(BadProfile, match=r"cannot read .*a\.profile: Permission denied"):
        Profile.load(path)


def test_a_full_disk(path: Path) -> None:
    other, limits = profile(), resource.getrlimit(resource.RLIMIT_FSIZE)
    other.share = 0.2
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(BadProfile, match=r"cannot write the profile .*a\.profile") as error:
            other.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "room" in error.value.hint
    assert Profile.load(path).share == 0.1 and [p.name for p in path.parent.iterdir()] == ["a.profile"]


@pytest.mark.parametrize("changes", [{"version": 99}, {"version": 1, "own": None}])
def test_another_version(path: Path, changes: dict[str, object]) -> None:
    rewritten(path, **changes)
    with pytest.raises(BadProfile, match=f"version {changes['version']}") as error:
        Profile.load(path)
    assert error.value.hint == "calibrate again"


@pytest.mark.parametrize(
    "changes", [{"curve": None}, {"curve": [{"share": 1}]}, {"taps": 3}, {"checksum": None}, {"own": None}]
)
def test_a_header_with_gaps(path: Path, changes: dict[str, object]) -> None:
    rewritten(path, **changes)
    with pytest.raises(BadProfile, match="not a whole profile|damaged"):
        Profile.load(path)


@pytest.mark.parametrize("changes", [{"taps": [0, 1, 4]}, {"base": 2}, {"own": True}])
def test_maps_for_other_layers_are_seen(path: Path, changes: dict[str, object]) -> None:
    rewritten(path, **changes)
    with pytest.raises(BadProfile, match="damaged"):
        Profile.load(path)


def test_other_models_are_refused() -> None:
    profile().check("t" * 32, "s" * 32)
    profile("self").check("t" * 32, None)
    profile("self").check("t" * 32, "x" * 32)  # a draft that has no part in it
    with pytest.raises(BadProfile, match=r"made for large\.gguf, not for this target"):
        profile().check("x" * 32, "s" * 32)
    with pytest.raises(BadProfile, match=r"drafts with small\.gguf, and no draft model is open") as error:
        profile().check("t" * 32, None)
    assert "--draft" in error.value.hint
    with pytest.raises(BadProfile, match=r"made for the draft small\.gguf, not for this one"):
        profile().check("t" * 32, "x" * 32)


def test_the_key_tells_maps_and_models_apart(path: Path) -> None:
    other = made()
    other.up[0, 0] += 1.0
    blind = replace(made(target_embedding=True), target_embedding=False)  # the same numbers, taken for other inputs
    keys = [p.key for p in (profile(), profile("self"), profile(maps=other), profile(maps=made(target_embedding=True)))]
    assert len({*keys, profile(maps=blind).key}) == 5
    assert Profile.load(path).key == profile().key


def test_shares_without_a_wish_are_the_profiles() -> None:
    assert share_for(profile(), None, None) == 0.1


def test_shares_for_a_quality() -> None:
    assert [share_for(profile(), None, q) for q in (0.5, 0.9, 0.91, 0.98, 0.99)] == [0.0, 0.0, 0.1, 0.2, None]


def test_shares_for_a_budget() -> None:
    assert share_for(profile(), 0.25, None) is None
    assert share_for(profile(), 0.3, None) == pytest.approx(0.0)
    assert share_for(profile(), 0.42, None) == pytest.approx(0.12)
    assert share_for(profile(), 1.0, None) == pytest.approx(0.7)


@given(st.lists(st.floats(0.01, 1.0), min_size=2, max_size=2).map(sorted))
def test_more_never_gives_less(two: list[float]) -> None:
    def rank(share: float | None, none: float) -> float:
        return none if share is None else share

    low, high = two
    assert rank(share_for(profile(), low, None), -1) <= rank(share_for(profile(), high, None), -1)
    assert rank(share_for(profile(), None, low), 2) <= rank(share_for(profile(), None, high), 2)
