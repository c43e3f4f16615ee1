"""What a drafter's file says of its acceptance: counted by what steps gained, and nothing else in the file changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.models.formats.drafter_file import read_drafter
from forerun.models.formats.hidden_drafter import HiddenDrafterWeights
from forerun_research.scripts import drafter_outcomes
from forerun_research.scripts.drafter_outcomes import tokens_a_step
from tests import tiny
from tests.train.kinds import trained
from tests.train.test_training import drafter_file, network


def test_tokens_a_step_are_those_of_the_paths():
    assert tokens_a_step([[4.0, 4.0], [2.0, 4.0], [1.0, 2.0], [0.0, 0.0]]) == pytest.approx(1 + 1 + 0.5 + 0.25)


def test_acceptance_is_measured_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(drafter_outcomes, "PER_KIND", 1)
    monkeypatch.setattr(drafter_outcomes, "TOKENS", 6)
    target = tiny.write_folder(tmp_path / "target", "qwen2", seed=0, vocab_size=520)
    draft = tiny.write_folder(tmp_path / "draft", "qwen2", seed=1, vocab_size=520, num_hidden_layers=2)
    path = tmp_path / "drafter.safetensors"
    drafter_file((target, draft), network(draft)).save(path)
    before, tensors = read_drafter(path)
    assert before["parallel"]["outcomes"] == {}
    assert drafter_outcomes.main([str(path), "--target", str(target), "--device", "cpu"]) == 0
    after, kept = read_drafter(path)
    outcomes = after["parallel"].pop("outcomes")
    before["parallel"].pop("outcomes")
    assert after == before and all(kept[name].equal(tensors[name]) for name in tensors)
    assert outcomes and all(hits <= tries for depths in outcomes.values() for hits, tries in depths)
    assert sum(depths[0][1] for depths in outcomes.values()) > 8  # steps that were counted
    assert all(f"{kind}: " in capsys.readouterr().out for kind in list(outcomes)[:1])


def test_of_a_block_it_is_among_the_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(drafter_outcomes, "PER_KIND", 1)
    monkeypatch.setattr(drafter_outcomes, "TOKENS", 6)
    target = tiny.write_folder(tmp_path / "target", "llama", vocab_size=520)
    path = tmp_path / "block.safetensors"
    trained(target, "state-input").save(path)
    before, tensors = read_drafter(path)
    assert drafter_outcomes.main([str(path), "--target", str(target), "--device", "cpu"]) == 0
    after, kept = read_drafter(path)
    assert all(kept[name].equal(tensors[name]) for name in tensors)
    outcomes = after["facts"].pop("outcomes")
    assert after == before and HiddenDrafterWeights.load(path).outcomes == outcomes
    assert sum(depths[0][1] for depths in outcomes.values()) > 8
