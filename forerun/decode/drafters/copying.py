"""Copy drafting for edits: while the answer repeats the prompt, with changes, the prompt's next tokens are drafted.

A pointer follows the answer through the prompt. Where the answer leaves it, the places it may return to (after a
replacement, an insertion, a deletion) are drafted at once, and the next tokens show which one it was. Unlike a lookup,
it does not start anew after each change, and of several similar places it prefers the one that comes next. The same
text may have other tokens beside a change: that is a replacement like any other. Where a request has a text that its
answer is expected to repeat (`SamplingParams.prediction`), that is followed instead. Knows tokens, no text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forerun.core import Draft
from forerun.decode.drafters.base import Drafter, DraftRequest, register
from forerun.decode.drafters.lookup import MAX_MATCH_TOKENS, Child, NgramIndex, grow_best_first, prob_of

if TYPE_CHECKING:
    from forerun.decode.draft_context import DraftContext

_SEARCH_BEFORE_TOKENS, _SEARCH_AFTER_TOKENS = 8, 32  # around the pointer, searched for the answer's last tokens
_TOKENS_PER_EXTRA_MATCH = 8  # a match this much farther away must be one token longer
_MIN_COPIED_TOKENS = 3  # in a row: fewer may match by chance
_SHARE_WINDOW_TOKENS = 16  # over which the share of copied tokens is averaged
_MAX_TOKENS_OFF = 32  # since the answer left the prompt; after more it rarely returns to where it left
_MIN_FAR_MATCH_TOKENS = 2  # of a match far from the pointer

# Log odds that the next token is the prompt's, by tokens copied since the last change (0 is unused), in an answer that
# copied nothing recently, and what is added in one that copied all: measured on greedy answers of a 1.5B model and on
# bug fixes, as are the return probabilities.
_LOG_ODDS = (0.0, -1.6, -0.5, 0.2, 0.6, 0.9, 1.3, 1.7, 1.9, 1.9, 1.9, 1.9, 2.5)
_COPIED_SHARE_BONUS = 2.4

# The answer left the prompt one, two, three tokens ago: tokens further on in the prompt -> probability that it returns
# there, in an answer that copies all else. One token replaced by one is half of all changes.
_RETURN_PROBS: tuple[dict[int, float], ...] = (
    {1: 0.38, 2: 0.05, 0: 0.03},
    {1: 0.12, 0: 0.06, 2: 0.03},
    {0: 0.08, 1: 0.05},
)
_FIRST_TOKEN_PROB = 0.4  # that an answer whose first token is in the prompt continues as the prompt does there
_MAX_FIRST_PLACES = 4  # that are drafted from then

Place = tuple[float, int, int]  # weight, place in the prompt that comes next, tokens copied up to there


class Pointer:
    """Where in the prompt an answer is: on it, at `next`, or off it since it left at `anchor`."""

    def __init__(self, tokens: list[int], num_prompt: int) -> None:
        self.prompt = tokens[:num_prompt]
        self.size = num_prompt  # tokens of the sequence that were followed
        self.next = -1  # the place in the prompt that comes next; -1: off
        self.run = 0  # tokens copied since the last change
        self.anchor = -1  # where the answer left the prompt after copying; -1: not known
        self.off = 0  # tokens since then
        self.share = 0.5  # of the answer's recent tokens that were copied
        self._index = NgramIndex()
        self._index.extend(self.prompt, num_prompt)

    def follow(self, tokens: list[int]) -> None:
        prompt, size = self.prompt, len(self.prompt)
        for end in range(self.size + 1, len(tokens) + 1):
            self.off += 1
            self.share -= self.share / _SHARE_WINDOW_TOKENS
            if 0 <= self.next < size and prompt[self.next] == tokens[end - 1]:
                self.next += 1
                self.run += 1
                self.share += (self.run > _MIN_COPIED_TOKENS) / _SHARE_WINDOW_TOKENS
                continue
            if self.run >= _MIN_COPIED_TOKENS:
                self.anchor, self.off = self.next, 1
            elif self.off > _MAX_TOKENS_OFF:
                self.anchor = -1
            self.run, self.next = self._realign(tokens, end)
        self.size = len(tokens)

    def places(self, tokens: list[int]) -> list[Place]:
        """Where the answer may go on, with weights that sum to one or less."""
        if self.next >= 0:
            return [(1.0, self.next, self.run)]
        if self.size == len(self.prompt) + 1:
            found = self._index.matches(self.prompt, tokens, self.size)[:_MAX_FIRST_PLACES]
            return [(_FIRST_TOKEN_PROB / len(found), place, 0) for _, place in found]
        if self.anchor < 0 or self.off > len(_RETURN_PROBS):
            return []
        share = self.share
        return [(weight * share, self.anchor + further, 0) for further, weight in _RETURN_PROBS[self.off - 1].items()]

    def _realign(self, tokens: list[int], end: int) -> tuple[int, int]:
        """(length of the match, place) that the answer continues from; (0, -1) where there is none."""
        prompt, last, straight = self.prompt, tokens[end - 1], self.anchor + self.off
        best, most = (0, -1), 0.0
        if self.anchor >= 0:
            for place in range(
                max(1, self.anchor - _SEARCH_BEFORE_TOKENS), min(len(prompt), straight + _SEARCH_AFTER_TOKENS) + 1
            ):
                if prompt[place - 1] == last:
                    length = self._length(tokens, end, place)
                    score = (
                        length - abs(place - straight) / _TOKENS_PER_EXTRA_MATCH
                    )  # `straight`: every token since replaced one
                    if score > most:
                        best, most = (length, place), score
        least = max(_MIN_FAR_MATCH_TOKENS, best[0] + 1)
        return next((m for m in self._index.matches(self.prompt, tokens, end) if m[0] >= least), best)

    def _length(self, tokens: list[int], end: int, place: int) -> int:
        """How many of the tokens before `end` are before `place` in the prompt too."""
        length, most = 0, min(MAX_MATCH_TOKENS, place)
        while length < most and self.prompt[place - 1 - length] == tokens[end - 1 - length]:
            length += 1
        return length


@register
class CopyDrafter(Drafter):
    name = "copy"

    def __init__(self, ctx: DraftContext) -> None:
        self._pointers: dict[int, Pointer] = {}

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        return [self._propose(request) for request in requests]

    def _propose(self, request: DraftRequest) -> Draft:
        context, tokens, start = request.context, request.tokens, request.context.num_prompt
        if context.params.prediction:  # replaces the prompt
            tokens, start = [*context.params.prediction, *tokens[start:]], len(context.params.prediction)
        pointer = self._pointers.get(request.seq_id)
        if pointer is None or pointer.size > len(tokens):
            pointer = self._pointers[request.seq_id] = Pointer(tokens, start)
            if context.params.prediction:  # is expected to be copied from its beginning
                pointer.next, pointer.run, pointer.share = 0, _MIN_COPIED_TOKENS, 1.0
        pointer.follow(tokens)
        places = pointer.places(tokens)
        if not places:
            return Draft()
        prompt, bonus = pointer.prompt, _COPIED_SHARE_BONUS * pointer.share

        def expand(places: list[Place]) -> list[Child[list[Place]]]:
            groups: dict[int, list[Place]] = {}
            for weight, place, run in places:
                if place < len(prompt):
                    groups.setdefault(prompt[place], []).append((weight, place + 1, run + 1))
            children = []
            for token, group in groups.items():
                weight = sum(place[0] for place in group)
                run = group[0][2] - 1
                prob = weight * prob_of(_LOG_ODDS[min(run, MAX_MATCH_TOKENS)] + bonus) if run else weight
                children.append((token, prob, [(w / weight, place, run) for w, place, run in group]))
            return children

        return grow_best_first(places, expand, request, self.name)

    def finish(self, seq_id: int, tokens: list[int], num_prompt: int) -> None:
        self._pointers.pop(seq_id, None)
