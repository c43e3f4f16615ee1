"""Text between two tokenizers: a target's tokens as a draft model's, and drafted text as the target's tokens again.

Works on bytes, because tokens of either side may end in the middle of a character. Control tokens of the same name are
translated into each other; others are left out of the draft model's input. Knows no model.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from forerun.text.tokenizer import Tokenizer

REENCODED_CHARS = 96  # at the end of a text: they may be encoded otherwise when more follows
REENCODED_TOKENS = 4  # before drafted text: encoded together with it, to be cut as the model would


class Transcript:
    """A growing list of target tokens as the draft model's tokens. Those far from the end never change again."""

    def __init__(self, target: Tokenizer, draft: Tokenizer) -> None:
        self._target, self._draft = target, draft
        self.ids: list[int] = [draft.bos_id] if draft.add_bos and draft.bos_id is not None else []
        self._read = 0  # target tokens read so far
        self.fixed = len(self.ids)  # ids that stay
        self._open = ""  # the text after them
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    @property
    def rest(self) -> bytes:
        """The first bytes of an incomplete character, which no id encodes yet."""
        return self._utf8.getstate()[0]

    def follow(self, tokens: list[int]) -> None:
        """Read the tokens that are new."""
        new = tokens[self._read :]
        self._read = len(tokens)
        for token in new:
            if token in self._target.special_ids:
                self._open += self._utf8.decode(b"", final=True)
                self._encode()
                other = counterpart(token, self._target, self._draft)
                self.ids += [] if other is None else [other]
                self.fixed, self._open = len(self.ids), ""
            else:
                self._open += self._utf8.decode(self._target.token_bytes(token))
        if new:
            self._encode()
            self._fix_prefix()

    def _encode(self) -> None:
        self.ids[self.fixed :] = self._draft.encode(self._open) if self._open else []

    def _fix_prefix(self) -> None:
        """Fix the ids far from the end, up to the beginning of a word: there encoding may start anew."""
        if len(self._open) < 2 * REENCODED_CHARS:
            return
        data, parts = self._open.encode(), [self._draft.token_bytes(i) for i in self.ids[self.fixed :]]
        if b"".join(parts) != data:  # the tokenizer normalises text, so byte offsets do not match
            return
        at, cut = 0, (0, 0)
        for n, part in enumerate(parts):
            if len(data) - at < REENCODED_CHARS:
                break
            if at and part[:1] == b" " and part[1:2].isalpha() and not data[at - 1 : at].isspace():
                cut = (n, at)
            at += len(part)
        self.fixed += cut[0]
        self._open = data[cut[1] :].decode()


def counterpart(token: int, tokenizer: Tokenizer, other: Tokenizer) -> int | None:
    """The other tokenizer's control token of the same name, if it has one."""
    name = tokenizer.backend.id_to_token(token)
    found = other.backend.token_to_id(name) if name else None
    return found if found in other.special_ids else None


def retokenise(tokenizer: Tokenizer, tokens: list[int], more: bytes) -> list[int]:
    """Tokens that continue `tokens` by exactly the text `more`, or by a part of it; [] where there are none.

    Encoded together with the last tokens, so that it is cut as the model would cut it. Where that would join the last
    token with what follows, that token stands, and the rest is encoded by itself.
    """
    before = _last_bytes(tokenizer, tokens)
    ids = _tokens_after(tokenizer, before, more) or _encoded(tokenizer, more)
    kept, at = [], 0
    for token in ids:
        part = tokenizer.token_bytes(token)
        if not part or token in tokenizer.special_ids or more[at : at + len(part)] != part:
            break  # normalised: this would not be the text that was drafted
        kept.append(token)
        at += len(part)
    return kept


def _last_bytes(tokenizer: Tokenizer, tokens: list[int]) -> bytes:
    """The last few tokens' bytes, from the beginning of a character and after any control token."""
    data = b""
    for n, token in enumerate(reversed(tokens)):
        if token in tokenizer.special_ids or (
            n >= REENCODED_TOKENS and (n >= 2 * REENCODED_TOKENS or not _starts_inside_character(data))
        ):
            break
        data = tokenizer.token_bytes(token) + data
    return data


def _starts_inside_character(data: bytes) -> bool:
    """Whether it starts in the middle of a character."""
    return bool(data) and data[0] & 0xC0 == 0x80


def _tokens_after(tokenizer: Tokenizer, before: bytes, more: bytes) -> list[int]:
    """Tokens of `before + more` that start where `more` does; [] where no token starts there."""
    ids, at = _encoded(tokenizer, before + more), 0
    first = tokenizer.token_bytes(ids[0]) if ids else b""
    if first[:1] == b" " and before[:1] != b" ":
        at = -1  # a space that the tokenizer puts before every text
    for n, token in enumerate(ids):
        if at == len(before):
            return ids[n:]
        at += len(tokenizer.token_bytes(token))
    return []


def _encoded(tokenizer: Tokenizer, data: bytes) -> list[int]:
    try:
        return tokenizer.encode(data.decode())
    except UnicodeDecodeError:
        return []


def whole_characters(data: bytes) -> bytes:
    """`data` without the beginning of a character at its end."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(data)
    return data[: len(data) - len(decoder.getstate()[0])]


def split_probs(parts: Iterable[tuple[int, float]], lengths: Iterable[int]) -> list[float]:
    """Probabilities of tokens of these byte lengths over a text drafted in parts of (bytes, probability) each: a token
    that covers half of a part has the square root of its probability."""
    source = iter(parts)
    left, rate = 0, 1.0  # bytes of the current part that are not used up, and its probability per byte
    found = []
    for length in lengths:
        prob = 1.0
        while length:
            if not left:
                left, whole = next(source)
                rate = whole ** (1.0 / left)
            used = min(left, length)
            prob *= rate**used
            left, length = left - used, length - used
        found.append(min(1.0, prob))
    return found
