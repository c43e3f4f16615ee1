"""The one command that trains a drafter on a GPU, here on a tiny model: a file that is found and drafts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from forerun import LLM, SamplingParams
from forerun.models.formats import adapter
from forerun_research.scripts import train_default_drafter
from tests import tiny


def test_a_file_that_is_found_and_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    target, found = tiny.write_folder(tmp_path / "target", "llama"), tmp_path / "found"
    (tmp_path / "text.txt").write_text(tiny.TEXT * 8)
    monkeypatch.setattr("forerun.train.run.ANSWER_TOKENS", 6)
    monkeypatch.setattr("forerun.train.answers.QUESTION_TOKENS", 6)
    small = "--minutes 0.01 --answers 4 --tokens 3 --rank 2 --vocab 200 --batch-tokens 64 --window 32 --device cpu"
    args = ["--target", str(target), "--out", str(tmp_path / "made.safetensors"), "--text", str(tmp_path / "text.txt")]
    monkeypatch.setattr(sys, "argv", ["train_default_drafter", *args, *small.split()])
    assert train_default_drafter.main() == 0
    told = json.loads(capsys.readouterr().out)
    assert told["facts"]["steps"] > 0 and told["facts"]["vocabulary"] == 200
    found.mkdir()
    (tmp_path / "made.safetensors").rename(found / told["found_as"])
    monkeypatch.setattr(adapter, "drafter_folders", lambda: (found,))
    llm = LLM(target, dtype="float32", kv_cache_tokens=2048, max_model_len=256, quiet=True)
    assert "block" in llm.engine.speculator.drafter_pool.names(SamplingParams())


def test_the_text_is_what_is_installed():
    folders = train_default_drafter.installed_text()
    assert folders[0].name == "forerun" and any((folder / "json").is_dir() for folder in folders)
