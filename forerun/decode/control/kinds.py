"""What kind of prompt a request has: acceptance and answer lengths are learnt by it.

A few cheap features of the last tokens' text, computed for the prompt and once for an answer's first tokens (a question
in prose may be answered in code). Nothing here is fitted to any set of prompts; a wrong kind costs a little speed,
never an answer. Knows no drafter and no cost.
"""

from __future__ import annotations

from collections.abc import Sequence

from forerun.text.tokenizer import Tokenizer

READ_TOKENS = 96  # of the end: what is asked for stands there; decoding more takes longer than a kind is worth
LONG_PROMPT_TOKENS = 512  # from here a prompt is a document: answers quote it, and a draft model reads it for long
MIN_SYMBOL_SHARE = 0.06  # of the characters: brackets and operators in code; prose has less than 0.03
MIN_DIGIT_SHARE = 0.02
_SYMBOLS = frozenset("{}()[]<>=_;:#*/\\|&+\"'`$@")

KINDS = ("code", "long", "numbers", "text")


def kind_of(tokens: Sequence[int], tokenizer: Tokenizer | None) -> str:
    """One of KINDS."""
    text = "" if tokenizer is None else tokenizer.decode(list(tokens[-READ_TOKENS:]))
    size = max(1, len(text))
    if sum(map(_SYMBOLS.__contains__, text)) > MIN_SYMBOL_SHARE * size:
        return "code"
    if len(tokens) >= LONG_PROMPT_TOKENS:
        return "long"
    return "numbers" if sum(map(str.isdigit, text)) > MIN_DIGIT_SHARE * size else "text"
