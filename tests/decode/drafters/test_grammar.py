"""What a grammar drafts, what it prunes, and that neither changes the distribution of answers."""

from __future__ import annotations

import json
import math
import random
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tokenizers
import torch
from tokenizers import decoders, models

from forerun.core import ROOT, Draft
from forerun.decode.drafters.base import Ask
from forerun.decode.drafters.grammar import GrammarDrafter, prune, spell
from forerun.decode.grammar import AnswerGrammar, GrammarCompiler
from forerun.decode.sampling import Context, Row, choose, distribution, shape
from forerun.decode.target import SeededDice, Target
from forerun.decode.verifiers.match import Match
from forerun.models.load import open_checkpoint
from forerun.params import Grammar, SamplingParams
from forerun.tokenizer import Tokenizer
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
    return GrammarDrafter().propose([Ask(1, context, depth, nodes, array("i"))])[0]


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
    asks = [Ask(i, Context(SamplingParams(), [0], 1, 0, c), 8, 8, array("i")) for i, c in enumerate(constraints)]
    drafts = GrammarDrafter().propose(asks)
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
        for node, chance in enumerate(draft.chances):
            alternatives = int(constraint.allowed(draft.tokens[:node]).sum())
            assert (chance == 1.0) == (alternatives == 1)
            assert 0.0 < chance <= 1.0
            seen.add(chance == 1.0)
    assert seen == {True, False}


def test_the_end_is_drafted(real: GrammarCompiler, small: GrammarCompiler) -> None:
    draft = proposed(after(real, Grammar("regex", "the lamp"), "the"))
    assert texts(real, draft) == [b" lamp", b"<|im_end|>"] and draft.chances[-1] < 1.0  # this model has two ends
    draft = proposed(after(small, Grammar("regex", "the lamp"), "the lamp"))
    assert (draft.tokens, draft.chances) == ([2], [1.0])
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
        assert [(pruned.tokens[i], pruned.chances[i], pruned.sources[i]) for i in range(len(pruned))] == [
            (draft.tokens[i], draft.chances[i], draft.sources[i]) for i in kept
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


# --- The boundary trap, by enumeration. Six tokens and an end; `abc` has the usual spelling [ab, c] and two others.

LETTERS = ["<e>", "a", "b", "c", "ab", "bc", "d"]
PARAMS = SamplingParams(temperature=0.9, top_k=4)


@pytest.fixture(scope="module")
def abc() -> GrammarCompiler:
    backend = tokenizers.Tokenizer(models.BPE({text: i for i, text in enumerate(LETTERS)}, [("a", "b"), ("b", "c")]))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["<e>"])
    return GrammarCompiler(Tokenizer(backend, eos_ids=[0]), len(LETTERS) + 1)


def model(tokens: list[int]) -> torch.Tensor:
    """Logits that depend on all tokens before; likeliest is mostly what the grammar forbids."""
    generator = torch.Generator().manual_seed(sum(3**i * (token + 1) for i, token in enumerate(tokens)))
    return torch.randn(len(LETTERS) + 1, generator=generator) * 1.5


class Chances:
    """A target whose draws are all tried: `script` says which of the possible tokens is drawn next."""

    def __init__(self, target: Target, script: list[int]) -> None:
        self.target, self.script, self.at = target, script, 0
        self.mass, self.widths = 1.0, list[int]()

    def probs(self, node: int) -> torch.Tensor:
        return self.target.probs(node)

    def draw(self, node: int) -> int:
        possible = self.probs(node).nonzero().flatten().tolist()
        pick = self.script[self.at] if self.at < len(self.script) else 0
        self.at += 1
        self.widths.append(len(possible))
        self.mass *= float(self.probs(node)[possible[pick]])
        return possible[pick]


def target_of(constraint: AnswerGrammar, draft: Draft) -> Target:
    rows = [
        model([*constraint.tokens, *(draft.tokens[i] for i in draft.path(node))]) for node in range(ROOT, len(draft))
    ]
    return Target(torch.stack(rows), Context(PARAMS, list(constraint.tokens), 0, 0, constraint), draft)


def outcomes(constraint: AnswerGrammar, draft: Draft) -> Iterator[tuple[list[int], float]]:
    """Every token sequence that one step can add, with its probability."""
    script: list[int] | None = []
    while script is not None:
        chances = Chances(target_of(constraint, draft), script)
        verdict = Match().verify(draft, chances, SeededDice(0, 0))
        yield [*(draft.tokens[i] for i in verdict.path), verdict.next_token], chances.mass
        script = (script + [0] * len(chances.widths))[: len(chances.widths)]
        while script and script[-1] + 1 == chances.widths[len(script) - 1]:
            script.pop()
        script = [*script[:-1], script[-1] + 1] if script else None


