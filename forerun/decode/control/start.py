"""When a draft model may read for its first draft, and what exploring paid drafters may lose.

Whether its drafts pay for the reading is planned apart (`depth`). Knows no drafter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forerun.decode.control.acceptance import DrafterRecord, RequestStats

EXPLORE_PAID_SHARE = 0.0075  # of a request's time, that exploring paid drafters may lose
# Of an answer, in which nothing is explored and no draft model starts to read unless it has paid for such prompts: many
# answers have few more, and free drafters show what they can do
FIRST_TOKENS = 8
# Of what reading takes, that a draft model which has paid may lose by reading later. Where nothing else is drafted that
# is little (0.05 to 0.2 do alike on recorded answers, docs/log.md). A free draft in hand shows for next to nothing
# whether an answer repeats its prompt, where reading would be for nothing: a loss as large as that is worth it
WAITED_SHARE, WAITED_SHARE_FREE = 0.1, 1.0


@dataclass(slots=True)
class Unread:
    """Of an answer that a draft model has not read for: what it lost by that since free drafts last were better."""

    tokens: int = 0  # of the answer when that was last counted,
    taken_s: float = 0.0  # and what they took
    lost_s: float = 0.0

    def count(self, tokens: int, taken_s: float, token_s: float) -> None:
        """`token_s`: of a token, with the draft model's drafts."""
        if self.tokens:
            self.lost_s += taken_s - self.taken_s - (tokens - self.tokens) * token_s
        self.tokens, self.taken_s, self.lost_s = tokens, taken_s, max(0.0, self.lost_s)


def too_early(
    s: RequestStats, record: DrafterRecord, start_s: float, token_s: float, more_s: float, free: bool
) -> bool:
    """`start_s`: what reading takes; `token_s`: a token with such drafts; `more_s`: what this step loses without, which
    has a `free` draft or none."""
    s.unread.count(s.tokens, s.taken_s, token_s)
    if s.named or not record.has_paid(s.kind):
        return not s.named and s.tokens < FIRST_TOKENS
    return s.unread.lost_s + more_s < (WAITED_SHARE_FREE if free else WAITED_SHARE) * start_s
