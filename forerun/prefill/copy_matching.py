"""Copy matching: spans of a prompt that its tail repeats (n-gram matches), and what follows them.

A question about a text quotes it, and an answer that copies continues where the quote ends. Drafted K/V is at its worst
just there: induction heads match tokens exactly, and a draft blurs what they match. The tokens themselves show such
places at no cost. Knows tokens; no model and no budget.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

NGRAM = 3  # tokens that must be the same
MAX_MATCHES = 8  # of one n-gram: one that is found more often points nowhere
SPAN_TOKENS = 24  # marked from the last token of a match on
CONTINUATION_TOKENS = 160  # marked after the place that matches the end of the prompt: an answer may continue there
MIN_SUFFIX_TOKENS = 4  # that such a place must share with the prompt's end
MAX_SUFFIX_TOKENS = 64  # compared to find the best such place
MAX_SUFFIX_PLACES = 512  # the latest ones
MAX_MARKED_SHARE = 0.1  # of the prompt


def copy_scores(tokens: Sequence[int] | np.ndarray, end: int) -> np.ndarray:
    """[len(tokens)] how many matches of the entries from `end` on mark each entry before it; most are 0."""
    ids = np.asarray(tokens, dtype=np.int64)
    marks = np.zeros(len(ids))
    if end < NGRAM or len(ids) - end < NGRAM:
        return marks
    found, which = _ngram_matches(ids, end)  # starts of what the tail repeats
    found = found[np.bincount(which)[which] <= MAX_MATCHES] if len(found) else found
    steps = np.zeros(len(ids) + 1)
    steps[found] += 1.0
    np.subtract.at(steps, np.minimum(found + NGRAM - 1 + SPAN_TOKENS, end), 1.0)
    marks += np.cumsum(steps)[:-1]
    last = _suffix_match(ids, end)
    if last is not None:
        marks[last + 1 : min(last + 1 + CONTINUATION_TOKENS, end)] += len(ids)  # before all others
    return _strongest(marks, max(1, int(MAX_MARKED_SHARE * end)))


def _ngram_matches(ids: np.ndarray, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Starts of the n-grams before `end` that come again after it, and which n-gram each is."""
    asked = np.lib.stride_tricks.sliding_window_view(ids[end - NGRAM + 1 :], NGRAM)
    found, words = np.arange(end - NGRAM + 1), ids[: end - NGRAM + 1]
    vocab = int(ids.max()) + 1
    for i in range(NGRAM):  # token by token: a table lookup costs much less than comparing all of them
        wanted = np.zeros(vocab, dtype=bool)
        wanted[asked[:, i]] = True
        found = found[wanted[words if i == 0 else ids[found + i]]]
    grams = np.unique(_packed(asked.T))
    text = _packed([ids[found + i] for i in range(NGRAM)])
    which = np.searchsorted(grams, text).clip(max=len(grams) - 1)
    same = grams[which] == text
    return found[same], which[same]


def _packed(words: Sequence[np.ndarray] | np.ndarray) -> np.ndarray:
    """[starts] one number for each n-gram; token ids are below 2 ** 21."""
    return np.bitwise_or.reduce([word << (21 * i) for i, word in enumerate(words)])


def _suffix_match(ids: np.ndarray, end: int) -> int | None:
    """Where the tokens that end the prompt are found before `end`, by their last one: the longest such place, of equals
    the latest."""
    found, length = np.flatnonzero(ids[:end] == ids[-1])[-MAX_SUFFIX_PLACES:], 1
    while length < MAX_SUFFIX_TOKENS:
        longer = found[found >= length]
        longer = longer[ids[longer - length] == ids[-1 - length]]
        if not len(longer):
            break
        found, length = longer, length + 1
    return int(found[-1]) if length >= MIN_SUFFIX_TOKENS else None


def top_mask(values: np.ndarray, count: int) -> np.ndarray:
    """[len(values)] which are the `count` largest, of equals the first ones; NaN comes last."""
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
