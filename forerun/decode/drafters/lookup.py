"""Prompt lookup: what followed the last tokens when they stood in the prompt or the answer before.

Each sequence has an index of its pairs of tokens, extended as it grows. The newest occurrences of the last pair are
compared backwards; what followed them becomes a small tree, the longest match first. Knows nothing of other sequences
(see suffix.py) and nothing of documents (see copying.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from itertools import islice
from math import exp
from typing import TYPE_CHECKING, TypeVar

from forerun.core import ROOT, Draft
from forerun.decode.drafters.base import Drafter, DraftRequest, register

if TYPE_CHECKING:
    from forerun.decode.draft_context import DraftContext

_SHIFT = 24  # bits of a token in a key; a collision would only be a wrong draft
_MAX_PAIR_MATCHES = 8  # the newest occurrences of the last two tokens
_MAX_SINGLE_MATCHES = 4  # of the last token, where the pair is new
MAX_MATCH_TOKENS = 12  # a longer match predicts no better

# Log odds that the token after a match is the target's own, by the length of the match (0 is unused): measured on
# greedy answers of a 1.5B model, as are the weights below. A match of length l of which d more tokens were accepted is
# as good as one of length l + d.
_LOG_ODDS = (0.0, -0.9, -0.3, 0.1, 0.5, 0.9, 1.2, 1.3, 1.4, 1.6, 1.7, 1.9, 3.2)
_PROMPT_BONUS = 0.9  # answers repeat their prompt more faithfully than themselves
_AGREED_BONUS = 0.9  # several occurrences, one continuation
_DISPUTED_PENALTY = (0.0, 0.0, -0.9, -1.2, -1.6)  # by the number of continuations
_MAJORITY_BONUS = 0.6  # the first of several has more than half of the occurrences

State = TypeVar("State")
Child = tuple[int, float, State]  # token, probability given its parent, what follows it
Continuation = tuple[int, int, int]  # length of the match, place that comes next, distance to what it matches


def prob_of(log_odds: float) -> float:
    return 1.0 / (1.0 + exp(-log_odds))


def grow_best_first(
    root: State, expand: Callable[[State], Iterable[Child[State]]], request: DraftRequest, source: str
) -> Draft:
    """The most probable paths of a tree that `expand` unfolds, best first, within the request's nodes and depth."""
    draft = Draft()
    tokens, parents, probs = draft.tokens, draft.parents, draft.probs
    frontier: list[tuple[float, int, int, float, int, int, State]] = []
    made, node, depth, path, state, least = 0, ROOT, 1, 1.0, root, request.min_prob
    while True:
        if depth <= request.max_depth:
            for token, prob, child in expand(state):
                if path * prob >= least:
                    made += 1  # ties go to the older, and states are never compared
                    heappush(frontier, (-path * prob, made, token, prob, node, depth, child))
        if not frontier or len(tokens) >= request.max_nodes:
            break
        key, _, token, prob, parent, depth, state = heappop(frontier)
        node, path, depth = len(tokens), -key, depth + 1
        tokens.append(token)
        parents.append(parent)
        probs.append(prob)
    draft.sources = [source] * len(tokens)
    return draft


class NgramIndex:
    """Where the tokens and pairs of tokens of a growing list occurred: amortised O(1) per token.

    Place p is the gap before `tokens[p]`.
    """

    def __init__(self) -> None:
        self.size = 0  # tokens that are in the index
        self._single: dict[int, int] = {}  # token -> the place after its newest occurrence
        self._pair: dict[int, int] = {}  # pair -> the place after its newest occurrence
        self._pair_before = array("i", [-1])  # place -> the place of the same pair before it, or -1
        self._single_before = array("i", [-1])

    def extend(self, tokens: list[int], end: int) -> None:
        """Index `tokens[size:end]`."""
        single, single_before, pair, pair_before = self._single, self._single_before, self._pair, self._pair_before
        before = tokens[self.size - 1] if self.size else -1
        for place, token in enumerate(islice(tokens, self.size, end), start=self.size + 1):
            key = before << _SHIFT | token
            pair_before.append(pair.get(key, -1))
            single_before.append(single.get(token, -1))
            single[token] = pair[key] = place
            before = token
        self.size = max(self.size, end)

    def matches(self, indexed: list[int], tokens: list[int], end: int) -> list[tuple[int, int]]:
        """(length, place) of the last tokens before `end` in what is indexed, longest and then newest first.

        Where both are one list the index must hold less than `end` tokens: they would match themselves.
        """
        if end < 2:
            return []
        found: list[tuple[int, int]] = []
        place = self._pair.get(tokens[end - 2] << _SHIFT | tokens[end - 1], -1)
        while place >= 0 and len(found) < _MAX_PAIR_MATCHES:
            length, most = 2, min(MAX_MATCH_TOKENS, place, end)
            while length < most and indexed[place - 1 - length] == tokens[end - 1 - length]:
                length += 1
            found.append((length, place))
            place = self._pair_before[place]
        if found:
            found.sort(key=lambda match: -match[0])  # stable: the newest stays first among equals
            return found
        place = self._single.get(tokens[end - 1], -1)
        while place >= 0 and len(found) < _MAX_SINGLE_MATCHES:
            found.append((1, place))
            place = self._single_before[place]
        return found


@register
class LookupDrafter(Drafter):
    name = "lookup"

    def __init__(self, ctx: DraftContext) -> None:
        self._indices: dict[int, NgramIndex] = {}

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        return [self._propose(request) for request in requests]

    def _propose(self, request: DraftRequest) -> Draft:
        tokens = request.tokens
        index = self._indices.get(request.seq_id)
        if index is None or index.size >= len(tokens):
            index = self._indices[request.seq_id] = NgramIndex()
        index.extend(tokens, len(tokens) - 1)
        matches = index.matches(tokens, tokens, len(tokens))
        if not matches:
            return Draft()
        size, num_prompt = len(tokens), request.context.num_prompt

        def expand(matches: list[Continuation]) -> list[Child[list[Continuation]]]:
            groups: dict[int, list[Continuation]] = {}
            for length, place, period in matches:
                if place == size:  # the match was a repetition, and goes on as one
                    place -= period
                groups.setdefault(tokens[place], []).append((length + 1, place + 1, period))
            return self._weigh(groups, len(matches), num_prompt)

        return grow_best_first([(length, place, size - place) for length, place in matches], expand, request, self.name)

    @staticmethod
    def _weigh(groups: dict[int, list[Continuation]], matches: int, num_prompt: int) -> list[Child[list[Continuation]]]:
        """The continuations with their probabilities, the one after the longest match first."""
        first = next(iter(groups.values()))
        length, place, _ = first[0]
        log_odds = _LOG_ODDS[min(length - 1, MAX_MATCH_TOKENS)] + (_PROMPT_BONUS if place <= num_prompt else 0.0)
        if len(groups) > 1:
            log_odds += _DISPUTED_PENALTY[min(len(groups), 4)] + (_MAJORITY_BONUS if 2 * len(first) > matches else 0.0)
        elif matches > 1:
            log_odds += _AGREED_BONUS
        prob = prob_of(log_odds)
        other = (1.0 - prob) / len(groups) ** 2  # measured: of two, the other is right in a quarter of the misses
        return [(token, prob if group is first else other, group) for token, group in groups.items()]

    def finish(self, seq_id: int, tokens: list[int], num_prompt: int) -> None:
        self._indices.pop(seq_id, None)
