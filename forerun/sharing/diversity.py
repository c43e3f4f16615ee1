"""How different answers are: edit distances between their beginnings, distinct ones, and groups that are too alike.

Works on lists of token ids; knows no model, no text and no tree.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import combinations

FIRST_LOOK = 16  # tokens of every branch before a group is looked at; then twice as many, and so on


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
    all are the same, 1 where no two have anything in common. One sequence alone is as far from others as can be."""
    cut = [sequence[:prefix] for sequence in sequences]
    pairs = list(combinations(cut, 2))
    if not pairs:
        return 1.0
    return sum(edit_distance(a, b) / max(len(a), len(b), 1) for a, b in pairs) / len(pairs)


def count_distinct(items: Iterable[Hashable]) -> int:
    return len(set(items))


class Group:
    """Branches of one point that run together: stopped early where their beginnings are too alike.

    `others`: beginnings of finished siblings. Whether a group is alike depends on its tokens only, not on who was fast:
    it is looked at when all that run have as many tokens as the look takes.
    """

    def __init__(self, least: float, others: Sequence[Sequence[int]] = ()) -> None:
        self.least = least
        self.others = others
        self._members: dict[int, list[int]] = {}
        self._running: set[int] = set()
        self._look = FIRST_LOOK

    def join(self, member: int, tokens: list[int]) -> None:
        """`tokens` is the member's own list, which grows."""
        self._members[member] = tokens
        self._running.add(member)

    def leave(self, member: int) -> list[int]:
        """A member has ended; the others may have waited for it."""
        self._running.discard(member)
        return self.look()

    def look(self) -> list[int]:
        """Members to stop now, if any: all that run but the first; that one, too, where a sibling has ended."""
        stopped: list[int] = []
        while self.least > 0 and self._running and all(len(self._members[m]) >= self._look for m in self._running):
            beginnings = [*self._members.values(), *self.others]
            if mean_pairwise_distance(beginnings, self._look) < self.least:
                ended = bool(self.others) or len(self._running) < len(self._members)
                stopped = sorted(self._running)[0 if ended else 1 :]
                self._running -= set(stopped)
                self.least = 0.0  # said once
            self._look *= 2
        return stopped
