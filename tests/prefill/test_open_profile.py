"""The profile that comes with the package: it is the default model's, and it drafts without being named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from forerun import LLM, SamplingParams
from forerun.data import text
from forerun.errors import BadProfile
from forerun.models.formats.checkpoint import open_checkpoint
from forerun.params import Prefill
from forerun.prefill import open_profile as module
from forerun.prefill.open_profile import open_profile, packaged

EXACT = SamplingParams(max_tokens=8)
DRAFTED = SamplingParams(max_tokens=8, prefill=Prefill("speculative"))


def test_the_default_model_brings_a_profile_that_drafts(smollm2: Path) -> None:
    with LLM(str(smollm2), threads=1, quiet=True, kv_cache_tokens=4096) as llm:
        assert llm.prefill_profile is not None and llm.prefill_profile.kind == "self"
        ids = llm.tokenizer.encode(text("documents/handbook.txt"))[:1620]
        exact = llm.generate(ids, EXACT)[0]
        llm.clear_cache()
        drafted = llm.generate(ids, DRAFTED)[0].usage.prefill
        assert drafted is not None and drafted.source == "self" and not drafted.fell_back
        assert drafted.cost < 0.65 and drafted.accepted > 0.8 * len(ids)
        again = llm.generate(ids, EXACT)[0]  # nothing approximate answers an exact request
        assert again.token_ids == exact.token_ids and again.usage.prefill is None


def test_another_model_finds_none_and_may_not_use_it(smollm2: Path, tiny_folder: Callable[[str], Path]) -> None:
    other = open_checkpoint(tiny_folder("llama"))
    assert packaged(other) is None and open_profile(None, other) is None
    mine = packaged(open_checkpoint(smollm2))
    assert mine is not None and mine.stat().st_size < 12_000_000
    with pytest.raises(BadProfile):
        open_profile(mine, other)


def test_a_model_with_the_same_samples_but_other_weights_finds_none(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = open_checkpoint(smollm2)
    assert open_profile(None, target) is not None
    monkeypatch.setattr(module, "fingerprint", lambda checkpoint: "0" * 64)
    assert packaged(target) is not None and open_profile(None, target) is None
