"""Drafts for answers that are lists of items of one length, from the position inside the item and the list.

`list:N` is for items of N tokens: semantic ids of a recommender, rows of an image. What followed is counted, over all
answers of an engine, by features that know the position (as those of PAD-Rec do): the place in the item alone, with the
token before, with the token at the same place of the item before, with the whole item so far, and with the item's
number. A probability starts at the first of these and is corrected by each that was seen. Knows no text and no model.
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

ListState = tuple[int, tuple[int, ...]]  # tokens of the list so far, and the last ones of these, two items at most


class ListDrafter(Drafter):
    cross_request = True
    item_tokens: ClassVar[int]

    def __init__(self, ctx: DraftContext) -> None:
        self._counts: dict[Hashable, Counter[int]] = {}
        self._read: dict[int, int] = {}  # sequence -> tokens of its answer that are counted

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        return [self._draft(request) for request in requests]

    def finish(self, seq_id: int, tokens: list[int], num_prompt: int) -> None:
        self._count(seq_id, tokens[num_prompt:])
        self._read.pop(seq_id, None)

    def forget(self) -> None:
        self._counts.clear()

    def _draft(self, request: DraftRequest) -> Draft:
        answer = request.tokens[request.context.num_prompt :]
        self._count(request.seq_id, answer)
        state = len(answer), tuple(answer[-2 * self.item_tokens :])
        return grow_best_first(state, self._children, request, self.name)

    def _count(self, seq_id: int, answer: list[int]) -> None:
        for at in range(self._read.get(seq_id, 0), len(answer)):
            for feature in self._features(at, answer[max(0, at - 2 * self.item_tokens) : at]):
                self._counts.setdefault(feature, Counter())[answer[at]] += 1
        self._read[seq_id] = len(answer)
        if len(self._counts) > MAX_FEATURES:
            self._counts = dict(islice(self._counts.items(), MAX_FEATURES // 2, None))

    def _features(self, at: int, before: list[int] | tuple[int, ...]) -> Iterator[Hashable]:
        """Of the token at a place of the list, coarsest first."""
        number, place = divmod(at, self.item_tokens)
        last = before[-1] if before else -1
        above = before[-self.item_tokens] if len(before) >= self.item_tokens else -1
        yield place
        yield place, last
        yield place, last, above
        yield place, tuple(before[len(before) - place :])
        yield number, place, last, above

    def _children(self, state: ListState) -> list[Child[ListState]]:
        at, before = state
        probs: dict[int, float] = {}
        for feature in self._features(at, before):
            found = self._counts.get(feature)
            if found is None or len(found) > MAX_FEATURE_TOKENS:
                continue
            total = found.total() + DOUBT
            tokens = dict.fromkeys((*found, *probs))
            probs = {token: (found[token] + DOUBT * probs.get(token, 0.0)) / total for token in tokens}
        best = sorted(probs, key=lambda token: -probs[token])[:MAX_CHILDREN]
        return [(token, probs[token], (at + 1, (*before, token)[-2 * self.item_tokens :])) for token in best]


def list_drafter(item_tokens: str) -> type[Drafter]:
    """The drafter `list:N`."""
    length = next((n for n in range(1, MAX_ITEM_TOKENS + 1) if str(n) == item_tokens), None)
    if length is None:
        hint = f"give the tokens of an item, list:1 to list:{MAX_ITEM_TOKENS}"
        raise BadRequest(f"the drafter list:{item_tokens:.40} has no length of items", hint)
    return type("ListDrafter", (ListDrafter,), {"name": f"list:{length}", "item_tokens": length})


register_family("list", list_drafter)
