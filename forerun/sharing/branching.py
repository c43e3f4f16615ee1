"""Where a trajectory may branch, and with which token: at the start of steps, at high entropy, or at positions that the
caller's function returns. Reads tokens and log-probabilities of a node; runs nothing.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from forerun.core import TokenLogprob
from forerun.errors import BadRequest
from forerun.sharing.tree import RolloutNode
from forerun.text.tokenizer import Tokenizer

BranchOn = Literal["step", "entropy"] | Callable[[RolloutNode], Sequence[int]]
BRANCH_NAMES = ("step", "entropy")


def entropy(entry: TokenLogprob) -> float:
    """Of the next token's distribution, in nats, from its likeliest tokens; all others count as one token."""
    probs = [math.exp(logprob) for _, logprob in entry.top]
    rest = max(0.0, 1.0 - sum(probs))
    return -sum(p * math.log(p) for p in (*probs, rest) if p > 0.0)


def step_starts(token_ids: Sequence[int], tokenizer: Tokenizer, separator: str) -> list[int]:
    """Positions of tokens that begin a step: the token before them ends a separator. Several separators in a row end
    one step, not several."""
    starts: list[int] = []
    stream, text, searched = tokenizer.stream(), "", 0
    for i, token in enumerate(token_ids):
        text += stream.push(token)
        at = text.rfind(separator, searched)
        if at < 0:
            continue
        searched = at + len(separator)
        if starts and starts[-1] == i:  # the last token was a separator as well
            starts.pop()
        if i + 1 < len(token_ids):
            starts.append(i + 1)
    return starts


@dataclass(frozen=True)
class BranchPoint:
    """A new branch: it starts before token `at` of `node`, with `token`, which no sibling starts with."""

    node: RolloutNode
    at: int
    token: TokenLogprob
    entropy: float


@dataclass(frozen=True)
class Brancher:
    """Finds the best free branch point of a node."""

    branch_on: BranchOn
    tokenizer: Tokenizer
    separator: str
    min_prob: float  # of a token to branch with
    width: int
    banned: Collection[int]  # tokens that would end the answer at once

    def best(self, node: RolloutNode, rng: random.Random) -> BranchPoint | None:
        """The allowed position of highest entropy; the token is drawn from those that no sibling starts with."""
        allowed = self.positions(node)
        for at in sorted(allowed, key=lambda at: -entropy(node.logprobs[at])):
            there = node.parent.children if at == 0 and node.parent is not None else []
            if max(1, len(there)) >= self.width:
                continue
            taken = {node.token_ids[at], *(sibling.token_ids[0] for sibling in there if sibling.token_ids)}
            free = [
                (token, logprob)
                for token, logprob in node.logprobs[at].top
                if token not in taken and token not in self.banned and math.exp(logprob) >= self.min_prob
            ]
            if free:
                token, logprob = rng.choices(free, weights=[math.exp(logprob) for _, logprob in free])[0]
                found = TokenLogprob(token, logprob, node.logprobs[at].top)
                return BranchPoint(node, at, found, entropy(node.logprobs[at]))
        return None

    def positions(self, node: RolloutNode) -> list[int]:
        """All positions of a node at which it may branch; 0 is where the node itself begins."""
        if self.branch_on == "entropy":
            return list(range(len(node.token_ids)))
        if self.branch_on == "step":
            return [0, *step_starts(node.token_ids, self.tokenizer, self.separator)]
        assert callable(self.branch_on)
        return self._from_function(node, self.branch_on)

    @staticmethod
    def _from_function(node: RolloutNode, function: Callable[[RolloutNode], Sequence[int]]) -> list[int]:
        try:
            found = list(function(node))
        except Exception as error:
            hint = "it gets a node of the tree and returns positions in node.token_ids"
            raise BadRequest(f"branch_on raised {type(error).__name__} on node {node.id}: {error}", hint) from error
        for at in found:
            if isinstance(at, bool) or not isinstance(at, int) or not 0 <= at < len(node.token_ids):
                problem = f"branch_on gave position {at!r} for node {node.id}, which has {len(node.token_ids)} tokens"
                raise BadRequest(problem, "positions are whole numbers from 0 to len(node.token_ids) - 1")
        return found
