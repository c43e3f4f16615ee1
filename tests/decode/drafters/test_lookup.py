"""Lookup: repetitions are continued, the longest match leads, and other continuations become branches."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from forerun.core import ROOT, Draft, SamplingParams
from forerun.decode.drafters.base import DraftRequest, registered
from forerun.decode.drafters.lookup import LookupDrafter, NgramIndex, grow_best_first
from forerun.decode.sampling import Context


def request(tokens: list[int], num_prompt: int = 1, *, id: int = 0, depth: int = 16, nodes: int = 16) -> DraftRequest:
    return DraftRequest(id, Context(SamplingParams(), tokens, num_prompt, 0), depth, nodes, array("i"))


def propose(drafter: LookupDrafter, tokens: list[int], **options: int) -> Draft:
    (draft,) = drafter.propose([request(tokens, **options)])
    assert draft.problem(1 << 20) is None
    assert set(draft.sources) <= {"lookup"}
    return draft


def first_path(draft: Draft) -> list[int]:
    """The tokens reached by following the first child."""
    children, node, path = draft.children(), ROOT, []
    while node in children:
        node = children[node][0]
        path.append(draft.tokens[node])
    return path


def lookup() -> LookupDrafter:
    return LookupDrafter(None)  # type: ignore[arg-type]


def test_it_has_its_name() -> None:
    assert registered()["lookup"] is LookupDrafter


def test_a_repeated_pair_is_continued() -> None:
    draft = propose(lookup(), [5, 6, 7, 8, 9, 1, 2, 5, 6], depth=3)
    assert first_path(draft) == [7, 8, 9]


def test_nothing_is_drafted_for_new_tokens() -> None:
    assert len(propose(lookup(), [1, 2, 3, 4])) == 0
    assert len(propose(lookup(), [1])) == 0


def test_the_longest_match_leads_and_others_branch() -> None:
    tokens = [1, 2, 3, 40, 9, 9, 8, 2, 3, 50, 7, 7, 1, 2, 3]
    draft = propose(lookup(), tokens)
    roots = [
        (token, prob)
        for token, parent, prob in zip(draft.tokens, draft.parents, draft.probs, strict=True)
        if parent == ROOT
    ]
    assert [token for token, _ in roots] == [40, 50]
    assert roots[0][1] > roots[1][1] > 0


def test_among_equal_matches_the_newest_leads() -> None:
    assert first_path(propose(lookup(), [1, 2, 40, 9, 1, 2, 50, 8, 1, 2], depth=1)) == [50]


def test_agreement_raises_and_dispute_lowers_the_chance() -> None:
    once = propose(lookup(), [0, 1, 2, 40, 9, 1, 2]).probs[0]
    agreed = propose(lookup(), [0, 1, 2, 40, 9, 1, 2, 40, 8, 1, 2]).probs[0]
    disputed = propose(lookup(), [0, 1, 2, 41, 9, 1, 2, 40, 8, 1, 2]).probs[0]
    assert disputed < once < agreed


def test_chances_grow_along_a_path_and_with_the_prompt() -> None:
    tokens = [*range(20), 90, 0, 1, 2]
    in_prompt, in_answer = propose(lookup(), tokens, num_prompt=21), propose(lookup(), tokens, num_prompt=1)
    assert in_prompt.probs == sorted(in_prompt.probs)
    assert in_prompt.probs[0] > in_answer.probs[0]


def test_a_cycle_goes_on_beyond_what_was_written() -> None:
    draft = propose(lookup(), [9, 1, 2, 3, 1, 2, 3, 1, 2, 3], depth=8)
    assert first_path(draft) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_limits_are_kept() -> None:
    tokens = [*range(50), *range(10)]
    assert max(propose(lookup(), tokens, depth=3).depths()) == 3
    assert len(propose(lookup(), tokens, nodes=5, depth=50)) == 5
    assert len(propose(lookup(), tokens, nodes=0)) == 0


def test_sequences_do_not_mix_and_finish_forgets() -> None:
    drafter = lookup()
    one, two = request([1, 2, 3, 1, 2], id=1), request([4, 5, 6, 4, 5], id=2)
    drafts = drafter.propose([one, two])
    assert [d.tokens[0] for d in drafts] == [3, 6]
    drafter.finish(1, one.tokens, 1)
    drafter.finish(3, [], 0)  # one it never saw
    assert list(drafter._indices) == [2]


def test_a_shorter_sequence_is_indexed_anew() -> None:
    drafter = lookup()
    propose(drafter, [1, 2, 3, 4, 1, 2])
    assert len(propose(drafter, [7, 1, 2])) == 0


@given(st.lists(st.integers(0, 4), min_size=2, max_size=60), st.lists(st.integers(1, 4), max_size=30))
def test_growing_gives_what_starting_anew_gives(tokens: list[int], steps: list[int]) -> None:
    grown, at = lookup(), 1
    for step in [1, *steps]:
        at += step
        some = tokens[:at]
        assert propose(grown, some) == propose(lookup(), some)


@given(st.lists(st.integers(0, 3), min_size=2, max_size=40))
def test_matches_are_real(tokens: list[int]) -> None:
    index = NgramIndex()
    index.extend(tokens, len(tokens) - 1)
    found = index.matches(tokens, tokens, len(tokens))
    for length, place in found:
        assert place < len(tokens)
        assert tokens[place - length : place] == tokens[len(tokens) - length :]
    assert bool(found) == (tokens[-1] in tokens[:-1])
    assert [length for length, _ in found] == sorted((length for length, _ in found), reverse=True)


def test_growth_is_best_first() -> None:
    tree = {"": [(1, 0.6, "a"), (2, 0.4, "b")], "a": [(3, 0.5, "")], "b": [(4, 0.9, "c")], "c": []}
    draft = grow_best_first("", lambda state: tree[state], request([0], nodes=4, depth=2), "x")
    # path probabilities: 1 has 0.6, 2 has 0.4, 4 after 2 has 0.36, 3 after 1 has 0.3
    assert draft.tokens == [1, 2, 4, 3]
    assert draft.parents == [ROOT, ROOT, 1, 0]
    assert draft.probs == [0.6, 0.4, 0.9, 0.5]
