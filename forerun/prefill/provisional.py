"""A provisional answer: what a guide said from drafted K/V while the exact prompt was still being computed.

The guide's tokens are a draft like any other: the target judges them in the forward that ends its own prefill, and
follows them only as far as it would have gone itself. Knows no sequence and no scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from forerun.core import Draft

LONGEST = 64  # tokens a guide says; what is likely to be taken back is not worth more
NAME = "provisional"  # who guessed these tokens


@dataclass(eq=False)
class Provisional:
    """The guide's tokens for one answer, all of them shown already; nothing is added once they were judged."""

    tokens: list[int] = field(default_factory=list)
    judged: bool = False

    @property
    def full(self) -> bool:
        return len(self.tokens) >= LONGEST

    def draft(self, room: int) -> Draft:
        tokens = self.tokens[: max(0, room)]
        return Draft.chain(tokens, [1.0] * len(tokens), NAME)

    def judge(self, answer: list[int]) -> tuple[int, int]:
        """How many of its tokens stand at the beginning of the real answer, and how many are taken back."""
        self.judged = True
        same = zip(self.tokens, answer, strict=False)
        stand = next((i for i, (mine, real) in enumerate(same) if mine != real), min(len(self.tokens), len(answer)))
        return stand, len(self.tokens) - stand
