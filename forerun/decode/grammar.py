"""Grammars: which tokens may come next, so that an answer is JSON of a schema, matches a regex or follows Lark rules.

llguidance parses; this module connects it to the tokenizer, turns its messages into errors with hints, and serves a
whole draft tree with one parser that is advanced and rolled back. Exactness: every token whose bytes the grammar allows
is allowed, also where the text to come is certain, because text can be split into tokens in several ways and the masked
model has probabilities for all of them (llguidance on its own would mask all but the usual tokens there). Knows no
model, no drafter and no engine. `compile` may be called from any thread, everything else only from the engine's.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from forerun.decode.json_schema import parse_schema
from forerun.errors import BadRequest, ForerunError
from forerun.params import Grammar
from forerun.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_SOURCE_CHARS = 1_000_000
_MAX_CACHED_GRAMMARS = 64  # compiled ones
_MAX_CACHED_MASKS = 16  # of one answer: nodes of a draft are visited several times
_MAX_CERTAIN_BYTES = 1 << 16  # of certain text, kept from step to step
# At the end of the grammar, where it overrides the grammar's own options and keeps the line numbers of errors
_ALL_TOKENIZATIONS = '\n%llguidance {"no_forcing": true}\n'
# What one grammar may cost: half of llguidance's own limits or less, as all open answers wait for a mask. Of 12
# grammars made to be slow, those that pass took 20 ms for a mask and 0.2 s to compile at most, on one core
_LIMITS = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
# How JSON is spaced where its texts are counted: with free white space even an enum has texts without end
ONE_SPACING = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
ANY_OBJECT = '{"type": "object"}'
_NAMES = {"json_schema": "JSON schema", "json_object": "JSON", "regex": "regex", "lark": "Lark"}
_HINTS = {
    "json_schema": "see llguidance's list of supported JSON Schema keywords, and test the schema alone",
    "regex": "write it in Rust's regex syntax: no look-around, no back-references, no anchors",
    "lark": "see llguidance's Lark syntax; the first rule is called start",
}


def _llguidance() -> Any:
    """Imported with the first grammar: everything else works without it."""
    try:
        import llguidance
    except ImportError:
        raise BadRequest("grammars need llguidance, which is not installed here", "pip install llguidance") from None
    return llguidance


class DeadEnd(ForerunError):
    """A grammar reached a state where no token of the vocabulary may follow and the answer may not end either, or that
    costs the parser more than it may."""


class Vocabulary:
    """The tokens as llguidance needs them. Masks have eight tokens a byte, the first in the lowest bit."""

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self.tokenizer, self.size = tokenizer, size
        self.end_ids = frozenset(i for i in tokenizer.eos_ids if 0 <= i < size)
        if not self.end_ids:
            raise BadRequest(f"{tokenizer.source} names no token that ends an answer", "use no grammar with it")
        padded = max(size, tokenizer.vocab_size)
        self.eos_token_id, self.bos_token_id = next(i for i in tokenizer.eos_ids if i in self.end_ids), tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(i) for i in range(padded)]  # as in the text that is returned
        self.special_token_ids = sorted(tokenizer.special_ids | self.end_ids)
        ll = _llguidance()
        self.backend: LLTokenizer = ll.LLTokenizer(ll.TokenizerWrapper(self), eos_token=sorted(self.end_ids))
        ids = np.arange(padded)
        self.ends = self.mask(np.isin(ids, list(self.end_ids)))
        named = np.array([text != b"" for text in self.tokens])
        self.others = self.mask(named & (ids < size)) & ~self.ends

    def __call__(self, text: str) -> list[int]:
        """Required by llguidance; with all tokenizations allowed nothing depends on it."""
        return self.tokenizer.encode(text)

    def mask(self, flags: np.ndarray) -> np.ndarray:
        """From one flag per token."""
        padding = np.zeros(-len(flags) % 32, dtype=bool)
        return np.packbits(np.concatenate([flags, padding]), bitorder="little")

    def text(self, tokens: Sequence[int]) -> bytes:
        return b"".join(self.tokens[token] for token in tokens)


class GrammarCompiler:
    """Grammars for one tokenizer. `vocab_size` is the model's, often larger than the tokenizer's."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._vocabulary: Vocabulary | None = None
        self._parsers: OrderedDict[Grammar, LLMatcher] = OrderedDict()  # never advanced, only copied
        self._lock = threading.Lock()

    @property
    def vocabulary(self) -> Vocabulary:
        """Made with the first grammar: it takes a moment, and most requests have none."""
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(self._tokenizer, self._vocab_size)
            return self._vocabulary

    def compile(self, grammar: Grammar) -> None:
        """Raise BadRequest unless the grammar can be used with this tokenizer."""
        self.parser(grammar)

    def constraint(self, grammar: Grammar) -> AnswerGrammar:
        return AnswerGrammar(grammar, self.parser(grammar), self.vocabulary)

    def parser(self, grammar: Grammar) -> LLMatcher:
        """Never advanced, only copied."""
        with self._lock:
            if grammar in self._parsers:
                self._parsers.move_to_end(grammar)
                return self._parsers[grammar]
        vocabulary = self.vocabulary
        parser = _parse(grammar, vocabulary.backend)
        _check_start(AnswerGrammar(grammar, parser, vocabulary))
        with self._lock:
            self._parsers[grammar] = parser
            while len(self._parsers) > _MAX_CACHED_GRAMMARS:
                self._parsers.popitem(last=False)
        return parser


