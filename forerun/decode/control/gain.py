"""What steps with drafts gained against what was expected of them, by kind of prompt and within one request.

Drafts are verified where they look best, and that is where their probabilities are too high: calibrated over all drafts
they are right, over those that were chosen they are not. The ratio of tokens gained to tokens expected corrects it, and
knows soon whether a request repeats text at all. On a device that runs ahead of the host a step that was not launched
for the sake of a draft counts as well, whether its draft could be used or not.

The same for drafters that run a model, where tokens a second count: a plan adds acceptance, forwards and the host's
work up, each measured, and where a drafter hardly pays the sum may still be a tenth too high (docs/log.md). Knows no
cost and no drafter.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from forerun.core import ROOT, Draft

# Expected tokens that a ratio of 1 counts for before anything is known: of all requests of a kind, of one request. A
# draft is expected to gain 1 to 8.
PRIOR_TOKENS, REQUEST_PRIOR_TOKENS = 4.0, 3.0
# The same of tokens in the time that steps with a paid drafter took, of requests of a kind that have ended: about a
# dozen steps. A request's own outcomes are in its plans already, and unlucky steps would count twice.
PAID_PRIOR_TOKENS = 36.0
# The same where doubt counts: 0.55 to 0.6 of what was expected was gained in prose and questions, more in code and
# edits (answers of a 1.5B model to tasks of 15 kinds, one process)
DOUBTED_RATIO = 0.6
DECAY, REQUEST_DECAY = 0.98, 0.9  # per step with a free draft
MAX_TOKENS = 8.0  # of one step that count: one long copy shows little about the next draft


@dataclass(slots=True)
class Gain:
    """Of one request."""

    left: float = 0.0  # tokens expected of the step after the one in flight, which is not launched for it
    open: float = 0.0  # tokens expected of the step that runs
    beside: float = 0.0  # of drafts that would be verified if all that was expected of such ones came,
    followed: float = 0.0  # and of those of them that are compared with the tokens that come
    total: list[float] = field(default_factory=lambda: [0.0, 0.0])  # gained, expected

    def begin_left(self) -> None:
        """The step that was not launched ahead begins."""
        self.open, self.left = self.left, 0.0

    def follow(self) -> None:
        """The drafts made last are compared with the tokens that come from now on."""
        self.followed, self.beside = self.beside, 0.0


class Gains:
    def __init__(self) -> None:
        self._kinds: dict[str, list[float]] = {}  # gained, expected

    def ratio(self, kind: str, own: Gain, doubt: bool = False) -> float:
        """Tokens gained over those expected, at most 1."""
        usual = self.usual(kind, PRIOR_TOKENS, DOUBTED_RATIO if doubt else 1.0)
        return min(1.0, (own.total[0] + REQUEST_PRIOR_TOKENS * usual) / (own.total[1] + REQUEST_PRIOR_TOKENS))

    def usual(self, kind: str, prior_tokens: float = PAID_PRIOR_TOKENS, prior: float = 1.0) -> float:
        """The same of all requests of a kind, however much it is."""
        gained, expected = self._kinds.get(kind, (0.0, 0.0))
        return (gained + prior * prior_tokens) / (expected + prior_tokens)

    def expected(
        self, kind: str, own: Gain, draft: Draft, paid: Collection[str], share: float = 1.0, doubt: bool = False
    ) -> list[float]:
        """Probabilities of a draft's nodes, those of drafters that are not `paid` (that run no model, here or
        elsewhere) by what such drafts have gained, and so much of that."""
        ratio = share * self.ratio(kind, own, doubt)
        if ratio == 1.0:
            return draft.probs
        nodes = zip(draft.probs, draft.parents, draft.sources, strict=True)
        return [p * ratio if parent == ROOT and source not in paid else p for p, parent, source in nodes]

    def record(self, kind: str, own: Gain, tokens: int) -> None:
        """Tokens that the step which ran gained over a plain one."""
        if own.open:
            self._count(kind, own, tokens, own.open)
            own.open = 0.0

    def record_followed(self, kind: str, own: Gain, tokens: int) -> None:
        """Tokens that drafts which were not verified had right."""
        if own.followed:
            self._count(kind, own, tokens, own.followed)
            own.followed = 0.0

    def _count(self, kind: str, own: Gain, tokens: int, hoped: float) -> None:
        gained, expected = min(tokens, MAX_TOKENS), min(hoped, MAX_TOKENS)
        own.total = [count * REQUEST_DECAY + more for count, more in zip(own.total, (gained, expected), strict=True)]
        self.add(kind, gained, expected)

    def add(self, kind: str, gained: float, expected: float, steps: int = 1) -> None:
        """Of so many steps."""
        known, decay = self._kinds.setdefault(kind, [0.0, 0.0]), DECAY**steps
        known[0], known[1] = known[0] * decay + gained, known[1] * decay + expected

    def as_json(self) -> dict[str, list[float]]:
        return dict(self._kinds)

    def load(self, found: dict[str, Any]) -> None:
        """What `as_json` gave; raises ValueError or TypeError where it did not."""
        kinds = {str(kind): [float(gained), float(expected)] for kind, (gained, expected) in found.items()}
        if any(not 0.0 <= value < 1e9 for counts in kinds.values() for value in counts):
            raise ValueError("these are no counts of tokens")
        self._kinds.update(kinds)
