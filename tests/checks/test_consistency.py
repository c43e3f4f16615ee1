"""The check itself: it passes on a sound engine, and it does not pass everything."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forerun.checks.consistency import check_model, is_tie
from forerun.llm import Completion
from tests import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Room for the handbook piece: the tiny tokenizer needs many tokens for it."""
    return str(tiny.write_folder(tmp_path_factory.mktemp("model"), "llama", max_position_embeddings=4096))


def test_a_sound_engine_passes(model: str) -> None:
    shown = list[str]()
    findings = list(check_model(model, weights="float32", threads=1, prompts=4, tokens=24, on_progress=shown.append))
    assert len(shown) == len(set(shown)) == 5  # what runs, not "loading" all the time
    assert [finding.name for finding in findings] == [
        "batch of 4",
        "prefill in chunks of 32",
        "prefix tree, cold",
        "prefix tree, warm",
        "after preemption",
    ]
    assert all(finding.passed for finding in findings), findings


def test_a_wrong_answer_fails(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(self: Completion) -> list[int]:
        found = self.choices[0].token_ids
        return (
            found if len(found) < 3 or self.usage.cached_tokens == 0 else [*found[:2], (found[2] + 1) % 500, *found[3:]]
        )

    monkeypatch.setattr(Completion, "token_ids", property(spoiled))
    findings = {
        finding.name: finding for finding in check_model(model, weights="float32", threads=1, prompts=4, tokens=20)
    }
    assert findings["batch of 4"].passed
    assert not findings["prefix tree, warm"].passed
    assert "differ" in findings["prefix tree, warm"].detail


def fake_llm(logits: list[float], weights: str = "float32") -> Any:
    runner = SimpleNamespace(equal_bits=False)
    engine = SimpleNamespace(score=lambda ids: torch.tensor([logits]), runner=runner)
    return SimpleNamespace(engine=engine, precision=SimpleNamespace(name=weights))


def test_a_tie_is_told_from_a_bug() -> None:
    assert is_tie(fake_llm([10.0, 9.9999, 0.0]), [1], [5, 0], [5, 1])
    assert not is_tie(fake_llm([10.0, 9.9, 0.0]), [1], [5, 0], [5, 1])
    assert is_tie(fake_llm([10.0, 9.9, 0.0], "bf16"), [1], [5, 0], [5, 1])


def test_answers_of_different_length_are_no_tie() -> None:
    assert not is_tie(fake_llm([10.0, 10.0]), [1], [0, 1], [0])
