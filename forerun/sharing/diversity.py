"""How different answers are: edit distances between their first tokens, and groups of duplicates.

Works on lists of token ids; knows no model, no text and no tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

FIRST_COMPARED_TOKENS = 16  # of every branch, for the first comparison of a group; then twice as many, and so on


def edit_distance(a: Sequence[int], b: Sequence[int]) -> int:
    """Levenshtein distance: insertions, deletions and replacements that turn one into the other."""
    start = 0
    while start < min(len(a), len(b)) and a[start] == b[start]:
        start += 1
    a, b = a[start:], b[start:]
    while a and b and a[-1] == b[-1]:
        a, b = a[:-1], b[:-1]
    row = list(range(len(b) + 1))
    for i, left in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, right in enumerate(b, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (left != right))
    return row[-1]


def mean_pairwise_distance(sequences: Sequence[Sequence[int]], prefix: int | None = None) -> float:
    """Mean over all pairs of the edit distance of their first `prefix` tokens, as a share of the longer one: 0 where
    all are the same, 1 where no two have anything in common. One sequence alone has distance 1."""
    cut = [sequence[:prefix] for sequence in sequences]
    pairs = list(combinations(cut, 2))
    if not pairs:
        return 1.0
    return sum(edit_distance(a, b) / max(len(a), len(b), 1) for a, b in pairs) / len(pairs)


class SiblingGroup:
    """Branches of one point that run together: stopped early where their first tokens are too similar.

    `others`: first tokens of finished siblings. The outcome depends on tokens only, not on timing: a group is compared
    when all running members have as many tokens as the comparison takes.
    """

    def __init__(self, min_distance: float, others: Sequence[Sequence[int]] = ()) -> None:
        self.min_distance = min_distance
        self.others = others
        self._members: dict[int, list[int]] = {}
        self._running: set[int] = set()
        self._compared_tokens = FIRST_COMPARED_TOKENS

    def add(self, member: int, tokens: list[int]) -> None:
        """`tokens` is the member's own list, which grows."""
        self._members[member] = tokens
        self._running.add(member)

    def remove(self, member: int) -> list[int]:
        """A member has ended; the comparison of the others may be due now."""
        self._running.discard(member)
        return self.find_duplicates()

    def find_duplicates(self) -> list[int]:
        """Members to stop now, if any: all that run but the first; that one, too, where a sibling has ended."""
        stopped: list[int] = []
        while self.min_distance > 0 and self._running and self._long_enough():
            compared = [*self._members.values(), *self.others]
            if mean_pairwise_distance(compared, self._compared_tokens) < self.min_distance:
                ended = bool(self.others) or len(self._running) < len(self._members)
                stopped = sorted(self._running)[0 if ended else 1 :]
                self._running -= set(stopped)
                self.min_distance = 0.0  # stop members once
            self._compared_tokens *= 2
        return stopped

    def _long_enough(self) -> bool:
        return all(len(self._members[member]) >= self._compared_tokens for member in self._running)
