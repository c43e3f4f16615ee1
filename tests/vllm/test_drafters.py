"""Drafters of answers that Forerun writes as folders, loaded by vLLM itself."""

from __future__ import annotations

from pathlib import Path

from forerun.core import SamplingParams
from forerun.models.formats.checkpoint import open_checkpoint
from forerun.models.formats.pard import ParallelDrafting, write_pard
from tests import tiny
from tests.engine.common import make_engine, run
from tests.engine.test_speculative_prefill import prompt
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
