"""Drafts for lists: the place in the item decides, what was seen more often comes first, and memory is bounded."""

from __future__ import annotations

from array import array

import pytest

from forerun.core import Draft, SamplingParams
from forerun.decode.drafters import listing
from forerun.decode.drafters.base import DraftRequest, find
from forerun.decode.drafters.listing import ListDrafter
from forerun.decode.sampling import Context
from forerun.errors import BadRequest

PROMPT = [99]


def make(item_tokens: int) -> ListDrafter:
    kind = find(f"list:{item_tokens}")
    assert kind is not None and issubclass(kind, ListDrafter)
    return kind(None)  # type: ignore[arg-type]


def propose(drafter: ListDrafter, answer: list[int], seq_id: int = 1, depth: int = 4) -> Draft:
    context = Context(SamplingParams(), [*PROMPT, *answer], len(PROMPT), 0)
    (draft,) = drafter.propose([DraftRequest(seq_id, context, depth, 16, array("i"))])
    assert draft.problem(1 << 20) is None
    return draft


def chain(draft: Draft) -> list[int]:
    """The most probable path."""
    children, node, found = draft.children(), -1, list[int]()
    while node in children:
        node = max(children[node], key=lambda n: draft.probs[n])
        found.append(draft.tokens[node])
    return found


def test_the_same_token_is_continued_by_its_place() -> None:
    """7 is followed by 1 at the beginning of an item and by 2 at its end: text alone cannot tell."""
    drafter = make(2)
    drafter.finish(0, [*PROMPT, *[7, 1, 3, 7, 2, 5] * 3], 1)  # items 7 1, 3 7, 2 5
    assert chain(propose(drafter, [7], depth=1)) == [1]
    assert chain(propose(drafter, [7, 1, 3, 7], seq_id=2, depth=1)) == [2]


def test_whole_items_are_continued_and_the_commoner_first() -> None:
    drafter = make(3)
    for number, item in enumerate(([4, 5, 6], [4, 5, 6], [4, 8, 9])):
        drafter.finish(number, [*PROMPT, *item], 1)
    draft = propose(drafter, [], seq_id=9, depth=3)
    assert chain(draft) == [4, 5, 6]
    assert 8 in draft.tokens and draft.probs[draft.tokens.index(5)] > draft.probs[draft.tokens.index(8)]
    assert all(0.0 < prob <= 1.0 for prob in draft.probs)


def test_an_answer_is_counted_once_however_often_it_is_read() -> None:
    drafter = make(2)
    for end in range(5):
        propose(drafter, [1, 2, 3, 4][:end], seq_id=5)
        propose(drafter, [1, 2, 3, 4][:end], seq_id=5)
    drafter.finish(5, [*PROMPT, 1, 2, 3, 4], 1)
    assert drafter._counts[0] == {1: 1, 3: 1} and drafter._counts[1] == {2: 1, 4: 1}
    assert not drafter._read
    drafter.forget()
    assert len(propose(drafter, [1])) == 0


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "MAX_FEATURES", 64)
    drafter = make(4)
    for number in range(50):
        drafter.finish(number, [*PROMPT, number, number + 1, number + 2], 1)
    assert len(drafter._counts) <= 64
    assert 51 in propose(drafter, [49, 50], seq_id=77, depth=1).tokens  # what came last is known


@pytest.mark.parametrize("name", ["0", "65", "08", "", "eight", "-1"])
def test_lengths_that_are_refused(name: str) -> None:
    with pytest.raises(BadRequest, match="list:"):
        find(f"list:{name}")
