"""What the end of a prompt repeats: places in the text before it with the same words, and what follows them there.

Whoever asks about a text quotes it, and whoever copies from it goes on where the quote ends. Drafted K/V is at its
worst just there: a model finds the place by heads that match words exactly, and a draft blurs what they match. The
tokens themselves show it for nothing. Knows tokens; no model and no budget.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

WORDS = 3  # tokens that must be the same
RARE = 8  # what is found more often points nowhere
AFTER = 24  # tokens that a found place stands for, from its last one on
GOES_ON = 160  # the same for the place whose words end the prompt: an answer may go on from there
LONG = 4  # tokens that such a place must share with the prompt's end
LONGEST = 64  # tokens that are compared to find the best such place
TRIED = 512  # such places, the latest ones
MOST = 0.1  # share of the prompt that may be marked


def echoes(tokens: Sequence[int] | np.ndarray, end: int) -> np.ndarray:
    """[len(tokens)] how strongly each entry before `end` is pointed at by the entries from there on; most are 0."""
    ids = np.asarray(tokens, dtype=np.int64)
    marks = np.zeros(len(ids))
    if end < WORDS or len(ids) - end < WORDS:
        return marks
    grams = _grams(ids)
    text, asked = grams[: end - WORDS + 1], np.unique(grams[end - WORDS + 1 :])
    which = np.searchsorted(asked, text).clip(max=len(asked) - 1)
    found = np.flatnonzero(asked[which] == text)  # starts of what the tail repeats
    found = found[np.bincount(which[found], minlength=len(asked))[which[found]] <= RARE]
    steps = np.zeros(len(ids) + 1)
    steps[found] += 1.0
    np.subtract.at(steps, np.minimum(found + WORDS - 1 + AFTER, end), 1.0)
    marks += np.cumsum(steps)[:-1]
    last = _last(ids, end)
    if last is not None:
        marks[last + 1 : min(last + 1 + GOES_ON, end)] += len(ids)  # before all others
    return _strongest(marks, max(1, int(MOST * end)))


def _grams(ids: np.ndarray) -> np.ndarray:
    """[starts] one number for each WORDS tokens in a row; token ids are below 2 ** 21."""
    starts = len(ids) - WORDS + 1
    return np.bitwise_or.reduce([ids[i : starts + i] << (21 * i) for i in range(WORDS)])


def _last(ids: np.ndarray, end: int) -> int | None:
    """Where the tokens that end the prompt are found before `end`, by their last one: the longest such place, of equals
    the latest."""
    best, found = LONG - 1, None
    for at in np.flatnonzero(ids[:end] == ids[-1])[-TRIED:]:
        most = min(LONGEST, at + 1)
        differ = np.flatnonzero(ids[at - most + 1 : at + 1][::-1] != ids[len(ids) - most :][::-1])
        length = int(differ[0]) if len(differ) else most
        if length >= max(best, LONG):
            best, found = length, int(at)
    return found


def _strongest(marks: np.ndarray, count: int) -> np.ndarray:
    """At most `count` of them, of equals the first ones."""
    if np.count_nonzero(marks) <= count:
        return marks
    kept = np.argsort(-marks, kind="stable")[:count]
    only = np.zeros_like(marks)
    only[kept] = marks[kept]
    return only
