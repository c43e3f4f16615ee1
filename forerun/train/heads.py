"""`heads`: a matrix for each token to come, on the target's last hidden state (Medusa). Knows no text and no files."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.models.formats.hf_writer import hf_values
from forerun.prefill.calibration.dense import DenseModel
from forerun.train.layout import RowLayout, draw_blocks
from forerun.train.loss import Outcome, Teaching
from forerun.train.trainer import TrainSettings


class HeadsNetwork:
    """See `TrainableDrafter`. Matrices start at zero: every head then predicts what the target does next."""

    extra_columns = 0
    kv_layers: tuple[int, ...] = ()
    learned: Tensor | None = None

    def __init__(self, target: DenseModel, ids: Tensor, settings: TrainSettings) -> None:
        self.config, self.device, self.settings, self._target = target.config, target.device, settings, target
        self.ids, self.depths = ids.to(target.device), (target.config.num_layers,)
        hidden = target.config.hidden_size
        self.blocks = torch.zeros(settings.tokens, hidden, hidden, device=self.device, requires_grad=True)

    def parameters(self) -> list[Tensor]:
        return [self.blocks]

    def quick(self) -> list[Tensor]:
        return []

    def matrices(self) -> list[Tensor]:
        """They are one tensor of several, which start at zero: Adam's."""
        return []

    def layout(self, length: int, tokens: int, generator: torch.Generator) -> RowLayout:
        return draw_blocks(length, tokens, length, generator, self.device)

    def rows(self, tokens: Tensor, teaching: Teaching, layout: RowLayout) -> Tensor:
        last = self._target._norm(teaching.hidden[0], "final_norm")  # [B, T, hidden]
        anchors = layout.anchors[:: self.settings.tokens]
        before = last[:, anchors - 1]  # [B, A, hidden]: the anchor itself has not run
        added = F.silu(torch.einsum("bah,koh->bako", before, self.blocks.to(before.dtype)))
        return (before[:, :, None] + added).flatten(1, 2)

    def head(self) -> Tensor:
        target = self._target
        return (target.embed if target.config.tie_embeddings else target.weights["head"])[self.ids]

    def learn_confidence(self, rows: Tensor, outcome: Outcome) -> None:
        """It has none: a node's probability is its head's."""

    def saved(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        config = {
            "speculators_model_type": "heads",
            "transformer_layer_config": hf_values(self.config),
            "draft_vocab_size": len(self.ids),
        }
        blocks = {f"heads.{j}.weight": block.detach().cpu().clone() for j, block in enumerate(self.blocks)}
        return config, blocks
