"""Drafts for answers that are lists of items of one length, from the position inside the item and the list.

`list:N` is for items of N tokens: semantic ids of a recommender, rows of an image. What followed is counted, over all
answers of an engine, by features that know the position (as those of PAD-Rec do): the place in the item alone, with the
token before, with the token at the same place of the item before, with the whole item so far; then the place in the
list with the prompt's last token and the tokens before. A probability starts at the first of these and is corrected by
each that was seen. Knows no text and no model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, ClassVar

from forerun.core import Draft
from forerun.decode.drafters.base import Drafter, DraftRequest, register_family
from forerun.decode.drafters.lookup import Child, grow_best_first
from forerun.errors import BadRequest

if TYPE_CHECKING:
    from forerun.decode.draft_context import DraftContext

MAX_ITEM_TOKENS = 64
MAX_FEATURES = 1 << 17  # that are counted; with more, the older half is dropped
MAX_FEATURE_TOKENS = 64  # that followed a feature: more predict nothing, and take long to sort
MAX_CHILDREN = 3  # of a node
DOUBT = 2.0  # observations that the estimate of a coarser feature counts for

ListState = tuple[int, int, tuple[int, ...]]  # the prompt's last token, tokens of the list so far, the last of these


class ListDrafter(Drafter):
    cross_request = True
    item_tokens: ClassVar[int]

    def __init__(self, ctx: DraftContext) -> None:
        self._counts: dict[Hashable, Counter[int]] = {}
        self._read: dict[int, int] = {}  # sequence -> its tokens that are counted

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        return [self._draft(request) for request in requests]

    def finish(self, seq_id: int, tokens: list[int], num_prompt: int) -> None:
        self._count(seq_id, tokens, num_prompt)
        self._read.pop(seq_id, None)

    def forget(self) -> None:
        self._counts.clear()

    def _draft(self, request: DraftRequest) -> Draft:
        tokens, num_prompt = request.tokens, request.context.num_prompt
        self._count(request.seq_id, tokens, num_prompt)
        return grow_best_first(self._state(tokens, num_prompt, len(tokens)), self._children, request, self.name)

    def _state(self, tokens: list[int], num_prompt: int, end: int) -> ListState:
        """What comes before a place of a sequence; an item's worth of tokens at most."""
        first = max(num_prompt, end - self.item_tokens)
        return tokens[num_prompt - 1] if num_prompt else -1, end - num_prompt, tuple(tokens[first:end])

    def _count(self, seq_id: int, tokens: list[int], num_prompt: int) -> None:
        for end in range(max(num_prompt, self._read.get(seq_id, 0)), len(tokens)):
            for feature in self._features(self._state(tokens, num_prompt, end)):
                self._counts.setdefault(feature, Counter())[tokens[end]] += 1
        self._read[seq_id] = len(tokens)
        if len(self._counts) > MAX_FEATURES:
            self._counts = dict(islice(self._counts.items(), MAX_FEATURES // 2, None))

    def _features(self, state: ListState) -> Iterator[Hashable]:
        """Of the token that follows, coarsest first."""
        prompt_end, at, before = state
        place = at % self.item_tokens
        last = before[-1] if before else -1
        above = before[0] if len(before) == self.item_tokens else -1
        yield place
        yield place, last
        yield place, last, above
        yield place, before[len(before) - place :]
        yield prompt_end, at, last, above
        yield prompt_end, at, before

    def _children(self, state: ListState) -> list[Child[ListState]]:
        prompt_end, at, before = state
        probs: dict[int, float] = {}
        for feature in self._features(state):
            found = self._counts.get(feature)
            if found is None or len(found) > MAX_FEATURE_TOKENS:
                continue
            total, tokens = found.total() + DOUBT, dict.fromkeys((*found, *probs))
            probs = {token: (found[token] + DOUBT * probs.get(token, 0.0)) / total for token in tokens}
        best = sorted(probs, key=lambda token: -probs[token])[:MAX_CHILDREN]
        after = {token: (prompt_end, at + 1, (*before, token)[-self.item_tokens :]) for token in best}
        return [(token, probs[token], after[token]) for token in best]


def list_drafter(item_tokens: str) -> type[Drafter]:
    """The drafter `list:N`."""
    length = next((n for n in range(1, MAX_ITEM_TOKENS + 1) if str(n) == item_tokens), None)
    if length is None:
        hint = f"give the tokens of an item, list:1 to list:{MAX_ITEM_TOKENS}"
        raise BadRequest(f"the drafter list:{item_tokens:.40} has no length of items", hint)
    return type("ListDrafter", (ListDrafter,), {"name": f"list:{length}", "item_tokens": length})


register_family("list", list_drafter)
