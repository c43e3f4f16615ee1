"""When a draft model may read for its first draft, and what exploring paid drafters may lose.

Whether its drafts pay for the reading is planned apart (`depth`). Knows no drafter.
"""

from __future__ import annotations

from forerun.decode.control.acceptance import DrafterRecord, RequestStats

EXPLORE_PAID_SHARE = 0.0075  # of a request's time, that exploring paid drafters may lose
# Of an answer, in which nothing is explored and no draft model starts to read unless it has paid for such prompts: many
# answers have few more, and free drafters show what they can do
FIRST_TOKENS = 8
# Tokens of an answer before one that has paid reads, for each plain step that reading takes as long as: where an answer
# repeats its prompt free drafters show it by then, and where it ends a little less is lost
WAITED_TOKENS = 0.25


def too_early(s: RequestStats, record: DrafterRecord, start_steps: float) -> bool:
    """`start_steps`: plain steps that reading takes as long as."""
    return not s.named and s.tokens < (WAITED_TOKENS * start_steps if record.has_paid(s.kind) else FIRST_TOKENS)
