"""How far one prompt's drafting has come, beside what its state says. Only state, and what is still to be read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from forerun.prefill.checks import Checker
from forerun.prefill.choosers import TokenScorer
from forerun.prefill.plan import CheckSpan, Costs
from forerun.prefill.sources.base import KVSource
from forerun.prefill.state import PrefillState


@dataclass
class Way:
    source: KVSource
    chooser: str
    costs: Costs
    spent: float = 0.0  # work, in tokens of the target's prefill
    scores: np.ndarray = field(default_factory=lambda: np.zeros(0))
    spans: list[CheckSpan] = field(default_factory=list)
    checker: Checker | None = None
    logits: Tensor | None = None  # [tokens, V] of the tail after the round before
    glanced: bool = False  # whether a first look was taken

    def reading(self, state: PrefillState, scorers: Mapping[str, TokenScorer]) -> float:
        """Work until all is read and scored."""
        scoring = self.costs.tail if self.chooser == "tail" else 0.0
        if self.chooser in scorers:
            scoring = scorers[self.chooser].cost(len(state.tokens))
        return self.source.cost(len(state.tokens) - state.read) + scoring
