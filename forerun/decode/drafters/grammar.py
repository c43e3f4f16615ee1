"""The grammar as a drafter: what must come next is drafted for free; and `prune`: what it forbids leaves other drafts.

A token is certain only where the grammar allows no other. Text that is certain is drafted in its usual spelling, which
the model may or may not use. Where only white space keeps text from being certain (between the words of JSON), the
spacing of the answer so far is taken to go on. All of these are guesses like any other: the masked target decides.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from forerun.core import ROOT, Draft
from forerun.decode.drafters.base import Drafter, DraftRequest, register
from forerun.decode.grammar import AnswerGrammar, DeadEnd, Vocabulary
from forerun.decode.sampling import Constraint
from forerun.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from forerun.decode.draft_context import DraftContext

SPELT = 0.97  # probability of a token of certain text in its usual spelling
LAST = 0.8  # of the last one, which may grow together with what follows
SPACED = 0.85  # of one that rests on a guess about white space
END = 0.95  # of the first among several tokens that end an answer
_SPACE = b" \t\n\r"
_LINES = re.compile(rb"\s*[{\[]\n([ \t]+)")  # how JSON begins that is written in lines; its indentation
_TOKEN_BYTES = 8  # text looked for per token that may be drafted
_LONG = 32  # bytes of a token
_BEFORE = 3  # tokens before a text whose spelling it continues


class Letters:
    """The tokens of a vocabulary by the bytes they are made of; control tokens are made of none."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        texts = list(vocabulary.tokens)
        for token in vocabulary.special_token_ids:
            texts[token] = b""
        self.byte_ids = {text[0]: i for i, text in enumerate(texts[: vocabulary.size]) if len(text) == 1}
        self._first = np.frombuffer(b"".join([text[:1] or b"\xff" for text in texts]), dtype=np.uint8)  # never UTF-8
        self._texts = frozenset(texts[: vocabulary.size])
        self._masks: dict[bytes, np.ndarray] = {}

    def beginning(self, first: bytes) -> np.ndarray:
        """Mask of the tokens whose first byte is one of these."""
        if first not in self._masks:
            self._masks[first] = self.vocabulary.mask(np.isin(self._first, list(first)))
        return self._masks[first]

    def one_token(self, text: bytes) -> bool:
        """Whether there is but one beginning of the text that is a token; very long tokens and doubles are not seen."""
        known = (length for length in range(1, min(len(text), _LONG) + 1) if text[:length] in self._texts)
        return next(known, None) is not None and next(known, None) is None


@register
class GrammarDrafter(Drafter):
    name = "grammar"

    def __init__(self, ctx: DraftContext | None = None) -> None:
        """Sequences bring their own grammars; nothing of the draft context is needed."""
        self._letters: Letters | None = None

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        drafts = []
        for request in requests:
            drafts.append(Draft())
            constraint = request.context.constraint
            if isinstance(constraint, AnswerGrammar):
                if self._letters is None or self._letters.vocabulary is not constraint.vocabulary:
                    self._letters = Letters(constraint.vocabulary)
                _grow(drafts[-1], constraint, self._letters, min(request.max_depth, request.max_nodes))
        return drafts


def prune(draft: Draft, constraint: Constraint | None) -> Draft:
    """The draft without the nodes that the grammar forbids and all that hangs on them. A draft that was drawn at random
    stays whole, or it would not be lossless any more: its drafter masks what it draws from."""
    if draft.proposals or not isinstance(constraint, AnswerGrammar):
        return draft
    kept: set[int] = set()
    for leaf in sorted(set(range(len(draft))) - set(draft.parents)):
        path = draft.path(leaf)
        kept.update(path[: constraint.accepts((), [draft.tokens[node] for node in path])])
    if len(kept) == len(draft):
        return draft
    pruned, places = Draft(), {ROOT: ROOT}
    for node in sorted(kept):
        parent = places[draft.parents[node]]
        places[node] = pruned.add(draft.tokens[node], parent, draft.probs[node], draft.sources[node])
    return pruned


def _grow(draft: Draft, constraint: AnswerGrammar, letters: Letters, limit: int) -> None:
    """One chain of likely text and certain tokens, until nothing is likely."""
    while len(draft) < limit:
        path, left = list(draft.tokens), limit - len(draft)
        if path and path[-1] in constraint.vocabulary.end_ids:
            return
        try:
            found = _spelt(constraint, letters, path, left) or _without_text(constraint, path, left)
        except DeadEnd:  # a request that gets there meets it again, and then it counts
            return
        for token, prob in found:
            draft.add(token, len(draft) - 1, prob, GrammarDrafter.name)
        if not found:
            return


def _without_text(constraint: AnswerGrammar, path: list[int], limit: int) -> list[tuple[int, float]]:
    """Where no text is likely: tokens without alternative (a control token, an only end), or one of several ends."""
    forced = constraint.forced(path, limit)
    if not forced and not (constraint.bits(path) & ~constraint.vocabulary.ends).any():
        return [(constraint.vocabulary.eos_token_id, END)]
    return [(token, 1.0) for token in forced]


