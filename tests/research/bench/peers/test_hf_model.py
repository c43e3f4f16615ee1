"""The oracle must be transformers' own model: same logits as loading the folder with transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from forerun.models.formats.checkpoint import open_checkpoint
from forerun_research.bench.peers.transformers import hf_from_checkpoint
from tests import tiny

SCALED = {
    "llama": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64, "rope_theta": 5e5}
    | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "qwen2": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "rope_theta": 1e6},
}


def logits(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.randint(0, tiny.VOCAB, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        return model(ids).logits


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_same_logits_as_transformers_loads(family: str, tiny_folder: Callable[[str], Path]) -> None:
    folder = tiny_folder(family)
    theirs = logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())
    ours = logits(hf_from_checkpoint(open_checkpoint(folder)))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", SCALED)
def test_same_logits_with_scaled_rope(family: str, tmp_path: Path) -> None:
    folder = tiny.write_folder(tmp_path, family, rope_parameters=SCALED[family])
    theirs = logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())
    ours = logits(hf_from_checkpoint(open_checkpoint(folder)))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_quantised_file_gives_its_own_tensors(tiny_gguf: Callable[..., Path]) -> None:
    checkpoint = open_checkpoint(tiny_gguf("llama", "Q8_0"))
    model = hf_from_checkpoint(checkpoint)
    torch.testing.assert_close(model.model.layers[1].mlp.up_proj.weight, checkpoint.tensor("layers.1.up"))
