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


def copy_scores(tokens: Sequence[int] | np.ndarray, end: int) -> np.ndarray:
    """[len(tokens)] how strongly each entry before `end` is pointed at by the entries from there on; most are 0."""
    ids = np.asarray(tokens, dtype=np.int64)
    marks = np.zeros(len(ids))
    if end < WORDS or len(ids) - end < WORDS:
        return marks
    found, which = _quoted(ids, end)  # starts of what the tail repeats
    found = found[np.bincount(which)[which] <= RARE] if len(found) else found
    steps = np.zeros(len(ids) + 1)
    steps[found] += 1.0
    np.subtract.at(steps, np.minimum(found + WORDS - 1 + AFTER, end), 1.0)
    marks += np.cumsum(steps)[:-1]
    last = _last(ids, end)
    if last is not None:
        marks[last + 1 : min(last + 1 + GOES_ON, end)] += len(ids)  # before all others
    return _strongest(marks, max(1, int(MOST * end)))


def _quoted(ids: np.ndarray, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Starts of each WORDS tokens in a row before `end` that come again after it, and which of those they are."""
    asked = np.lib.stride_tricks.sliding_window_view(ids[end - WORDS + 1 :], WORDS)
    found, words = np.arange(end - WORDS + 1), ids[: end - WORDS + 1]
    vocab = int(ids.max()) + 1
    for i in range(WORDS):  # word by word: a look into a table costs much less than comparing all of them
        wanted = np.zeros(vocab, dtype=bool)
        wanted[asked[:, i]] = True
        found = found[wanted[words if i == 0 else ids[found + i]]]
    grams = np.unique(_packed(asked.T))
    text = _packed([ids[found + i] for i in range(WORDS)])
    which = np.searchsorted(grams, text).clip(max=len(grams) - 1)
    same = grams[which] == text
    return found[same], which[same]


def _packed(words: Sequence[np.ndarray] | np.ndarray) -> np.ndarray:
    """[starts] one number for each WORDS tokens in a row; token ids are below 2 ** 21."""
    return np.bitwise_or.reduce([word << (21 * i) for i, word in enumerate(words)])


def _last(ids: np.ndarray, end: int) -> int | None:
    """Where the tokens that end the prompt are found before `end`, by their last one: the longest such place, of equals
    the latest."""
    found, length = np.flatnonzero(ids[:end] == ids[-1])[-TRIED:], 1
    while length < LONGEST:
        longer = found[found >= length]
        longer = longer[ids[longer - length] == ids[-1 - length]]
        if not len(longer):
            break
        found, length = longer, length + 1
    return int(found[-1]) if length >= LONG else None


def top_mask(values: np.ndarray, count: int) -> np.ndarray:
    """[len(values)] which are the `count` largest, of equals the first ones; what is no number comes last."""
    taken = np.zeros(len(values), dtype=bool)
    if count <= 0 or count >= len(values):
        taken[:] = count > 0
        return taken
    least = np.partition(-values, count - 1)[count - 1]  # sorting all of them would take ten times as long
    if np.isnan(least):
        taken[np.argsort(-values, kind="stable")[:count]] = True
        return taken
    np.greater(values, -least, out=taken)
    taken[np.flatnonzero(values == -least)[: count - np.count_nonzero(taken)]] = True
    return taken


def _strongest(marks: np.ndarray, count: int) -> np.ndarray:
    """At most `count` of them, of equals the first ones."""
    return marks if np.count_nonzero(marks) <= count else np.where(top_mask(marks, count), marks, 0.0)
