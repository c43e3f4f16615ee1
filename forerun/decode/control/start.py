"""How long a draft model may read before its first draft, in plain steps: what is lost where an answer ends just then.

Whether its drafts pay for the reading is planned apart (`depth`). Knows no drafter.
"""

from __future__ import annotations

from forerun.decode.control.decision import DraftedBatch

EXPLORE_PAID_SHARE = 0.0075  # of a request's time, that exploring paid drafters may lose
# Of the plain time of an answer that a draft model may read for: of as many tokens as nearly all answers of its kind
# have (the mean less 1.5 standard deviations), and of those that are expected to come. It bounds what is lost where the
# answer ends just then, which is rare in the first case (docs/log.md).
MAX_START_SHARE_OF_KIND, MAX_START_SHARE_EXPECTED, START_DEVIATIONS = 0.15, 0.2, 1.5


def early_tokens(remaining: float, paid: bool, batch: DraftedBatch) -> float:
    """In an answer's first tokens, of which so many are expected to come; `paid`: the drafter has paid for its kind. A
    token of steps on a device saves a third of its time and more: waiting for four costs what reading does."""
    return remaining if paid and batch.on_device_rows else EXPLORE_PAID_SHARE * remaining


def late_tokens(of_kind: float, remaining: float, batch: DraftedBatch) -> float:
    """Behind them; `of_kind`: tokens that nearly all answers of its kind have. Plans for a device have a margin of
    their own."""
    if batch.on_device_rows:
        return remaining
    return max(MAX_START_SHARE_OF_KIND * of_kind, MAX_START_SHARE_EXPECTED * remaining)
