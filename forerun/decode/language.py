"""Finite languages: all texts of a grammar that has few of them, as a trie of their usual tokens.

A text can be split into tokens in several ways, and a mask allows all of them. Here each text has one: the tokens that
the tokenizer gives it, which are the ones that models are trained on. So a text has one probability, and an enum or a
small JSON schema is a trie of a few dozen nodes. Knows no model.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from forerun.decode.drafters.grammar import spell
from forerun.decode.grammar import AnswerGrammar, DeadEnd, GrammarCompiler
from forerun.decode.trie import TokenTrie
from forerun.params import Grammar

MAX_TEXTS = 1024  # of a language that counts as finite: all are scored before the first token of an answer
MAX_PREFIXES = 8192  # beginnings of texts that are visited to find out; 0.1 ms each
_MAX_CACHED = 64


class Languages:
    """The tries of one tokenizer's grammars; from any thread."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler, self._lock = compiler, threading.Lock()
        self._tries: OrderedDict[Grammar, TokenTrie | None] = OrderedDict()

    def trie(self, grammar: Grammar) -> TokenTrie | None:
        """None where the language is infinite or has too many texts; named by the texts."""
        with self._lock:
            if grammar not in self._tries:
                texts = finite_texts(self._compiler.constraint(grammar))
                self._tries[grammar] = None if texts is None else self._build(texts)
                while len(self._tries) > _MAX_CACHED:
                    self._tries.popitem(last=False)
            return self._tries[grammar]

    def _build(self, texts: list[bytes]) -> TokenTrie | None:
        spelled = [spell(self._compiler.vocabulary.tokenizer, [], text) for text in texts]
        if not spelled or any(text and not ids for text, ids in zip(texts, spelled, strict=True)):
            return None  # a text that the tokenizer does not give back
        return TokenTrie.build(spelled, [text.decode() for text in texts])


def finite_texts(answer: AnswerGrammar) -> list[bytes] | None:
    """All texts of a grammar; None where there are more than `MAX_TEXTS`, or tokens without text among them."""
    vocabulary, found = answer.vocabulary, list[bytes]()
    control = frozenset(vocabulary.special_token_ids)
    pending: list[tuple[bytes, list[int]]] = [(b"", [])]
    seen = {b""}
    while pending:
        text, path = pending.pop()
        try:
            tokens = answer.allowed(path).nonzero()[:, 0].tolist()
        except DeadEnd:
            continue
        if len(seen) + len(tokens) > MAX_PREFIXES + len(vocabulary.end_ids):
            return None
        if not vocabulary.end_ids.isdisjoint(tokens):
            found.append(text)
        for token in tokens:
            if token in vocabulary.end_ids:
                continue
            longer = text + vocabulary.tokens[token]
            if token in control or len(found) > MAX_TEXTS:
                return None
            if longer not in seen:
                seen.add(longer)
                pending.append((longer, [*path, token]))
    return found if len(found) <= MAX_TEXTS else None
