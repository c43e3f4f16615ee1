"""`forerun train`: a drafter through the command line, an interruption that resumes, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun import LLM, BadDrafter, Speculation
from forerun.checks.lossless.forced_drafting import all_drafts_verified
from forerun.cli import main
from forerun.models.formats.adapter import DrafterFile
from forerun.models.formats.checkpoint import open_checkpoint
from forerun.models.formats.hidden_drafter import HiddenDrafterWeights
from forerun.train.trainer import Trainer
from tests import tiny

SMALL = ("--tokens", "3", "--rank", "2", "--window", "32", "--batch-tokens", "64", "--answers", "0", "--device", "cpu")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("world")
    tiny.write_folder(root / "target", "llama", seed=0, vocab_size=520)
    tiny.write_folder(root / "draft", "llama", seed=1, vocab_size=520, num_hidden_layers=2)
    (root / "text.txt").write_text(tiny.TEXT * 4)
    return root


def run(world: Path, out: Path, *args: str) -> int:
    pair = ("--target", str(world / "target"), "--draft", str(world / "draft"), "--text", str(world / "text.txt"))
    with pytest.raises(SystemExit) as left:
        main(["train", "drafter", *pair, "--out", str(out), *SMALL, *args])
    return left.value.code or 0  # type: ignore[return-value]


def test_a_drafter_and_its_pard_folder(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "drafter.safetensors"
    assert run(world, out, "--minutes", "0.01", "--no-measure", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["tokens"] == 3 and told["facts"]["steps"] > 0 and told["bytes"] == out.stat().st_size
    with pytest.raises(SystemExit):
        main(["train", "pard", str(out), str(tmp_path / "pard"), "--draft", str(world / "draft")])
    assert open_checkpoint(tmp_path / "pard").parallel == DrafterFile.load(out).parallel  # type: ignore[attr-defined]


def test_all_weights_of_a_draft_as_a_folder(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Drafts for its target, in parallel and as a chain; another target is refused."""
    out = tmp_path / "whole"
    assert run(world, out, "--minutes", "0.01", "--no-measure", "--json", "--full") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["facts"]["steps"] > 0 and told["bytes"] > 100_000
    before, after = open_checkpoint(world / "draft"), open_checkpoint(out)
    assert after.parallel is not None and after.parallel.tokens == 3  # type: ignore[attr-defined]
    changed = [n for n in ("layers.0.q", "layers.1.down") if not torch.equal(before.tensor(n), after.tensor(n))]
    assert changed == ["layers.0.q", "layers.1.down"]
    options: dict[str, Any] = {"dtype": "float32", "kv_cache_tokens": 2048, "max_model_len": 256, "quiet": True}
    llm, prompt = LLM(world / "target", draft_model=out, **options), list(range(20, 60))
    plain = llm.generate([prompt], max_tokens=12, ignore_eos=True, speculation="off")[0]
    with all_drafts_verified(llm.engine):
        for name in ("parallel", "model"):
            drafted = llm.generate([prompt], max_tokens=12, ignore_eos=True, speculation=Speculation(name, nodes=6))[0]
            assert drafted.token_ids == plain.token_ids and drafted.usage.drafters[name].drafted > 6
    other = tiny.write_folder(tmp_path / "other", "llama", seed=5, vocab_size=520)
    with pytest.raises(BadDrafter, match="whole was trained for another model than other"):
        LLM(other, draft_model=out)


@pytest.mark.parametrize("kind", ["block", "heads"])
def test_a_drafter_without_a_draft_model(world: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]):
    out, small = tmp_path / "drafter.safetensors", ("--minutes", "0.01", "--no-measure", "--json", "--vocab", "200")
    target = ("--target", str(world / "target"), "--text", str(world / "text.txt"))
    wanted = () if kind == "block" else ("--kind", kind)  # block is what comes without a name
    with pytest.raises(SystemExit) as left:
        main(["train", "drafter", *target, "--out", str(out), *SMALL, *small, *wanted])
    told = json.loads(capsys.readouterr().out)
    assert not left.value.code and told["kind"] == kind and told["facts"]["vocabulary"] == 200
    folder = ["train", "speculators", str(out), str(tmp_path / "folder"), "--target", str(world / "target")]
    with pytest.raises(SystemExit) as left:
        main(folder)
    assert bool(left.value.code) == (kind == "heads")
    if kind == "block":
        again = HiddenDrafterWeights.load(tmp_path / "folder")
        # what the package does not know
        own = {"reuse": "hidden", "fc_norm": False, "head_rank": 0, "state_input": False, "confidence_odds": False}
        own["bits"] = 8
        assert again.config | own == HiddenDrafterWeights.load(out).config and again.tokens == 3


def test_an_interrupted_run_resumes(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    out, state = tmp_path / "drafter.safetensors", tmp_path / "drafter.safetensors.state"
    advance = Trainer.advance

    def interrupted(trainer: Trainer, done: float) -> torch.Tensor:
        loss = advance(trainer, done)
        if trainer.steps == 3:
            import signal

            signal.raise_signal(signal.SIGINT)  # Ctrl-C
        return loss

    monkeypatch.setattr(Trainer, "advance", interrupted)
    assert run(world, out, "--minutes", "5", "--no-measure") == 130
    assert state.exists() and not out.exists()
    first: list[int] = []
    monkeypatch.setattr(Trainer, "advance", lambda t, done: (first.append(t.steps), advance(t, done))[1])
    assert run(world, out, "--minutes", "0.001", "--no-measure") == 0  # its time is soon over: the drafter is written
    assert first == list(range(3, 3 + len(first))) and not state.exists()
    assert DrafterFile.load(out).facts["steps"] == 3 + len(first)


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (("--kind", "magic"), "--kind"),
        (("--kind", "block"), "reads the target alone"),
        (("--reuse", "all"), "use one of hidden, kv, both"),
        (("--full",), "give a folder, without .safetensors"),
        (("--mask-token", "520"), "520 tokens"),
        (("--minutes", "0"), "minutes"),
        (("--text", "/no/such/file"), "cannot read"),
    ],
)
def test_what_cannot_work_is_an_error_at_once(
    world: Path, tmp_path: Path, args: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]
):
    assert run(world, tmp_path / "drafter.safetensors", *args) == 1
    told = capsys.readouterr().err
    assert why in told and "hint: " in told
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_no_drafters_name_is_refused(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run(world, tmp_path / "drafter.bin") == 1
    assert ".safetensors" in capsys.readouterr().err
