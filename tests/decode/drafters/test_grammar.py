"""What a grammar drafts, what it prunes, and that neither changes the distribution of answers."""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from forerun.core import ROOT, Draft
from forerun.decode.drafters.base import DraftRequest
from forerun.decode.drafters.grammar import GrammarDrafter, prune, spell
from forerun.decode.grammar import AnswerGrammar, GrammarCompiler
from forerun.decode.sampling import Context
from forerun.models.formats.checkpoint import open_checkpoint
from forerun.params import Grammar, SamplingParams
from tests.decode.test_grammar import letters

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "integer"}},
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "address"],
    "additionalProperties": False,
}
SCHEMA = Grammar("json_schema", json.dumps(PERSON))


@pytest.fixture(scope="module")
def real(smollm2: Path) -> GrammarCompiler:
    tokenizer = open_checkpoint(smollm2).tokenizer()
    return GrammarCompiler(tokenizer, tokenizer.vocab_size)


@pytest.fixture(scope="module")
def small(tiny_folder: Callable[[str], Path]) -> GrammarCompiler:
    tokenizer = open_checkpoint(tiny_folder("llama")).tokenizer()
    return GrammarCompiler(tokenizer, tokenizer.vocab_size + 8)


def proposed(constraint: AnswerGrammar | None, depth: int = 32, nodes: int = 32) -> Draft:
    context = Context(SamplingParams(), [0], 1, 0, constraint)
    return GrammarDrafter().propose([DraftRequest(1, context, depth, nodes, array("i"))])[0]


def texts(compiler: GrammarCompiler, draft: Draft) -> list[bytes]:
    return [compiler.vocabulary.tokens[token] for token in draft.tokens]


def after(compiler: GrammarCompiler, grammar: Grammar, text: str) -> AnswerGrammar:
    constraint = compiler.constraint(grammar)
    constraint.advance(compiler.vocabulary.tokenizer.encode(text))
    return constraint


def test_nothing_without_a_grammar_or_a_budget(real: GrammarCompiler) -> None:
    assert len(proposed(None)) == 0
    constraint = real.constraint(SCHEMA)
    assert len(proposed(constraint, depth=0)) == len(proposed(constraint, nodes=0)) == 0
    whole = proposed(constraint)
    for limit in range(1, len(whole) + 1):
        assert (
            proposed(constraint, depth=limit).tokens == whole.tokens[:limit] == proposed(constraint, nodes=limit).tokens
        )


def test_one_draft_for_each_ask_in_order(real: GrammarCompiler) -> None:
    constraints = [None, real.constraint(SCHEMA), None, real.constraint(Grammar("regex", "2024"))]
    requests = [
        DraftRequest(i, Context(SamplingParams(), [0], 1, 0, c), 8, 8, array("i")) for i, c in enumerate(constraints)
    ]
    drafts = GrammarDrafter().propose(requests)
    assert [b"".join(texts(real, draft)) for draft in drafts] == [b"", b'{\n  "name": "', b"", b"2024<|im_end|>"]
    assert all(draft.problem(real.vocabulary.size) is None for draft in drafts)


def test_certain_text_in_its_usual_spelling(real: GrammarCompiler) -> None:
    constraint = real.constraint(Grammar("regex", "Hello world, the answer of 2024 is: [ab]"))
    draft = proposed(constraint)
    encoded = real.vocabulary.tokenizer.encode("Hello world, the answer of 2024 is: a")
    assert draft.tokens[:-1] == encoded[: len(draft) - 1] and len(draft) >= len(encoded) - 1
    assert draft.parents == list(range(ROOT, len(draft) - 1)) and set(draft.sources) == {"grammar"}


def test_only_tokens_without_alternative_are_certain(real: GrammarCompiler) -> None:
    seen = set()
    for grammar in (SCHEMA, Grammar("regex", "Hello world, 2024 [ab]"), Grammar("lark", 'start: "a" <|im_start|> "1"')):
        constraint = real.constraint(grammar)
        draft = proposed(constraint)
        for node, prob in enumerate(draft.probs):
            alternatives = int(constraint.allowed(draft.tokens[:node]).sum())
            assert (prob == 1.0) == (alternatives == 1)
            assert 0.0 < prob <= 1.0
            seen.add(prob == 1.0)
    assert seen == {True, False}


def test_the_end_is_drafted(real: GrammarCompiler, small: GrammarCompiler) -> None:
    draft = proposed(after(real, Grammar("regex", "the lamp"), "the"))
    assert texts(real, draft) == [b" lamp", b"<|im_end|>"] and draft.probs[-1] < 1.0  # this model has two ends
    draft = proposed(after(small, Grammar("regex", "the lamp"), "the lamp"))
    assert (draft.tokens, draft.probs) == ([2], [1.0])
    ended = small.constraint(Grammar("regex", "a"))
    ended.advance([*small.vocabulary.tokenizer.encode("a"), 2])
    assert set(proposed(ended).tokens) <= {2}


def test_spacing_goes_on_as_it_began(real: GrammarCompiler) -> None:
    for answer, expected in [
        ("", b'{\n  "name": "'),
        ("{ ", b'"name": "'),
        ("{\n ", b' "name": "'),
        ('{"name": "Ada",', b' "address": {"street": "'),
        ('{"name":"Ada",', b' "address":{"street":"'),
        ('{\n  "name": "Ada",', b'\n  "address": {\n    "street": "'),
        ('{\n\t"name": "Ada",\n\t"address": {\n\t\t"street": "x",', b'\n\t\t"zip":'),
        ('{\n  "name": "Ada",\n  "address": {"street": "x",', b' "zip":'),
        ('{\n  "name": "Ada",\n  "address": {\n    "street": "x",\n    "zip": 1\n  }', b"\n}<|im_end|>"),
        ('{"name": "Ada", "address": {"street": "a, b', b""),
    ]:
        draft = proposed(after(real, SCHEMA, answer) if answer else real.constraint(SCHEMA))
        assert b"".join(texts(real, draft)) == expected, answer


