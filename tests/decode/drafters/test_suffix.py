"""Suffix drafting: the automaton counts what a search would count, requests share it, and it stays bounded."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from forerun.core import ROOT, Draft, SamplingParams
from forerun.decode.drafters.base import DraftRequest, registered
from forerun.decode.drafters.suffix import _MAX_READ_TOKENS, Automaton, SuffixDrafter
from forerun.decode.sampling import Context

Strings = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=4)


def suffix(**options: int) -> SuffixDrafter:
    return SuffixDrafter(None, **options)  # type: ignore[arg-type]


def request(tokens: list[int], id: int = 0, *, depth: int = 16, nodes: int = 16) -> DraftRequest:
    return DraftRequest(id, Context(SamplingParams(), tokens, 1, 0), depth, nodes, array("i"))


def propose(drafter: SuffixDrafter, tokens: list[int], id: int = 0, **options: int) -> Draft:
    (draft,) = drafter.propose([request(tokens, id, **options)])
    assert draft.problem(1 << 20) is None
    return draft


def interleaved(strings: list[list[int]]) -> Automaton:
    """All strings, a token of each in turn, as requests of one batch come."""
    automaton, lasts = Automaton(), [0] * len(strings)
    for at in range(max(map(len, strings))):
        for i, string in enumerate(strings):
            if at < len(string):
                lasts[i] = automaton.extend(lasts[i], string[at])
                assert automaton.length[lasts[i]] == at + 1
    return automaton


def state_of(automaton: Automaton, word: list[int]) -> int:
    state = 0
    for token in word:
        state = automaton.step(state, token)
        if state < 0:
            break
    return state


def occurrences(strings: list[list[int]], word: list[int]) -> int:
    size = len(word)
    return sum(string[i : i + size] == word for string in strings for i in range(len(string) - size + 1))


def test_it_has_its_name() -> None:
    assert registered()["suffix"] is SuffixDrafter


@given(Strings, st.lists(st.integers(0, 2), min_size=1, max_size=5))
def test_the_automaton_counts_every_word(strings: list[list[int]], word: list[int]) -> None:
    automaton = interleaved(strings)
    seen = [string[i:j] for string in strings for i in range(len(string)) for j in range(i + 1, len(string) + 1)]
    for some in [word, *seen]:
        state, expected = state_of(automaton, some), occurrences(strings, some)
        assert (automaton.count[state] if state >= 0 else 0) == expected


@given(Strings, st.lists(st.integers(0, 2), min_size=1, max_size=10))
def test_find_gives_the_longest_end_that_occurs(strings: list[list[int]], tokens: list[int]) -> None:
    automaton = interleaved(strings)
    state, length = automaton.find(tokens)
    longest = max(n for n in range(len(tokens) + 1) if n == 0 or occurrences(strings, tokens[len(tokens) - n :]))
    assert length == longest
    assert state == state_of(automaton, tokens[len(tokens) - length :])


@given(Strings)
def test_what_follows_is_counted(strings: list[list[int]]) -> None:
    automaton = interleaved(strings)
    for word in ([0], [1, 0], [2, 2]):
        state = state_of(automaton, word)
        after = {token: count for count, token, _ in automaton.after(state)} if state >= 0 else {}
        assert after == {t: n for t in range(3) if (n := occurrences(strings, [*word, t]))}


def test_states_stay_below_twice_the_tokens() -> None:
    automaton, last = Automaton(), 0
    for i in range(3000):
        last = automaton.extend(last, (i * i) % 17 + i % 5)
    assert len(automaton) <= 2 * 3000


def test_a_request_finds_its_own_text() -> None:
    assert propose(suffix(), [5, 6, 7, 8, 9, 5, 6], depth=3).tokens == [7, 8, 9]


def test_a_request_finds_the_text_of_others() -> None:
    drafter = suffix()
    propose(drafter, [1, 2, 3, 4], id=1)
    assert propose(drafter, [9, 2, 3], id=2).tokens == [4]  # still running
    drafter.finish(1, [1, 2, 3, 4, 5], 1)
    assert propose(drafter, [9, 8, 2, 3], id=3).tokens == [4, 5]  # with what came after its last ask


def test_a_sequence_that_was_never_asked_for_is_learnt_when_it_ends() -> None:
    drafter = suffix()
    drafter.finish(7, [1, 2, 3, 4], 2)
    assert propose(drafter, [9, 2, 3]).tokens == [4]


def test_branches_are_ranked_by_their_counts() -> None:
    drafter = suffix()
    for id, following in enumerate((40, 50, 50, 50)):
        drafter.finish(id, [1, 2, 3, following], 1)
    draft = propose(drafter, [8, 1, 2, 3], id=9)
    assert draft.tokens == [50, 40]
    assert draft.parents == [ROOT, ROOT]
    assert draft.probs[0] == 3 * draft.probs[1] > 0


def test_longer_matches_and_more_evidence_raise_the_chance() -> None:
    one, two = suffix(), suffix()
    one.finish(0, [1, 2, 3, 4, 5], 1)
    two.finish(0, [1, 2, 3, 4, 5], 1)
    two.finish(1, [9, 2, 3, 4, 5], 1)
    short = propose(one, [7, 3], id=5).probs[0]
    longer = propose(one, [6, 2, 3], id=6).probs[0]
    assert short < longer < propose(two, [6, 2, 3], id=6).probs[0]


def test_limits_are_kept() -> None:
    drafter = suffix()
    drafter.finish(0, list(range(60)), 1)
    assert propose(drafter, [70, 0, 1], id=1, depth=3).tokens == [2, 3, 4]
    assert len(propose(drafter, [70, 0, 1], id=2, nodes=5, depth=50)) == 5
    assert len(propose(drafter, [70, 0, 1], id=3, nodes=0)) == 0


def test_the_oldest_is_forgotten_and_memory_bounded() -> None:
    drafter = suffix(max_states=400)
    drafter.finish(0, [1, 2, 3, 4], 1)
    for id in range(1, 40):
        drafter.finish(id, [1000 + 50 * id + i for i in range(50)], 1)
        assert len(drafter._young) + len(drafter._old) <= 400 + 2 * _MAX_READ_TOKENS
        last = 1000 + 50 * id
        assert propose(drafter, [7, last + 1, last + 2], id=100 + id).tokens[:2] == [last + 3, last + 4]
        drafter.finish(100 + id, [], 1)
    assert len(propose(drafter, [9, 2, 3], id=999)) == 0


def test_a_running_request_survives_a_change_of_generation() -> None:
    drafter, tokens = suffix(max_states=100), [1, 2, 3, 4, 5]
    propose(drafter, tokens, id=1)
    drafter.finish(2, list(range(500, 580)), 1)  # fills the young generation
    drafter.finish(3, [900, 901], 1)  # and this one starts another
    tokens += [6, 2, 3]
    assert propose(drafter, tokens, id=1).tokens[:2] == [4, 5]  # from the old one
    tokens += [4, 5, 6, 2, 3]
    assert propose(drafter, tokens, id=1).tokens[:1] == [4]


def test_a_long_prompt_is_taken_in_over_several_steps() -> None:
    drafter, tokens = suffix(), [*range(3 * _MAX_READ_TOKENS), 10, 11]
    assert propose(drafter, tokens, depth=2).tokens == [12, 13]  # already in the first piece
    late = [*tokens, 2 * _MAX_READ_TOKENS + 5, 2 * _MAX_READ_TOKENS + 6]
    assert propose(drafter, late, depth=2).tokens == []  # not there yet
    for _ in range(3):
        draft = propose(drafter, late, depth=2)
    assert draft.tokens == [2 * _MAX_READ_TOKENS + 7, 2 * _MAX_READ_TOKENS + 8]


def test_a_shorter_sequence_starts_anew() -> None:
    drafter = suffix()
    propose(drafter, [1, 2, 3, 4, 5, 6])
    assert propose(drafter, [1, 2, 3]).tokens[:1] == [4]
    assert drafter._sequences[0].size == 3


def test_finish_drops_the_state() -> None:
    drafter = suffix()
    propose(drafter, [1, 2, 3])
    drafter.finish(0, [1, 2, 3], 1)
    assert not drafter._sequences


def test_a_dispute_takes_from_all_sides() -> None:
    """Where continuations differ, a new one is likelier too: the probabilities sum to less than with one
    continuation."""
    agreed, disputed = suffix(), suffix()
    for id, following in enumerate((40, 40, 50, 50)):
        agreed.finish(id, [1, 2, 3, 40], 1)
        disputed.finish(id, [1, 2, 3, following], 1)
    one, two = propose(agreed, [8, 1, 2, 3], id=9, depth=1), propose(disputed, [8, 1, 2, 3], id=9, depth=1)
    assert len(one) == 1 and len(two) == 2
    assert sum(two.probs) < 0.7 * sum(one.probs)
