"""ROUGE-L: how much of two texts is the same words in the same order.

Words are runs of letters and digits, in lower case; no stemming, no synonyms, exact longest common subsequence.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_WORD = re.compile(r"[^\W_]+")


def words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def common_subsequence(left: Sequence[str], right: Sequence[str]) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(right) + 1)
    for word in left:
        before = 0
        for j, other in enumerate(right, 1):
            before, row[j] = row[j], before + 1 if word == other else max(row[j], row[j - 1])
    return row[-1]


def rouge_l(answer: str, reference: str) -> float:
    """F1 of precision and recall of the longest common subsequence; 1 for two texts without words."""
    ours, theirs = words(answer), words(reference)
    if not ours and not theirs:
        return 1.0
    common = common_subsequence(ours, theirs)
    if not common:
        return 0.0
    precision, recall = common / len(ours), common / len(theirs)
    return 2 * precision * recall / (precision + recall)
