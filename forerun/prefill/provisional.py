"""A provisional answer: what a guide said from drafted K/V while the exact prompt was still being computed.

The guide's tokens are a draft like any other: the target judges them in the forward that ends its own prefill, or in
those that come next, and follows them only as far as it would have gone itself. Knows no sequence and no scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from forerun.core import Draft

LONGEST = 64  # tokens a guide says; what is likely to be taken back is not worth more
NAME = "provisional"  # who guessed these tokens


@dataclass(eq=False)
class Provisional:
    """The guide's tokens for one answer, all of them shown already; nothing is added once the answer has begun."""

    tokens: list[int] = field(default_factory=list)
    stood: int = 0  # tokens at the beginning that are part of the answer
    judged: bool = False  # nothing is open: all of them stood, or the others were taken back

    @property
    def full(self) -> bool:
        return len(self.tokens) >= LONGEST

    @property
    def open(self) -> list[int]:
        """Tokens whose time has not come."""
        return [] if self.judged else self.tokens[self.stood :]

    def draft(self, room: int) -> Draft:
        tokens = self.open[: max(0, room)]
        return Draft.chain(tokens, [1.0] * len(tokens), NAME)

    def judge(self, answer: list[int], last: bool = True) -> tuple[int, int]:
        """How many of the open tokens stand, now that the real answer goes on like this, and how many are taken back:
        none before the first wrong one, or the `last` of what can be compared."""
        left = self.open
        same = zip(left, answer, strict=False)
        stand = next((i for i, (mine, real) in enumerate(same) if mine != real), min(len(left), len(answer)))
        self.stood += stand
        self.judged = last or stand < len(answer) or stand == len(left)
        return stand, len(left) - stand if self.judged else 0
