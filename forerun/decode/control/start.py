"""When a draft model may read for its first draft, and what exploring paid drafters may lose.

Whether its drafts pay for the reading is planned apart (`depth`). Knows no drafter.
"""

from __future__ import annotations

from forerun.decode.control.acceptance import DrafterRecord, RequestStats

EXPLORE_PAID_SHARE = 0.0075  # of a request's time, that exploring paid drafters may lose
# Of an answer, in which nothing is explored and no draft model starts to read unless it has paid for such prompts: many
# answers have few more, and free drafters show what they can do
FIRST_TOKENS = 8


def too_early(s: RequestStats, record: DrafterRecord) -> bool:
    return not s.named and s.tokens < FIRST_TOKENS and not record.has_paid(s.kind)
