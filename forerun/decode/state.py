"""Speculation for one sequence: what it asked for and has shown (`SpeculationState`), and what it gets in one step
(`DraftTask`)."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from forerun.core import Draft, Usage
from forerun.decode.control.controller import RequestStats
from forerun.decode.drafters.base import DraftRequest
from forerun.decode.sampling import Context
from forerun.decode.verifiers.base import Verifier


@dataclass(eq=False)
class SpeculationState:
    """Speculation for one sequence."""

    id: int
    context: Context
    usage: Usage
    names: list[str]  # drafters that may guess for it
    verifier: Verifier
    stats: RequestStats
    at_random: bool  # whether drafters that can draw from their own distribution should
    proposed: list[Draft] = field(default_factory=list)  # in this step, before anything was pruned
    asked: dict[str, float] = field(default_factory=dict)  # seconds that free drafters took in this step

    @property
    def depth(self) -> int:
        """How deep to draft whatever it costs; 0 where the controller decides."""
        return self.context.params.speculation.depth

    @property
    def remaining(self) -> int:
        """Tokens the answer is expected to go on for: about as long as it has lasted, and no longer than it may."""
        so_far = len(self.context.tokens) - self.context.num_prompt
        return min(self.context.params.max_tokens - so_far, 16 + 2 * so_far)


@dataclass(eq=False)
class DraftTask:
    """A sequence that decodes in this step."""

    spec_state: SpeculationState
    pages: array[int]
    nodes: int  # most tokens that can be of use and have room
    draft: Draft = field(default_factory=Draft)
    offers: list[Draft] = field(default_factory=list)  # with calibrated probabilities

    def ask(self, depth: int) -> DraftRequest:
        g = self.spec_state
        depth = min(g.depth or depth, self.nodes)
        return DraftRequest(g.id, g.context, depth, self.nodes, self.pages, at_random=g.at_random)
