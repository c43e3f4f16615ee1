"""The grammar as a drafter: what must come next is drafted for free; and `prune`, which removes from other drafts what
the grammar forbids.

A token is certain only where the grammar allows no other. Text that is certain is drafted in its usual tokens, which
the model may or may not use. Where only white space keeps text from being certain (between the words of JSON), the
spacing of the answer so far is continued. In a trie all children of a level are drafted, each as probable as its share
of the items. All of these are drafts like any other: the masked target verifies them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from forerun.core import ROOT, Draft
from forerun.decode.drafters.base import Drafter, DraftRequest, register
from forerun.decode.drafters.lookup import grow_best_first
from forerun.decode.grammar import AnswerGrammar, DeadEnd, Vocabulary
from forerun.decode.sampling import Constraint
from forerun.decode.trie_answer import TrieAnswer
from forerun.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from forerun.decode.draft_context import DraftContext

SPELLED_PROB = 0.97  # of a token of certain text in its usual spelling
LAST_TOKEN_PROB = 0.8  # of the last one, which the model may join with what follows
SPACE_PROB = 0.85  # of one with assumed white space
END_PROB = 0.95  # of the first among several tokens that end an answer
_SPACE = b" \t\n\r"
_INDENTED_JSON = re.compile(rb"\s*[{\[]\n([ \t]+)")  # the beginning of JSON written in lines, with its indentation
_BYTES_PER_TOKEN = 8  # of certain text, searched per token that may be drafted
_MAX_TOKEN_BYTES = 32  # longer tokens are not considered
_CONTEXT_TOKENS = 3  # before a text, encoded together with it


class TokenBytes:
    """The tokens of a vocabulary by their bytes; control tokens have none."""

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
        """Whether exactly one prefix of the text is a token; very long tokens and duplicates are not considered."""
        known = (length for length in range(1, min(len(text), _MAX_TOKEN_BYTES) + 1) if text[:length] in self._texts)
        return next(known, None) is not None and next(known, None) is None


@register
class GrammarDrafter(Drafter):
    name = "grammar"

    def __init__(self, ctx: DraftContext | None = None) -> None:
        """Grammars come with the requests; nothing of the draft context is needed."""
        self._token_bytes: TokenBytes | None = None

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        drafts = []
        for request in requests:
            drafts.append(Draft())
            constraint = request.context.constraint
            if isinstance(constraint, TrieAnswer):
                node = constraint.node(())
                drafts[-1] = grow_best_first(node, constraint.likely_children, request, self.name)
            elif isinstance(constraint, AnswerGrammar):
                if self._token_bytes is None or self._token_bytes.vocabulary is not constraint.vocabulary:
                    self._token_bytes = TokenBytes(constraint.vocabulary)
                _grow(drafts[-1], constraint, self._token_bytes, min(request.max_depth, request.max_nodes))
        return drafts


def prune(draft: Draft, constraint: Constraint | None) -> Draft:
    """The draft without the nodes that the grammar forbids and their descendants. A sampled draft stays whole, or it
    would not be lossless any more: its drafter masks the distribution it samples from."""
    if draft.proposals or not isinstance(constraint, AnswerGrammar | TrieAnswer):
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


def _grow(draft: Draft, constraint: AnswerGrammar, token_bytes: TokenBytes, limit: int) -> None:
    """One chain of certain tokens and text, until nothing is certain."""
    while len(draft) < limit:
        path, left = list(draft.tokens), limit - len(draft)
        if path and path[-1] in constraint.vocabulary.end_ids:
            return
        try:
            found = _spelled(constraint, token_bytes, path, left) or _without_text(constraint, path, left)
        except DeadEnd:  # raised again when the answer itself gets there
            return
        for token, prob in found:
            draft.add(token, len(draft) - 1, prob, GrammarDrafter.name)
        if not found:
            return


def _without_text(constraint: AnswerGrammar, path: list[int], limit: int) -> list[tuple[int, float]]:
    """Where no text is certain: tokens without alternative (a control token, an only end), or one of several ends."""
    forced = constraint.forced(path, limit)
    if not forced and not (constraint.bits(path) & ~constraint.vocabulary.ends).any():
        return [(constraint.vocabulary.eos_token_id, END_PROB)]
    return [(token, 1.0) for token in forced]


def _spelled(
    constraint: AnswerGrammar, token_bytes: TokenBytes, path: list[int], limit: int
) -> list[tuple[int, float]]:
    """The certain text after `path` in tokens, each with its probability."""
    text, assumed = _text(constraint, token_bytes, path, limit * _BYTES_PER_TOKEN)
    before = [*constraint.tokens[-_CONTEXT_TOKENS:], *path][-_CONTEXT_TOKENS:]
    tokens = spell(constraint.vocabulary.tokenizer, before, text)
    whole = len(tokens) <= limit and len(text) < limit * _BYTES_PER_TOKEN
    tokens = tokens[: min(limit, constraint.accepts(path, tokens))]
    found, at = [], 0
    for i, token in enumerate(tokens):
        end = at + len(constraint.vocabulary.tokens[token])
        if any(at <= place < end for place in assumed):
            prob = SPACE_PROB
        elif token_bytes.one_token(text[at:]) and constraint.forced([*path, *tokens[:i]], 1):
            prob = 1.0
        else:
            prob = LAST_TOKEN_PROB if whole and i == len(tokens) - 1 else SPELLED_PROB
        found.append((token, prob))
        at = end
    return found


def _text(constraint: AnswerGrammar, token_bytes: TokenBytes, path: list[int], limit: int) -> tuple[bytes, list[int]]:
    """The text that is certain after `path` except for white space, and the offsets where white space was assumed. The
    grammar is advanced byte by byte, in tokens of one byte, as the tokens are not known yet."""
    text, assumed, probe = b"", [], list(path)
    while len(text) < limit:
        piece = constraint.certain_text(probe)[: limit - len(text)]
        if not piece:
            piece = _past_space(constraint, token_bytes, probe)
            assumed.append(len(text))
        steps = [token_bytes.byte_ids.get(byte, -1) for byte in piece]
        if not piece or -1 in steps or constraint.accepts(probe, steps) < len(steps):
            return text + (b"" if assumed and assumed[-1] == len(text) else piece), assumed
        text, probe = text + piece, probe + steps
    return text, assumed


def _past_space(constraint: AnswerGrammar, token_bytes: TokenBytes, path: list[int]) -> bytes:
    """White space and the one byte that may follow it, where white space or that byte are all that may come next."""
    vocabulary, spaces = constraint.vocabulary, token_bytes.beginning(_SPACE)
    try:
        bits = constraint.bits(path)
    except DeadEnd:  # the text before it may still be drafted
        return b""
    rest = bits & ~spaces
    if not (bits & spaces).any() or not rest.any() or (rest & vocabulary.ends).any():
        return b""
    at = int((rest != 0).argmax())
    first = vocabulary.tokens[at * 8 + (int(rest[at]) & -int(rest[at])).bit_length() - 1][:1]
    if (rest & ~token_bytes.beginning(first)).any():
        return b""
    return _spacing(constraint.text + vocabulary.text(path), first) + first


def _spacing(written: bytes, following: bytes) -> bytes:
    """White space between an answer and what follows, less what is there already: JSON in lines is indented, else the
    same byte is followed by the same white space as before."""
    text = written.rstrip(_SPACE)
    before, space = text[-1:], b" " if text[-1:] in (b",", b":") else b""
    lines, earlier = _INDENTED_JSON.match(text), text.rfind(before, 0, -1) if before else -1
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
    """The usual tokens of a text that follows other tokens: those of both together, where a token starts with the text,
    else those of the text alone. Empty where the tokenizer changes the text."""
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