def _spelt(constraint: AnswerGrammar, letters: Letters, path: list[int], limit: int) -> list[tuple[int, float]]:
    """The likely text after `path` in tokens, each with its probability."""
    text, guessed = _text(constraint, letters, path, limit * _TOKEN_BYTES)
    tokens = spell(constraint.vocabulary.tokenizer, [*constraint.tokens[-_BEFORE:], *path][-_BEFORE:], text)
    whole = len(tokens) <= limit and len(text) < limit * _TOKEN_BYTES
    tokens = tokens[: min(limit, constraint.accepts(path, tokens))]
    found, at = [], 0
    for i, token in enumerate(tokens):
        end = at + len(constraint.vocabulary.tokens[token])
        if any(at <= place < end for place in guessed):
            prob = SPACED
        elif letters.one_token(text[at:]) and constraint.forced([*path, *tokens[:i]], 1):
            prob = 1.0
        else:
            prob = LAST if whole and i == len(tokens) - 1 else SPELT
        found.append((token, prob))
        at = end
    return found


def _text(constraint: AnswerGrammar, letters: Letters, path: list[int], limit: int) -> tuple[bytes, list[int]]:
    """The text that is certain after `path` but for white space, and where in it white space was guessed. The grammar
    is followed byte by byte, in tokens of one byte, as nothing is known about the tokens yet."""
    text, guessed, probe = b"", [], list(path)
    while len(text) < limit:
        piece = constraint.certain_text(probe)[: limit - len(text)]
        if not piece:
            piece = _past_space(constraint, letters, probe)
            guessed.append(len(text))
        steps = [letters.byte_ids.get(byte, -1) for byte in piece]
        if not piece or -1 in steps or constraint.accepts(probe, steps) < len(steps):
            return text + (b"" if guessed and guessed[-1] == len(text) else piece), guessed
        text, probe = text + piece, probe + steps
    return text, guessed


def _past_space(constraint: AnswerGrammar, letters: Letters, path: list[int]) -> bytes:
    """White space and the one byte that may follow it, where white space or that byte are all that may come next."""
    vocabulary, spaces = constraint.vocabulary, letters.beginning(_SPACE)
    try:
        bits = constraint.bits(path)
    except DeadEnd:  # the text before it can still be of use
        return b""
    rest = bits & ~spaces
    if not (bits & spaces).any() or not rest.any() or (rest & vocabulary.ends).any():
        return b""
    at = int((rest != 0).argmax())
    first = vocabulary.tokens[at * 8 + (int(rest[at]) & -int(rest[at])).bit_length() - 1][:1]
    if (rest & ~letters.beginning(first)).any():
        return b""
    return _spacing(constraint.text + vocabulary.text(path), first) + first


def _spacing(written: bytes, following: bytes) -> bytes:
    """White space between an answer and what follows, less what is there already: JSON in lines is indented, else the
    same byte is followed by the same white space as before."""
    text = written.rstrip(_SPACE)
    before, space = text[-1:], b" " if text[-1:] in (b",", b":") else b""
    lines, earlier = _LINES.match(text), text.rfind(before, 0, -1) if before else -1
    if text in (b"{", b"["):
        space = b"\n  "  # what chat models write nearly always
    elif lines and (before in (b"{", b"[", b",") or following in (b"}", b"]")):
        space = _indented(text[text.rfind(b"\n") + 1 :], following, lines[1])
    elif earlier >= 0:
        after = text[earlier + 1 :]
        space = after[: len(after) - len(after.lstrip(_SPACE))]
    begun = written[len(text) :]
    return space[len(begun) :] if space.startswith(begun) else b""


def _indented(line: bytes, following: bytes, unit: bytes) -> bytes:
    """White space after this line of JSON, which may hold a whole list, or begin one that is not in lines."""
    indent = b"\n" + line[: len(line) - len(line.lstrip(_SPACE))]
    if line[-1:] in (b"{", b"["):
        return indent + unit
    if line.count(b"[") + line.count(b"{") > line.count(b"]") + line.count(b"}"):
        return b" " if line[-1:] == b"," else b""
    return indent.removesuffix(unit) if following in (b"}", b"]") else indent


def spell(tokenizer: Tokenizer, before: Sequence[int], text: bytes) -> list[int]:
    """The usual tokens of a text that follows other tokens: those of both together, where they part at the same place,
    else those of the text alone. Empty where a tokenizer writes it otherwise."""
    text = text.decode("utf-8", errors="ignore").encode()  # a character cut in two has no usual spelling
    starts = [b"".join(map(tokenizer.token_bytes, before)), b"", b"\n"]  # a line end: for those that add a first space
    for start in starts if text else []:
        try:
            ids = tokenizer.encode((start + text).decode("utf-8"))
        except UnicodeDecodeError:
            continue
        size, at = 0, len(ids)
        while at > 0 and size < len(text):
            at -= 1
            size += len(tokenizer.token_bytes(ids[at]))
        if b"".join(map(tokenizer.token_bytes, ids[at:])) == text and (start != b"" or at == 0):
            return ids[at:]
    return []