class AnswerGrammar:
    """A grammar and how far one answer has got in it; a `Constraint`. Paths are tokens after the answer so far."""

    def __init__(self, grammar: Grammar, parser: LLMatcher, vocabulary: Vocabulary) -> None:
        self.grammar, self.vocabulary = grammar, vocabulary
        self.tokens: list[int] = []  # the answer so far
        self.text = b""
        self._start = parser
        self._parser = parser.deep_copy()  # stands after `tokens` (up to an end) and `_path`
        self._path: list[int] = []
        self._bits: dict[tuple[int, ...], np.ndarray] = {}
        self._certain = b""  # known to follow `tokens`
        self._limit = ""  # the parser's message, where one of its limits stopped it

    def allowed(self, path: Sequence[int]) -> Tensor:
        """[V] bool. After an end only ends are; after a path that the grammar forbids it has no meaning."""
        bits = np.unpackbits(self.bits(path), count=self.vocabulary.size, bitorder="little")
        return torch.from_numpy(bits).view(torch.bool)

    def bits(self, path: Sequence[int]) -> np.ndarray:
        """`allowed` as a mask of the vocabulary; must not be changed."""
        key = tuple(path)
        if key not in self._bits:
            self._bits[key] = self._compute(path)
            if len(self._bits) > _MAX_CACHED_MASKS:
                del self._bits[next(iter(self._bits))]
        return self._bits[key]

    def _compute(self, path: Sequence[int]) -> np.ndarray:
        steps, ended = self._go(path)
        if ended or steps < len(path):
            return self.vocabulary.ends
        others = self.vocabulary.others
        bits = np.frombuffer(self._parser.compute_bitmask(), dtype=np.uint8, count=len(others)) & others
        error, may_end = self._parser.get_error(), self._parser.is_accepting()
        if error or not (may_end or bits.any()):
            self._rebuild()  # after an error the parser's mask allows an end, which the grammar does not
            raise self._dead_end(len(path), error.split("\n")[0] or "NoExtension")
        return bits | self.vocabulary.ends if may_end else bits

    def advance(self, tokens: Sequence[int]) -> None:
        """Append tokens to the answer."""
        steps, _ = self._go(tokens)
        if steps < len(tokens) and self._limit:
            raise self._dead_end(steps, self._limit)
        if steps < len(tokens):
            raise ForerunError(
                f"token {tokens[steps]} at position {len(self.tokens) + steps} of an answer is not in its "
                f"{_NAMES[self.grammar.kind]} grammar",
                "report this as a bug: a forbidden token was chosen",
            )
        text = self.vocabulary.text(tokens)
        self._certain = self._certain[len(text) :] if self._certain.startswith(text) else b""
        self.text += text
        self.tokens += tokens
        self._path = []
        self._bits.clear()

    def accepts(self, path: Sequence[int], tokens: Sequence[int]) -> int:
        """How many of the tokens, in their order, may follow `path`."""
        return max(0, self._go([*path, *tokens])[0] - len(path))

    def forced(self, path: Sequence[int], limit: int) -> list[int]:
        """Tokens that follow `path` with certainty: each is the only one that the grammar allows there."""
        found: list[int] = []
        while len(found) < limit and self.vocabulary.end_ids.isdisjoint(found):
            here = [*path, *found]
            if np.count_nonzero(self.bits(here)) > 1 or len(fits := self.allowed(here).nonzero()) > 1:
                break
            found.append(int(fits))
        return found

    def certain_text(self, path: Sequence[int]) -> bytes:
        """Bytes that follow `path` with certainty. Their tokens are not certain: text can be split in several ways."""
        text = self.vocabulary.text(path)
        if len(self._certain) > len(text) and self._certain.startswith(text):
            return self._certain[len(text) :]
        steps, ended = self._go(path)
        if ended or steps < len(path):
            return b""
        # On a copy: the call advances the parser, and past a control token it cannot be rolled back
        found = self._parser.deep_copy().compute_ff_bytes()
        found = found.split(b"\xff", 1)[0][:_MAX_CERTAIN_BYTES]  # 0xff: a control token follows
        if not path:
            self._certain = found
        return found

    @property
    def finished(self) -> bool:
        """Whether nothing but an end may follow."""
        return not (self.bits(()) & ~self.vocabulary.ends).any()

    def fork(self) -> AnswerGrammar:
        """Another answer that begins with the same tokens."""
        other = AnswerGrammar(self.grammar, self._start, self.vocabulary)
        other.advance(self.tokens)
        return other

    def _go(self, path: Sequence[int]) -> tuple[int, bool]:
        """Move the parser along `path` as far as the grammar goes: tokens that fit, and whether they end the answer.
        Ends are not given to the parser, which takes just one."""
        ends, self._limit = self.vocabulary.end_ids, ""
        if self.tokens and self.tokens[-1] in ends:
            return next((i for i, token in enumerate(path) if token not in ends), len(path)), True
        body = next((i for i, token in enumerate(path) if token in ends), len(path))
        same = 0
        while same < min(len(self._path), body) and self._path[same] == path[same]:
            same += 1
        back, self._path = len(self._path) - same, self._path[:same]
        if back and not self._parser.rollback(back):  # some rules (max_tokens, stop) cannot be rolled back
            self._rebuild()
        wanted = list(path[len(self._path) : body])
        steps = self._parser.try_consume_tokens(wanted) if wanted else 0
        self._path += wanted[:steps]
        if steps < len(wanted) and self._parser.is_error():
            self._limit = self._parser.get_error().split("\n")[0]
            self._rebuild()
        if len(self._path) < body or body == len(path) or not self._parser.is_accepting():
            return len(self._path), False
        after = next((i for i, token in enumerate(path[body:]) if token not in ends), len(path) - body)
        return body + after, True

    def _rebuild(self) -> None:
        """Replace the parser: one that had an error stays in it."""
        self._parser = self._start.deep_copy()
        self._parser.try_consume_tokens([*self.tokens, *self._path])

    def _dead_end(self, ahead: int, why: str) -> DeadEnd:
        if not why.startswith("NoExtension"):
            return DeadEnd(
                f"the {_NAMES[self.grammar.kind]} grammar is too complex at position {len(self.tokens) + ahead} of the "
                f"answer ({why:.120})",
                "use fewer alternatives and optional parts, or simpler patterns",
            )
        place, why = len(self.tokens) + ahead, "no token of the vocabulary fits"
        return DeadEnd(
            f"the {_NAMES[self.grammar.kind]} grammar allows no token at position {place} of the answer ({why:.120})",
            "let every beginning have an ending in tokens that the model has, and name no token that ends answers",
        )


