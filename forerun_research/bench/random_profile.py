"""A random draft and a random profile for random targets: the right shapes and costs, and nothing that means anything.

For timing only: K/V that such maps draft is noise, so no check is made of it and no answer is looked at.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from forerun.decode.draft_context import DraftModel
from forerun.llm import LLM
from forerun.models.build import build_decoder
from forerun.models.config import ModelConfig
from forerun.models.formats.checkpoint import Checkpoint, expected_shapes
from forerun.models.formats.fingerprint import fingerprint
from forerun.prefill.calibration.setup import DRAFT_LAYER_SHARE, MAX_DEFAULT_RANK
from forerun.prefill.maps import Maps
from forerun.prefill.profile import Profile
from forerun_research.bench.shapes import RandomCheckpoint

RECOMPUTED_SHARE = 0.1  # of tokens recomputed


class RandomDraft(RandomCheckpoint):
    """A shape with the vocabulary of the target it drafts for."""

    def __init__(self, shape: str, device: torch.device, target: ModelConfig) -> None:
        super().__init__(shape, device)
        self.config = replace(self.config, vocab_size=target.vocab_size, max_context=target.max_context)
        self._shapes = expected_shapes(self.config)


class RandomLLM(LLM):
    """An LLM whose models have no tokenizer, so token ids cannot be compared: both models have the same ones."""

    def _open_draft(
        self, checkpoint: Checkpoint, where: torch.device, weights: str, context: int, quiet: bool
    ) -> DraftModel:
        decoder, _ = build_decoder(checkpoint, where, weights, context, quiet, is_draft=True)
        return DraftModel(decoder, None, True, checkpoint.source)


def layer_weights(config: ModelConfig) -> int:
    """Weights of all layers: the work of a token's prefill, but for attention itself."""
    attention = config.hidden_size * (2 * config.q_size + 2 * config.kv_size)
    return config.num_layers * (attention + 3 * config.hidden_size * config.intermediate_size)


def random_profile(model: RandomCheckpoint, draft: RandomCheckpoint) -> Profile:
    """For a target and a draft of these shapes: maps from as many draft layers, at the rank, as calibration takes."""
    target, source = model.config, draft.config
    taps = tuple(range(round(DRAFT_LAYER_SHARE * source.num_layers) + 1))
    wide = len(taps) * source.hidden_size + target.hidden_size
    rank, out = min(MAX_DEFAULT_RANK, target.hidden_size), (target.num_layers - 1) * 2 * target.kv_size
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw) * shape[-1] ** -0.5

    maps = Maps(
        taps=taps,
        base=1,
        down=normal(rank, wide),
        down_bias=torch.zeros(rank),
        mix_in=normal(rank, rank),
        mix_out=normal(rank, rank),
        up=normal(out, rank),
        up_bias=torch.zeros(out),
        target_embedding=True,
    )
    cost = max(taps) / source.num_layers * layer_weights(source) / layer_weights(target)
    names = {"target": "random target", "source": "random draft"}
    return Profile(
        "draft", fingerprint(model), fingerprint(draft), names, maps, source_cost=cost, share=RECOMPUTED_SHARE
    )