def answers(
    compiler: GrammarCompiler, grammar: Grammar, draft_of: Callable[[AnswerGrammar], Draft]
) -> dict[tuple[int, ...], float]:
    """The distribution of whole answers."""
    found: dict[tuple[int, ...], float] = {}
    open_: list[tuple[list[int], float]] = [([], 1.0)]
    while open_:
        tokens, mass = open_.pop()
        constraint = compiler.constraint(grammar)
        constraint.advance(tokens)
        for more, chance in outcomes(constraint, draft_of(constraint)):
            more = more[: more.index(0) + 1] if 0 in more else more  # an end ends it, whatever was drawn after it
            answer = (*tokens, *more)
            if more[-1] == 0:
                found[answer] = found.get(answer, 0.0) + mass * chance
            else:
                open_.append((list(answer), mass * chance))
    return found


def by_hand(compiler: GrammarCompiler, grammar: Grammar) -> dict[tuple[int, ...], float]:
    """Masked softmax, token by token: nothing of drafts, verifiers or targets."""
    found: dict[tuple[int, ...], float] = {}
    open_: list[tuple[list[int], float]] = [([], 1.0)]
    while open_:
        tokens, mass = open_.pop()
        constraint = compiler.constraint(grammar)
        constraint.advance(tokens)
        row = Row(Context(PARAMS, tokens, 0, 0, constraint))
        probs = distribution(shape(model(tokens)[None], [row]), [PARAMS])[0]
        for token in probs.nonzero().flatten().tolist():
            answer, chance = (*tokens, token), mass * float(probs[token])
            if token == 0:
                found[answer] = chance
            else:
                open_.append((list(answer), chance))
    return found


@pytest.mark.parametrize("pattern", ["abc", "abcd?", "(abc|abd)(abc)?", "d{0,2}abcab"])
def test_the_boundary_trap(abc: GrammarCompiler, pattern: str) -> None:
    grammar = Grammar("regex", pattern)
    truth = by_hand(abc, grammar)
    drafted = answers(abc, grammar, lambda constraint: proposed(constraint, nodes=5))
    assert sum(truth.values()) == pytest.approx(1.0, abs=1e-5)
    assert drafted.keys() == truth.keys()
    assert all(math.isclose(drafted[answer], truth[answer], abs_tol=1e-6) for answer in truth)
    assert answers(abc, grammar, lambda _: Draft()).keys() == truth.keys()
    # It is a trap: the text is certain and its usual spelling is not, by far
    spellings = {answer: mass for answer, mass in truth.items() if abc.vocabulary.text(answer[:-1]).startswith(b"abc")}
    usual = sum(mass for answer, mass in spellings.items() if answer[:2] == (4, 3))
    assert len({answer[:2] for answer in spellings}) >= 2 and usual < 0.95 * sum(spellings.values())


def test_all_spellings_stay_allowed(abc: GrammarCompiler) -> None:
    constraint = abc.constraint(Grammar("regex", "abc"))
    assert constraint.certain_text(()) == b"abc"
    assert proposed(constraint).tokens == [4, 3, 0] == [*abc.vocabulary.tokenizer.encode("abc"), 0]
    assert [constraint.accepts((), spelling) for spelling in ([4, 3, 0], [1, 5, 0], [1, 2, 3, 0])] == [3, 3, 4]
    assert constraint.allowed(()).nonzero().flatten().tolist() == [1, 4]
    assert constraint.allowed([1]).nonzero().flatten().tolist() == [2, 5]


def test_seeded_answers_are_plain_decodings(abc: GrammarCompiler) -> None:
    """Token for token, with drafts that other drafters made and `prune` went over, too."""
    grammar, rng, accepted = Grammar("regex", "(abc|abd|d){2,4}"), random.Random(2), 0
    for seed in range(60):
        plain, constraint = list[int](), abc.constraint(grammar)
        while plain[-1:] != [0]:
            plain += choose(model(plain)[None], [Row(Context(PARAMS, plain, 0, seed, constraint))])
            constraint.advance(plain[-1:])
        answer, constraint = list[int](), abc.constraint(grammar)
        while 0 not in answer:
            draft = proposed(constraint) if rng.random() < 0.5 else random_tree(rng, constraint, 8, len(LETTERS))
            draft = prune(draft, constraint)
            target = target_of(constraint, draft)
            target.context.seed = seed
            verdict = Match().verify(draft, target, SeededDice(seed, len(answer)))
            more = [*(draft.tokens[i] for i in verdict.path), verdict.next_token]
            more = more[: more.index(0) + 1] if 0 in more else more
            accepted += len(more) - 1
            constraint.advance(more)
            answer += more
        assert answer == plain
    assert accepted > 60
