"""Text unlike the calibration's is told from a few hundred token ids, and never drafted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from forerun.prefill.drift import TextReference
from forerun.prefill.profile import Profile
from forerun.prefill.state import PrefillStage
from tests.prefill.fakes import Fake, make_draft_context, make_prefiller, make_profile, start

VOCAB = 400


def text(seed: int, count: int, length: int, power: float = 1.3) -> np.ndarray:
    """Windows of a made language: common tokens, each followed by few others."""
    draw = np.random.default_rng(seed)
    found = draw.zipf(power, (count, length)) % VOCAB
    for at in range(1, length, 2):
        found[:, at] = (7 * found[:, at - 1] + draw.integers(0, 3, count)) % VOCAB
    return found


@pytest.fixture(scope="module")
def reference() -> TextReference:
    return TextReference.fit(text(1, 200, 512).astype(np.int32), text(2, 60, 512).astype(np.int32))


def test_other_windows_of_the_same_text_are_like_it(reference: TextReference):
    drifts = [reference.drift(ids) for ids in text(3, 200, 2048)]
    assert np.mean([drift <= 1.0 for drift in drifts]) > 0.85


def test_other_texts_are_far(reference: TextReference):
    draw = np.random.default_rng(4)
    noise, repeated = draw.integers(0, VOCAB, 2048), np.tile(draw.integers(0, VOCAB, 3), 700)
    reordered = draw.permutation(text(5, 1, 2048)[0])  # the same tokens, other neighbours
    assert min(reference.drift(ids) for ids in (noise, repeated, reordered)) > 2.0


def test_short_texts_have_a_drift(reference: TextReference):
    assert np.isfinite([reference.drift(text(6, 1, count)[0]) for count in (2, 3, 64, 255)]).all()


def test_a_profile_keeps_it(reference: TextReference, tmp_path: Path):
    profile = make_profile("self", texts=reference)
    profile.save(tmp_path / "a.profile")
    loaded = Profile.load(tmp_path / "a.profile").texts
    assert loaded is not None
    ids = text(7, 1, 1024)[0]
    assert loaded.drift(ids) == pytest.approx(reference.drift(ids), abs=0.05)


def test_a_text_that_is_far_is_computed_exactly_before_anything_is_read(reference: TextReference, tiny_folder):
    ctx = make_draft_context(tiny_folder("qwen2"))
    source = Fake(ctx)
    prefiller = make_prefiller(ctx, source, texts=reference)
    state = start(prefiller, ctx)  # tokens drawn at random
    assert state.stage is PrefillStage.EXACT and "unlike the profile's" in state.report.fell_back
    assert state.report.drift > 3.0 and state.spent == 0.0 and not source.read_entries
