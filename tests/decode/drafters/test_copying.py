"""Copying: spans of the prompt are drafted, and a change costs one or two steps before they are again."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.core import ROOT, Draft, SamplingParams
from forerun.decode.drafters.base import DraftRequest, registered
from forerun.decode.drafters.copying import CopyDrafter, Pointer
from forerun.decode.sampling import Context

DOCUMENT = list(range(100, 200))


def propose(
    drafter: CopyDrafter, tokens: list[int], num_prompt: int, *, depth: int = 16, nodes: int = 16, id: int = 0
) -> Draft:
    request = DraftRequest(id, Context(SamplingParams(), tokens, num_prompt, 0), depth, nodes, array("i"))
    (draft,) = drafter.propose([request])
    assert draft.problem(1 << 20) is None
    assert len(draft) <= nodes and max(draft.depths(), default=0) <= depth
    return draft


def after(answer: list[int], prompt: list[int] = DOCUMENT, **options: int) -> Draft:
    return propose(CopyDrafter(None), [*prompt, *answer], len(prompt), **options)  # type: ignore[arg-type]


def accepted(draft: Draft, truth: list[int]) -> int:
    children, node, count = draft.children(), ROOT, 0
    while count < len(truth):
        node = next((c for c in children.get(node, ()) if draft.tokens[c] == truth[count]), -2)
        if node < 0:
            break
        count += 1
    return count


def steps(prompt: list[int], answer: list[int], nodes: int = 16) -> int:
    """Passes of a target that writes `answer`, the first token being there already."""
    drafter, at, count = CopyDrafter(None), 1, 0  # type: ignore[arg-type]
    tokens = [*prompt, answer[0]]
    while at < len(answer):
        draft = propose(drafter, tokens, len(prompt), nodes=nodes)
        gained = min(accepted(draft, answer[at:]) + 1, len(answer) - at)
        tokens += answer[at : at + gained]
        at, count = at + gained, count + 1
    return count


def test_it_has_its_name() -> None:
    assert registered()["copy"] is CopyDrafter


def test_a_copied_span_goes_on() -> None:
    draft = after(DOCUMENT[10:20])
    assert draft.tokens == DOCUMENT[20:36]
    assert draft.parents == list(range(ROOT, 15))
    assert min(draft.probs) > 0.9


def test_the_first_token_of_an_answer_is_looked_for() -> None:
    prompt = [1, 7, 50, 51, 52, 7, 60, 61, 62, 2]
    assert {50, 60} <= set(after([7], prompt).tokens)


def test_nothing_is_drafted_for_an_answer_of_its_own() -> None:
    assert len(after([1, 2, 3, 4, 5])) == 0
    assert len(after([])) == 0


def test_nothing_is_drafted_beyond_the_prompt() -> None:
    assert after(DOCUMENT[80:98]).tokens == DOCUMENT[98:]
    assert len(after(DOCUMENT[80:])) == 0


@pytest.mark.parametrize(
    ("written", "back"),
    [
        ([1], 21),  # one token for one
        ([1], 22),  # one for two
        ([1, 2], 21),  # two for one
        ([1], 20),  # one inserted
    ],
)
def test_after_a_change_the_ways_back_are_drafted(written: list[int], back: int) -> None:
    draft = after([*DOCUMENT[:20], *written], nodes=48)  # with few nodes the likeliest way takes them all
    assert DOCUMENT[back] in [t for t, parent in zip(draft.tokens, draft.parents, strict=True) if parent == ROOT]


def test_one_token_for_one_is_the_likeliest_change() -> None:
    draft = after([*DOCUMENT[:20], 1])
    assert draft.tokens[0] == DOCUMENT[21]
    assert draft.probs[0] == max(c for c, parent in zip(draft.probs, draft.parents, strict=True) if parent == ROOT)
    assert accepted(draft, DOCUMENT[21:]) >= 4


@pytest.mark.parametrize("skipped", [1, 5, 30, 60])
def test_after_a_deletion_it_goes_on_behind_it(skipped: int) -> None:
    at = 20 + skipped
    assert after([*DOCUMENT[:20], *DOCUMENT[at : at + 2]]).tokens[:8] == DOCUMENT[at + 2 : at + 10]


@pytest.mark.parametrize("inserted", [1, 10, 60])
def test_after_an_insertion_it_goes_on(inserted: int) -> None:
    answer = [*DOCUMENT[:20], *range(1000, 1000 + inserted), *DOCUMENT[20:22]]
    assert after(answer).tokens[:1] == DOCUMENT[22:23]


def test_of_places_that_look_alike_the_next_one_is_taken() -> None:
    # the same three tokens before each of four different lines
    prompt = [t for line in range(4) for t in (7, 8, 9, 10 + line, 20 + line, 30 + line)]
    second = [*prompt[:7], 99, *prompt[8:9]]  # the first line and, changed, the start of the second
    assert after(second, prompt).tokens[:3] == [11, 21, 31]


def test_an_answer_that_copies_is_trusted_more() -> None:
    copying, writing = after([*DOCUMENT[:20], 1, *DOCUMENT[21:23]]), after([*range(1000, 1020), 1, *DOCUMENT[21:23]])
    assert copying.tokens[0] == writing.tokens[0] == DOCUMENT[23]
    assert copying.probs[0] > writing.probs[0]


def test_an_edited_document_takes_few_steps() -> None:
    answer = [*DOCUMENT[:30], 1, *DOCUMENT[31:60], 2, 3, *DOCUMENT[60:70], *DOCUMENT[75:]]
    # 97 tokens by at most 17 a step are 6; three changes and an uncertain start may cost two each
    assert steps(DOCUMENT, answer) <= 13
    assert steps(DOCUMENT, answer, nodes=32) < steps(DOCUMENT, answer, nodes=8)


@given(st.integers(0, 10_000))
def test_random_edits_are_followed(seed: int) -> None:
    rng = random.Random(seed)
    prompt = [rng.randrange(40) for _ in range(120)]
    answer = list(prompt)
    for _ in range(3):
        at = rng.randrange(len(answer) - 8)
        answer[at : at + rng.randrange(4)] = [rng.randrange(40, 60) for _ in range(rng.randrange(4))]
    assert steps(prompt, answer) <= 45  # 120 without drafts


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.lists(st.integers(0, 4), max_size=40), st.data())
def test_growing_gives_what_starting_anew_gives(prompt: list[int], answer: list[int], data: st.DataObject) -> None:
    grown, at = CopyDrafter(None), 0  # type: ignore[arg-type]
    while at < len(answer):
        at += data.draw(st.integers(1, 5))
        tokens = [*prompt, *answer[:at]]
        assert propose(grown, tokens, len(prompt)) == after(answer[:at], prompt)


def test_a_shorter_sequence_starts_anew_and_finish_forgets() -> None:
    drafter = CopyDrafter(None)  # type: ignore[arg-type]
    propose(drafter, [*DOCUMENT, *DOCUMENT[:9]], 100)
    other = list(range(300, 340))
    assert propose(drafter, [*other, *other[:5]], 40).tokens[0] == 305
    drafter.finish(0, other, 40)
    drafter.finish(1, other, 40)  # one it never saw
    assert not drafter._pointers


def test_the_pointer_tells_where_it_is() -> None:
    pointer = Pointer(DOCUMENT, 100)
    pointer.follow([*DOCUMENT, *DOCUMENT[10:20]])
    assert (pointer.next, pointer.run) == (20, 10)
    pointer.follow([*DOCUMENT, *DOCUMENT[10:20], 1])
    assert (pointer.next, pointer.anchor, pointer.off) == (-1, 20, 1)
    pointer.follow([*DOCUMENT, *DOCUMENT[10:20], 1, *DOCUMENT[21:24]])
    assert (pointer.next, pointer.run) == (24, 3)
