"""The command that trains what is shipped, on a tiny model: a file with a card that is found without being named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forerun import LLM, BadRequest, SamplingParams
from forerun.models.formats import adapter
from forerun.models.formats.hidden_drafter import HiddenDrafterWeights
from forerun_research.scripts import train_default_drafter as script
from tests import tiny

SMALL = ["--window", "32", "--long-window", "64", "--batch-tokens", "64", "--tokens", "3", "--rank", "4"]
SMALL += ["--answers", "4", "--minutes", "0.01", "--vocab", "200", "--device", "cpu", "--ship"]


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, ...]:
    found = tuple(tmp_path / name for name in ("packaged", "artifacts", "cache"))
    monkeypatch.setattr("forerun.train.run.ANSWER_TOKENS", 6)
    for name in ("QUESTION_TOKENS", "ANSWER_TOKENS", "CONTINUED_TOKENS"):
        monkeypatch.setattr(f"forerun.train.answers.{name}", 6)
    for module in (script, adapter):
        monkeypatch.setattr(module, "drafter_folders", lambda: found)
    return found


@pytest.mark.parametrize(("pair", "writer"), [(False, "engine"), (False, "batch"), (True, "batch")])
def test_what_is_shipped_is_found(
    pair: bool, writer: str, folders: tuple[Path, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    target = tiny.write_folder(tmp_path / "target", "llama", vocab_size=520)
    draft = tiny.write_folder(tmp_path / "draft", "llama", seed=1, vocab_size=520, num_hidden_layers=2)
    (tmp_path / "text.txt").write_text(tiny.TEXT * 8)
    models = ["--target", str(target), *(["--draft", str(draft)] if pair else [])]
    for _ in range(2):  # the second run takes the place of the first
        args = [*models, "--out", str(tmp_path / "x.safetensors"), "--text", str(tmp_path / "text.txt"), *SMALL]
        args += ["--writer", writer]
        assert script.main(args) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["facts"]["steps"] > 0 and told["facts"].get("vocabulary") == (None if pair else 200)
    folder = folders[1] if pair else folders[0]
    assert [path.name for path in sorted(folder.iterdir())] == sorted([told["found_as"], "README.md"])
    card = (folder / "README.md").read_text()
    assert card.count(f"## {told['found_as']}") == 1 and "Apache-2.0" in card and "text.txt" in card
    llm = LLM(target, draft_model=draft if pair else None, kv_cache_tokens=2048, max_model_len=256, quiet=True)
    assert ("parallel" if pair else "block") in llm.engine.speculator.drafter_pool.names(SamplingParams())


def test_what_is_too_large_is_not_shipped(folders: tuple[Path, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(script, "MAX_PACKAGED_BYTES", 1000)
    target = tiny.write_folder(tmp_path / "target", "llama", vocab_size=520)
    (tmp_path / "text.txt").write_text(tiny.TEXT * 8)
    args = ["--target", str(target), "--out", str(tmp_path / "x.safetensors"), "--text", str(tmp_path / "text.txt")]
    with pytest.raises(BadRequest, match="at most 1,000 are shipped in packaged"):
        script.main([*args, *SMALL])
    assert not folders[0].exists()


def test_the_text_is_what_is_installed():
    folders = script.installed_text()
    assert folders[0].name == "forerun" and any((folder / "json").is_dir() for folder in folders)


def test_answers_of_several_processes_are_trained_on(folders: tuple[Path, ...], tmp_path: Path):
    """Each writes its own, by its seed; what lies beside the drafter's file is not written again."""
    target = tiny.write_folder(tmp_path / "target", "llama", vocab_size=520)
    (tmp_path / "text.txt").write_text(tiny.TEXT * 8)
    common = ["--target", str(target), "--text", str(tmp_path / "text.txt"), *SMALL[:-1], "--writer", "batch"]
    parts = []
    for seed in ("1", "2"):
        path = tmp_path / f"part{seed}.jsonl"
        assert script.main([*common, "--answers-only", "--seed", seed, "--out", str(path)]) == 0
        parts.append(path.read_text())
    assert parts[0] != parts[1] and min(part.count("\n") for part in parts) >= 4
    out = tmp_path / "x.safetensors"
    (tmp_path / "x.safetensors.answers.jsonl").write_text("".join(parts))
    assert script.main([*common, "--max-steps", "2", "--answers", "1", "--out", str(out)]) == 0
    made = HiddenDrafterWeights.load(out)
    assert made.facts["answers"] == "".join(parts).count("\n") and made.facts["steps"] <= 2
