"""How far an answer on copied K/V is expected to be from exact prefill's, from what is known while it is drafted.

Two observations: `value_error`, the relative error of V at check spans spread over the prompt, mean over layers, and
`tail_change`, the KL of the tail's next-token distributions from before to after a known amount of recomputing, which
takes two more passes of the tail. The distance to exact prefill cannot be observed; it grows with both, so that the
prediction is monotone in them. Knows no prompt and no plan.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DamageModel:
    """`margin`: over the fitted mean, so that the 18 prompts it was fitted on stay below; others are not measured."""

    tail_change: float
    value_error: float  # of its square: a small error moves logits in proportion, KL by the square
    margin: float
    max_kl: float  # predicted, with the margin, up to which drafted K/V is accepted
    usual_change: float | None = None  # taken for a change that was not observed; None: it always is

    def predict(self, tail_change: float | None, value_error: float) -> float:
        """Mean KL (nats) of the answer's next-token distributions to exact prefill's, with the margin."""
        if tail_change is None:
            assert self.usual_change is not None
            tail_change = self.usual_change
        return self.margin * (self.tail_change * max(0.0, tail_change) + self.value_error * value_error**2)
