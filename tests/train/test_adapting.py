"""Drafters that learn from accepted tokens while no request runs: better drafts, the same answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forerun import LLM, BadRequest, Speculation
from forerun.checks.lossless.forced_drafting import all_drafts_verified
from tests.train.kinds import (
    OPTIONS,
    PROMPTS,
)


def test_a_drafter_adapts_when_idle_and_no_answer_changes(
    target: Path, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("forerun.models.online_adapter.MIN_NEW_PASSES", 16)
    options: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True}
    plain = LLM(target, **OPTIONS).generate(PROMPTS, speculation="off", **options)
    llm = LLM(target, draft_model=saved, adapt=True, **OPTIONS)
    hidden = llm.engine.speculator.ctx.hidden
    assert hidden is not None and hidden.adapter is not None
    rates = []
    for _ in range(5):
        with all_drafts_verified(llm.engine):
            answers = llm.generate(PROMPTS, speculation=Speculation(saved.stem, nodes=8), **options)
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in plain]
        rates.append(sum(answer.usage.accepted for answer in answers) / sum(answer.usage.steps for answer in answers))
        llm.upgrade()  # what would happen while no request runs
        assert not hidden.adapter.due
    assert hidden.adapter.stats["kept"] >= 1 and rates[-1] > rates[0] + 0.1
    stats = llm.save_drafter(tmp_path / "adapted.safetensors")
    again = LLM(target, draft_model=tmp_path / "adapted.safetensors", **OPTIONS)
    with all_drafts_verified(again.engine):
        answers = again.generate(PROMPTS, speculation=Speculation(saved.stem, nodes=8), **options)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in plain]
    rate = sum(answer.usage.accepted for answer in answers) / sum(answer.usage.steps for answer in answers)
    assert stats["kept"] >= 1 and rate == pytest.approx(rates[-1], abs=0.25)
    assert again.engine.speculator.ctx.hidden.adapter.learning is False


def test_a_seeded_answer_by_proposals_does_not_depend_on_what_was_learnt(target: Path, saved: Path):
    """At a fixed depth: otherwise measured times decide how many tokens are proposed."""
    rule = Speculation(saved.stem, nodes=6, depth=3, verify="rejection")
    options: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "temperature": 0.8, "seed": 4, "speculation": rule}
    llm = LLM(target, draft_model=saved, adapt=True, **OPTIONS)
    hidden = llm.engine.speculator.ctx.hidden
    assert hidden is not None and hidden.adapter is not None
    with all_drafts_verified(llm.engine):
        before = llm.generate([PROMPTS[1]], **options)[0]
        assert before.usage.drafters[saved.stem].drafted > 12
        hidden.adapter.state.bias.normal_(0.0, 3.0)
        hidden.adapter.active = True
        assert llm.generate([PROMPTS[1]], **options)[0].token_ids == before.token_ids


def test_adapting_needs_a_drafter_that_can(target: Path):
    with pytest.raises(BadRequest, match="adapt is for a drafter on the target's hidden states"):
        LLM(target, adapt=True)
    with pytest.raises(BadRequest, match="nothing learns here"):
        LLM(target, **OPTIONS).save_drafter("x.safetensors")