def test_drafts_are_always_allowed(small: GrammarCompiler) -> None:
    """Random answers, oddly spelt: whatever is drafted on the way may be said."""
    grammars = [SCHEMA, Grammar("regex", "(the lamp turns |a ship ){1,4}é+!"), Grammar("json_object")]
    rng, drafted = random.Random(3), 0
    for grammar in grammars * 2:
        constraint = small.constraint(grammar)
        for _ in range(25):
            draft = proposed(constraint, nodes=12)
            assert draft.problem(small.vocabulary.size) is None and len(draft) <= 12
            assert prune(draft, constraint) is draft
            drafted += len(draft)
            constraint.advance(draft.tokens[: rng.randrange(len(draft) + 1)])
            token = rng.choice(constraint.allowed(()).nonzero().flatten().tolist())
            constraint.advance([token])
            if token in small.vocabulary.end_ids:
                break
    assert drafted > 50


def test_a_dead_end_ends_a_draft_and_not_the_request(small: GrammarCompiler) -> None:
    grammar = Grammar("lark", 'start: "the" NONE\nNONE: /x/ & /y/')
    constraint, dead = small.constraint(grammar), after(small, grammar, "the")
    draft = proposed(constraint)
    assert b"".join(texts(small, draft)) == b"the" and prune(draft, constraint) is draft
    assert len(proposed(dead)) == 0


def random_tree(rng: random.Random, constraint: AnswerGrammar, size: int, vocab: int) -> Draft:
    """Half of its tokens may follow their parents, and the others most likely may not."""
    draft, taken = Draft(), set()
    for _ in range(size):
        parent = rng.randrange(ROOT, len(draft))
        path = [draft.tokens[i] for i in draft.path(parent)]
        token = rng.randrange(vocab)
        if rng.random() < 0.6 and constraint.accepts((), path) == len(path):
            token = rng.choice(constraint.allowed(path).nonzero().flatten().tolist())
        if (parent, token) not in taken:
            taken.add((parent, token))
            draft.add(token, parent, rng.random(), f"drafter {rng.randrange(3)}")
    return draft


def test_prune_keeps_what_is_allowed(small: GrammarCompiler) -> None:
    rng, counts = random.Random(11), set()
    for round_ in range(30):
        constraint = small.constraint(SCHEMA if round_ % 2 else Grammar("regex", "[a-z ]{3,9}!+"))
        draft = random_tree(rng, constraint, 24, small.vocabulary.size)
        kept: list[int] = []
        for node, parent in enumerate(draft.parents):
            path = [draft.tokens[i] for i in draft.path(parent)]
            if parent in [ROOT, *kept] and bool(constraint.allowed(path)[draft.tokens[node]]):
                kept.append(node)
        pruned = prune(draft, constraint)
        assert [(pruned.tokens[i], pruned.probs[i], pruned.sources[i]) for i in range(len(pruned))] == [
            (draft.tokens[i], draft.probs[i], draft.sources[i]) for i in kept
        ]
        assert [pruned.path(i) for i in range(len(pruned))] == [[kept.index(j) for j in draft.path(i)] for i in kept]
        counts.add(len(kept) < len(draft))
    assert True in counts


def test_prune_leaves_alone_what_it_must(small: GrammarCompiler) -> None:
    constraint = small.constraint(Grammar("regex", "the"))
    drawn = Draft.chain([5, 6], [0.5, 0.5], "model")
    drawn.proposals = {ROOT: torch.ones(3), 0: torch.ones(3)}
    assert prune(drawn, constraint) is drawn  # lossless only whole
    plain = Draft.chain([5, 6], [0.5, 0.5], "lookup")
    assert prune(plain, None) is plain and len(prune(plain, constraint)) == 0


@pytest.mark.parametrize("text", ["", "the lamp", ' "name": "', "  x", "é\n", "\u65e5\u672c", "a</s>b"])
def test_spelling_is_the_text(real: GrammarCompiler, small: GrammarCompiler, text: str) -> None:
    for compiler in (real, small):
        tokenizer = compiler.vocabulary.tokenizer
        for before in ("", "a", '{"', " \u65e5"):
            ids = spell(tokenizer, tokenizer.encode(before), text.encode())
            assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
        assert spell(tokenizer, [], text.encode() + "é".encode()[:1]) == spell(tokenizer, [], text.encode())


def test_spelling_without_a_space_of_its_own() -> None:
    """SentencePiece puts a space before every text it is given; a draft goes on where the answer stands."""
    tokenizer = letters("\u2581", *"abc", "ab", "\u2581ab", "bc")
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    constraint = compiler.constraint(Grammar("regex", "ab abc"))
    assert texts(compiler, proposed(constraint)) == [b"ab", b" ab", b"c", b"</s>"]
    constraint.advance([compiler.vocabulary.tokens.index(b"b", 200) - 1])  # the letter a, not its byte
    assert texts(compiler, proposed(constraint)) == [b"b", b" ab", b"c", b"</s>"]
