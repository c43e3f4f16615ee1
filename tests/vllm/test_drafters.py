"""Drafters of answers that Forerun writes as folders, loaded by vLLM itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from forerun.core import SamplingParams
from forerun.models.build import build_decoder
from forerun.models.formats.checkpoint import open_checkpoint
from forerun.models.formats.hidden_drafter import write_speculators
from forerun.models.formats.pard import ParallelDrafting, write_pard
from forerun.models.hidden_draft import BlockModel, build_hidden_draft
from tests import tiny
from tests.engine.common import make_engine, run
from tests.engine.test_speculative_prefill import prompt
from tests.train.test_hidden_kinds import trained
from tests.vllm import load_speculators
from tests.vllm.conftest import needs_vllm, open_vllm
from tests.vllm.test_plugin import SHAPE

pytestmark = needs_vllm


def test_a_pard_folder(tmp_path: Path) -> None:
    """As `--speculative-config` names it in docs/vllm.md; answers are the target's own."""
    folder = tiny.write_folder(tmp_path / "target", "qwen2", **SHAPE)
    write_pard(open_checkpoint(folder), ParallelDrafting(mask_token=1, tokens=4), tmp_path / "pard", quiet=True)
    speculative = {
        "method": "draft_model",
        "model": str(tmp_path / "pard"),
        "num_speculative_tokens": 4,
        "parallel_drafting": True,
    }
    prompts = [prompt(seed, 100) for seed in range(4)]
    with open_vllm(folder, {"speculative_config": speculative, "kv_transfer_config": None}) as vllm:
        answers = vllm.generate(prompts, [None] * 4)
    params = SamplingParams(max_tokens=8, ignore_eos=True, speculation="off")
    assert [a.tokens for a in answers] == run(make_engine(folder), prompts, params)


def test_a_folder_of_speculators(tmp_path: Path) -> None:
    """A block drafter as `forerun train speculators` writes it: vLLM's loader finds every weight, and its parts compute
    what ours do."""
    folder = tiny.write_folder(tmp_path / "target", "llama", vocab_size=520, hidden_size=128, head_dim=32)
    checkpoint, made = open_checkpoint(folder), trained(folder, "block")
    write_speculators(made, checkpoint, tmp_path / "drafter")
    decoder, _ = build_decoder(checkpoint, torch.device("cpu"), "float32", 256)
    ours = build_hidden_draft(made, checkpoint, decoder, 256)
    assert isinstance(ours, BlockModel)
    torch.manual_seed(0)
    hidden, rows, tokens = (
        torch.randn(len(ours.depths), 6, 128),
        torch.randn(6, 128),
        torch.tensor([5, 6, 7, 300, 9, 519]),
    )
    columns = torch.arange(len(made.draft_ids))
    given = {"hidden": torch.cat(list(hidden), -1), "rows": rows, "tokens": tokens, "columns": columns}
    save_file(given, tmp_path / "in")
    paths = [str(tmp_path / name) for name in ("target", "drafter", "in", "out")]
    subprocess.run([sys.executable, load_speculators.__file__, *paths], check=True)
    found = load_file(tmp_path / "out")
    close = {"rtol": 0.03, "atol": 0.03}  # folders are in bfloat16
    torch.testing.assert_close(found["features"].float(), ours.project(list(hidden)).float(), **close)
    w1, w2 = (made.tensors[f"markov_head.markov_{name}.weight"] for name in ("w1", "w2"))
    torch.testing.assert_close(found["markov"][: len(w2)].float(), w2 @ w1[tokens].T, **close)
    confidence = ours.confidence(rows, tokens[:, None])
    assert confidence is not None
    torch.testing.assert_close(found["confidence"].float(), confidence[:, 0], **close)
    assert torch.equal(found["ids"], made.draft_ids)
