"""What the token before makes likely, for drafts in one forward: a head of low rank over the likeliest tokens of each
position.

A forward with masks gives each position whatever the tokens between are; of the likeliest tokens of two positions in a
row, the product of two short vectors says which go together (DSpark's Markov head, on a draft model that was trained
with it). Computed on the host for all pairs at once: some ten thousand products. Knows tokens; no model.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from forerun.decode.drafters.best_first import MAX_CHILDREN, Ranked

CANDIDATES = 16  # of a position: rarer ones keep their place behind them


class MarkovHead:
    def __init__(self, previous: Tensor, following: Tensor) -> None:
        """Vectors [tokens, r] of the token before and of the one that follows; later ids have none."""
        self.previous, self.following = (
            np.concatenate((part.float().cpu().numpy(), np.zeros((1, part.shape[1]), np.float32)))
            for part in (previous, following)
        )

    def correct(self, tokens: np.ndarray, probs: np.ndarray) -> np.ndarray:
        """Of candidates [D, C] with their probabilities: [D - 1, C, C] the same of each position but the first, after
        each candidate of the position before."""
        known = np.minimum(tokens, len(self.previous) - 1)
        bias = self.previous[known[:-1]] @ self.following[known[1:]].transpose(0, 2, 1)  # [D - 1, before, candidate]
        made = probs[1:, None, :] * np.exp(bias)
        rest = np.maximum(0.0, 1.0 - probs[1:].sum(-1))[:, None, None]  # of tokens that are no candidates
        return np.asarray(made / (made.sum(-1, keepdims=True) + rest))


class MarkovMarginals:
    """Of one sequence: logits [D, V] as the forward gave them, and corrected candidates."""

    def __init__(self, logits: Tensor, tokens: np.ndarray, probs: np.ndarray, head: MarkovHead) -> None:
        self.depth, self._logits, self._tokens = len(tokens), logits, tokens
        self._first = _ranked(tokens[0], probs[0])
        if self.depth > 1:
            corrected = head.correct(tokens, probs)
            order = np.argsort(-corrected, -1)[..., :MAX_CHILDREN]  # [D - 1, before, MAX_CHILDREN]
            self._probs = np.take_along_axis(corrected, order, -1)
            self._children = np.take_along_axis(tokens[1:, None, :], order, -1)

    def row(self, depth: int, before: int) -> Tensor:
        """For drafts that are drawn: any distribution is right there, as long as it is the one that is drawn from."""
        return self._logits[depth]

    def top(self, depth: int, before: int) -> Ranked:
        if depth == 0:
            return self._first
        place = int((self._tokens[depth - 1] == before).argmax())
        return _ranked(self._children[depth - 1, place], self._probs[depth - 1, place])


def _ranked(tokens: np.ndarray, probs: np.ndarray) -> Ranked:
    found = zip(tokens[:MAX_CHILDREN].tolist(), probs[:MAX_CHILDREN].tolist(), strict=True)
    return [(token, min(1.0, prob)) for token, prob in found if prob > 0.0]
