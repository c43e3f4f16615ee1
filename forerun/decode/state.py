"""Speculation for one sequence: over its whole answer (`SpeculationState`) and in one step (`DraftTask`)."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from forerun.core import Draft, Usage
from forerun.decode.control.acceptance import RequestStats
from forerun.decode.drafters.base import DraftRequest
from forerun.decode.sampling import Context
from forerun.decode.verifiers.base import Verifier


@dataclass(eq=False)
class SpeculationState:
    """A sequence's drafters, verifier and acceptance record."""

    seq_id: int
    context: Context
    usage: Usage
    drafter_names: list[str]  # a drafter that fails on this sequence is removed
    verifier: Verifier
    stats: RequestStats
    sampled: bool  # whether drafters that can sample from their own distribution should
    drafts: list[Draft] = field(default_factory=list)  # of this step, as proposed
    free_run_s: dict[str, float] = field(default_factory=dict)  # by free drafter, in this step

    @property
    def fixed_depth(self) -> int:
        """The depth that the request fixes; 0 where the controller decides."""
        return self.context.params.speculation.depth

    @property
    def expected_remaining(self) -> int:
        """Tokens the answer is expected to go on for: about as long as it has lasted, within what it may."""
        so_far = len(self.context.tokens) - self.context.num_prompt
        return min(self.context.params.max_tokens - so_far, 16 + 2 * so_far)


@dataclass(eq=False)
class DraftTask:
    """One sequence that decodes in this step."""

    spec_state: SpeculationState
    pages: array[int]
    max_nodes: int  # that can become part of the answer and have room
    draft: Draft = field(default_factory=Draft)
    candidates: list[Draft] = field(default_factory=list)  # with calibrated probabilities, to be merged into `draft`

    def request(self, depth: int) -> DraftRequest:
        state = self.spec_state
        depth = min(state.fixed_depth or depth, self.max_nodes)
        return DraftRequest(state.seq_id, state.context, depth, self.max_nodes, self.pages, sampled=state.sampled)