def _parse(grammar: Grammar, backend: LLTokenizer) -> LLMatcher:
    name, size = _NAMES[grammar.kind], len(grammar.source)
    if size > MAX_SOURCE_CHARS:
        hint = "use a smaller one"
        raise BadRequest(f"the {name} grammar has {size} characters, the limit is {MAX_SOURCE_CHARS}", hint)
    if lone := re.search("[\ud800-\udfff]", grammar.source):
        raise BadRequest(f"the {name} grammar has a lone surrogate at character {lone.start()}", "pass valid Unicode")
    ll = _llguidance()
    limits = ll.LLParserLimits(**_LIMITS)
    parser = ll.LLMatcher(backend, _lark(grammar) + _ALL_TOKENIZATIONS, log_level=0, limits=limits)
    if parser.is_error():
        raise BadRequest(_parse_error(grammar, parser.get_error()), _HINTS.get(grammar.kind, ""))
    return parser


def _check_start(start: AnswerGrammar) -> None:
    name, hint = _NAMES[start.grammar.kind], "let it allow at least one character, in tokens that the model has"
    try:
        if start.finished:
            raise BadRequest(f"the {name} grammar allows only the empty answer", hint)
    except DeadEnd as error:
        raise BadRequest(f"the {name} grammar cannot be satisfied: no token may begin an answer", hint) from error


def _lark(grammar: Grammar) -> str:
    """All kinds as Lark, the only form in which the parser takes options."""
    if grammar.kind == "json_schema":
        schema = parse_schema(grammar.source)
        if grammar.sampling == "conditional" and isinstance(schema, dict):
            schema |= ONE_SPACING
        return f"start: %json {json.dumps(schema)}"
    if grammar.kind == "json_object":
        if grammar.source:
            raise BadRequest(f"a json_object grammar has no source, got {grammar.source:.60}", "use json_schema")
        return f"start: %json {json.dumps(parse_schema(ANY_OBJECT))}"
    if grammar.kind == "regex":
        return json.loads(_llguidance().LLMatcher.grammar_from_regex(grammar.source))["grammars"][0]["lark_grammar"]
    return grammar.source


def _parse_error(grammar: Grammar, error: str) -> str:
    """llguidance's message in a line: where (of a Lark grammar, the rest is wrapped in one) and what."""
    place = re.match(r"(?:at )?(\d+)\((\d+)\): ", error)
    what = error[place.end() if place else 0 :]
    inner = re.search(r"^error: (.*)$", what, re.MULTILINE)  # the regex parser's own message
    first = what.split("\n")[0].removeprefix("failed to compile JSON schema: ")
    where = f" at line {place[1]}, column {place[2]}" if place and grammar.kind == "lark" else ""
    shown = f" {grammar.source!r:.80}" if grammar.kind == "regex" else ""
    return f"the {_NAMES[grammar.kind]} grammar{shown} is invalid{where}: {inner[1] if inner else first:.200}"
