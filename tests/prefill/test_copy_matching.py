"""Places that the end of a prompt repeats."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.prefill.choosers import (
    CONTINUATION_TOKENS,
    MAX_MARKED_SHARE,
    MAX_MATCHES,
    MAX_SUFFIX_TOKENS,
    MIN_SUFFIX_TOKENS,
    NGRAM_TOKENS,
    SPAN_TOKENS,
    copy_scores,
)

TEXT = list(range(1000, 4000))  # no token twice


def test_the_place_that_ends_the_prompt_goes_on() -> None:
    marks = copy_scores([*TEXT, 1, 2, 3, *TEXT[500:516]], len(TEXT))
    goes_on = np.arange(516, 516 + CONTINUATION_TOKENS)
    assert marks[goes_on].min() > marks[np.setdiff1d(np.arange(len(TEXT)), goes_on)].max()
    assert (marks[len(TEXT) :] == 0).all()


def test_a_quote_marks_itself_and_what_follows() -> None:
    marks = copy_scores([*TEXT, *TEXT[700:705], 9, 9], len(TEXT))
    assert set(np.flatnonzero(marks)) == set(range(700, 704 + SPAN_TOKENS))


def test_fewer_words_are_no_quote() -> None:
    assert not copy_scores([*TEXT, *TEXT[700 : 700 + NGRAM_TOKENS - 1], 9, 9, 9], len(TEXT)).any()


@pytest.mark.parametrize("times", [MAX_MATCHES, MAX_MATCHES + 1])
def test_what_is_everywhere_points_nowhere(times: int) -> None:
    text = [token for i in range(times) for token in (*TEXT[100 * i : 100 * i + 100], 1, 2, 3)]
    assert bool(copy_scores([*text, 1, 2, 3, 9], len(text)).any()) == (times <= MAX_MATCHES)


def test_of_two_places_the_longer_one_counts_and_of_equals_the_latest() -> None:
    text = [*TEXT[:900], 5, 6, 7, 8, 9, *TEXT[900:1800], 6, 7, 8, 9, *TEXT[1800:]]
    longer = copy_scores([*text, 1, 5, 6, 7, 8, 9], len(text))
    assert longer.argmax() == 905
    text = [*TEXT[:900], 6, 7, 8, 9, *TEXT[900:1800], 6, 7, 8, 9, *TEXT[1800:]]
    assert copy_scores([*text, 1, 6, 7, 8, 9], len(text)).argmax() == 900 + 4 + 900 + 4


@given(st.lists(st.integers(0, 3), min_size=10, max_size=300), st.integers(3, 40))
def test_places_are_those_of_comparing_everything(tokens: list[int], tail: int) -> None:
    end = max(NGRAM_TOKENS, len(tokens) - tail)
    grams = [tuple(tokens[i : i + NGRAM_TOKENS]) for i in range(len(tokens) - NGRAM_TOKENS + 1)]
    text, asked = grams[: end - NGRAM_TOKENS + 1], set(grams[end - NGRAM_TOKENS + 1 :])
    found = [i for i, gram in enumerate(text) if gram in asked and text.count(gram) <= MAX_MATCHES]
    expected = np.zeros(len(tokens))
    for i in found:
        expected[i : min(i + NGRAM_TOKENS - 1 + SPAN_TOKENS, end)] += 1
    best = max(((_shared(tokens, at), at) for at in range(end)), default=(0, 0))
    if best[0] >= MIN_SUFFIX_TOKENS:
        expected[best[1] + 1 : min(best[1] + 1 + CONTINUATION_TOKENS, end)] += len(tokens)
    kept = np.argsort(-expected, kind="stable")[: max(1, int(MAX_MARKED_SHARE * end))]
    marked = np.zeros(len(tokens))
    marked[kept] = expected[kept]
    assert (copy_scores(tokens, end) == marked).all()


def _shared(tokens: list[int], at: int) -> int:
    """Tokens up to `at` that are the prompt's last ones."""
    length = 0
    while length <= min(at, MAX_SUFFIX_TOKENS - 1) and tokens[at - length] == tokens[-1 - length]:
        length += 1
    return length


def test_no_more_than_a_share_is_marked() -> None:
    quotes = [token for i in range(0, 3000, 60) for token in TEXT[i : i + 4]]
    marks = copy_scores([*TEXT, *quotes, *TEXT[40:60]], len(TEXT))
    assert 0 < np.count_nonzero(marks) <= MAX_MARKED_SHARE * len(TEXT)
    assert marks[60 : 60 + CONTINUATION_TOKENS].all()  # the strongest are kept


@pytest.mark.parametrize(
    ("tokens", "end"), [([], 0), ([1], 1), ([1, 2, 3, 4], 1), ([1, 2, 3, 4, 5], 5), ([1] * 40, 30)]
)
def test_short_prompts(tokens: list[int], end: int) -> None:
    assert copy_scores(tokens, end).shape == (len(tokens),)


def test_a_long_prompt_takes_milliseconds() -> None:
    draw = np.random.default_rng(0)
    for tokens in (draw.integers(0, 50, 32_000).tolist(), [7] * 32_000):
        start = time.thread_time()
        copy_scores(tokens, 32_000 - 64)
        assert time.thread_time() - start < 0.5
