"""A head for models that only guess: the frequent tokens, and those met so far.

A vocabulary of 150,000 makes the head the largest matrix of a small model, and almost all of it is never right. Token
ids of a BPE are sorted by frequency, so the first part is always computed; a token outside it gets a row of its own
once it occurs in a text. All others are never guessed, which costs no exactness: guesses are checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from forerun.models.linear import Linear, Norm, rms_norm

FREQUENT_IDS = 49_152  # first ids that are always computed
MAX_SEEN_IDS = 4_096  # further ids that are remembered


class ShortHead(Linear):
    """`first` has the rows of the first ids, `rows(ids)` gives any others [N, hidden] as `first` would see them."""

    def __init__(self, first: Linear, vocab: int, rows: Callable[[Tensor], Tensor]) -> None:
        self.first, self.out_features, self.in_features = first, vocab, first.in_features
        self._rows = rows
        self._seen: dict[int, None] = {}
        self._ids = torch.empty(0, dtype=torch.int64)
        self._weight = torch.empty(0, first.in_features)

    @property
    def nbytes(self) -> int:
        return self.first.nbytes + self._weight.nbytes

    def add_seen(self, tokens: Iterable[int]) -> None:
        """These occur in a text: from now on they can be guessed."""
        new = list({token for token in tokens if token >= self.first.out_features and token not in self._seen})
        if not new:
            return
        if len(self._seen) + len(new) > MAX_SEEN_IDS:  # start over with what is new
            self._seen.clear()
            self._ids, self._weight, new = self._ids[:0], self._weight[:0], new[-MAX_SEEN_IDS:]
        self._seen.update(dict.fromkeys(new))
        ids = torch.tensor(new)
        self._ids = torch.cat((self._ids, ids))
        self._weight = torch.cat((self._weight, self._rows(ids).float()))

    def __call__(self, x: Tensor, *, norm: Norm | None = None, add: Tensor | None = None) -> Tensor:
        y = x.new_full((x.shape[0], self.out_features), float("-inf"))
        y[:, : self.first.out_features] = self.first(x, norm=norm)
        if len(self._ids):
            plain = (x if norm is None else rms_norm(x, norm)).float()
            y[:, self._ids] = (plain @ self._weight.T).to(y.dtype)
        return y if add is None else y.add_(add)
